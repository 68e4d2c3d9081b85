"""A loss that could mix or reveal examples is refused, and no other loss is."""

from functools import cache, partial

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import optax_lsdp as lsdp
from optax_lsdp import clipping, training

PARAMS, BATCH = jnp.ones(3), jnp.arange(6.0).reshape(2, 3)
CLIP = 1.0


def doubled(x):
    return 2 * np.asarray(x)


def by_callback(method):
    def loss(w, x):
        return jnp.vdot(w, jax.pure_callback(doubled, x, x, vmap_method=method))

    return loss


def by_error(w, x):
    return jnp.vdot(w, 2 * eqx.error_if(x, x > 100, "too large"))


def by_one_of_several_errors(w, x):
    wrong = jnp.where(x[0] > 100, 1, 0)
    return jnp.vdot(w, 2 * eqxi.branched_error_if(x, x[0] > 100, wrong, ["large", "huge"]))


def plain(w, x):
    return jnp.vdot(w, 2 * x)


@cache
def clip(loss, engine="bookkeeping"):
    """Return the clipped sum of a loss, compiled."""
    return jax.jit(lsdp.clipped_grad(loss, clip_norm=CLIP, engine=engine))(PARAMS, BATCH).value


@pytest.mark.parametrize("engine", ["bookkeeping", "vmap"])
@pytest.mark.parametrize(
    "loss",
    [by_callback("sequential"), by_error, by_one_of_several_errors],
    ids=["one example at a time", "error", "one of several errors"],
)
def test_callbacks_that_see_one_example_or_only_raise_are_accepted(loss, engine):
    np.testing.assert_allclose(clip(loss, engine), clip(plain, engine), rtol=1e-6)


def printing(w, x):
    jax.debug.print("{}", x)
    return plain(w, x)


def telling(w, x):
    jax.debug.callback(doubled, x)
    return plain(w, x)


def writing(w, x):
    return jnp.vdot(w, io_callback(doubled, x, x))


mixing = jax.custom_batching.custom_vmap(lambda x: 2 * x)
mixing.def_vmap(lambda size, batched, x: (2 * x, True))

REFUSED = {
    "doubled": by_callback("broadcast_all"),
    "debug_print": printing,
    "debug_callback": telling,
    "io_callback": writing,
    "custom_vmap_call": lambda w, x: jnp.vdot(w, mixing(x)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_callbacks_are_refused_by_name_unless_the_caller_vouches_for_them(name):
    vouched = clipping.vouch_for_callbacks(REFUSED[name], name)
    plan = lsdp.PrivacyPlan(
        dataset_size=9, expected_batch_size=3, steps=1, delta=1e-3, noise_multiplier=1.0
    )
    wrapped = training.keep_batch_axis(lambda w, x: vouched(w, x[0]))
    for make in (lsdp.clipped_grad, lsdp.value_and_clipped_grad):
        with pytest.raises(ValueError, match=f"neither mix nor reveal examples, .*{name}"):
            jax.eval_shape(make(REFUSED[name], clip_norm=CLIP), PARAMS, BATCH)
        others = clipping.vouch_for_callbacks(REFUSED[name], "another")
        called = "doubled" if name == "io_callback" else name  # the message has either name
        with pytest.raises(ValueError, match=rf"vouch_for_callbacks\(loss_fn, ['\"]{called}"):
            jax.eval_shape(make(others, clip_norm=CLIP), PARAMS, BATCH)
    if name != "io_callback":  # vmap has no rule for it
        grad = plan.clipped_grad(wrapped)
        jax.eval_shape(grad, PARAMS, BATCH, jnp.ones(2, bool))
        np.testing.assert_allclose(clip(vouched), clip(plain), rtol=1e-6)


BY_EQUINOX = {
    "unvmap_max": lambda w, x: jnp.vdot(w, x) * eqxi.unvmap_max(x),
    "unvmap_any": lambda w, x: jnp.where(eqxi.unvmap_any(x > 5), 1.0, -1.0) * jnp.vdot(w, x),
    "unvmap_all": lambda w, x: jax.lax.cond(
        eqxi.unvmap_all(x > 5), lambda x: -jnp.vdot(w, x), lambda x: jnp.vdot(w, x), x
    ),
}


@pytest.mark.parametrize("name", BY_EQUINOX)
def test_equinox_reductions_over_the_batch_are_refused_outside_its_own_loops(name):
    with pytest.raises(ValueError, match=f"got Equinox's {name}, which computes one value"):
        jax.eval_shape(lsdp.clipped_grad(BY_EQUINOX[name], clip_norm=CLIP), PARAMS, BATCH)

    def looped(w, x):
        def body(c):
            return c[0] + 1, jnp.tanh(c[1] * w)

        return jnp.sum(
            eqxi.while_loop(lambda c: c[0] < 3, body, (0, x), max_steps=4, kind="bounded")[1]
        )

    jax.eval_shape(lsdp.clipped_grad(looped, clip_norm=CLIP), PARAMS, BATCH)


def test_foreign_functions_that_see_a_whole_batch_are_refused():
    def loss(method, w, x):
        kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jnp.vdot(w, jax.ffi.ffi_call("rms_norm", kind, vmap_method=method)(x))

    def run(method):
        grad = lsdp.clipped_grad(partial(loss, method), clip_norm=CLIP)
        jax.eval_shape(grad, PARAMS, BATCH)

    run("sequential")
    with pytest.raises(ValueError, match=r"ffi_call of 'rms_norm', .*'rms_norm'\)"):
        run("broadcast_all")


def test_a_sum_inside_an_untracked_shard_map_is_refused():
    """Under vmap, the axis of an untracked shard_map may hold other examples."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(check_vma, w, x):
        inner = jax.shard_map(
            lambda w, x: jax.lax.psum(jnp.vdot(w, x), "data"),
            mesh=mesh,
            in_specs=(jax.P(), jax.P()),
            out_specs=jax.P(),
            check_vma=check_vma,
        )
        return inner(w, x)

    with pytest.raises(ValueError, match="must not look across the shards"):
        jax.eval_shape(lsdp.clipped_grad(partial(loss, False), clip_norm=CLIP), PARAMS, BATCH)


def test_small_weights_in_long_loops_store_no_operands():
    """Solvers of neural differential equations have long loops, and rematerialise them."""

    def loss(params, x):
        @jax.checkpoint
        def step(h, _):
            return h + 0.01 * jnp.tanh(h @ params["w"] + params["b"]) @ params["v"], None

        return jnp.sum(jax.lax.scan(step, x, None, length=200)[0] ** 2)

    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "w": jax.random.normal(keys[0], (3, 5)),
        "v": jax.random.normal(keys[1], (5, 3)),
        "b": jnp.zeros(5),
    }
    batch = jax.random.normal(keys[2], (4, 3))
    rows = lsdp.explain_clipping(loss, params, batch[0]).rows
    assert {row.strategy for row in rows} == {"materialised"}
    book, vmap = (
        jax.jit(lsdp.clipped_grad(loss, clip_norm=CLIP, engine=engine))
        .lower(params, batch)
        .compile()
        for engine in ("bookkeeping", "vmap")
    )
    for name, leaf in book(params, batch).items():
        np.testing.assert_allclose(leaf.value, vmap(params, batch)[name].value, atol=1e-5)
    held = [program.memory_analysis().temp_size_in_bytes for program in (book, vmap)]
    assert held[0] <= 1.2 * held[1]


@pytest.mark.parametrize("engine", ["bookkeeping", "vmap"])
def test_convolutions_that_crop_by_negative_padding_are_refused(engine):
    """XLA for CPUs computes them from pixels of other examples."""

    def convolved(x, w, padding):
        dims = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, w, (1, 1), padding, dimension_numbers=dims)

    def loss(padding, w, x):
        inner = jnp.tanh(convolved(x[None], w[0], "VALID"))
        return jnp.sum(jnp.tanh(convolved(inner, w[1], (padding, (0, 0)))) ** 2)

    w, batch = (jnp.ones((2, 1, 3, 3)), jnp.ones((2, 1, 3, 2))), jnp.ones((2, 9, 8, 3))
    for padding, where in (((-1, 1), "1\\);"), ((-1, 0), "0\\);"), ((3, 0), "in its gradient;")):
        grad = lsdp.clipped_grad(partial(loss, padding), clip_norm=CLIP, engine=engine)
        with pytest.raises(ValueError, match=f"`loss_fn` must not crop the image .*{where} crop"):
            jax.eval_shape(grad, w, batch)
    usual = lsdp.clipped_grad(partial(loss, (1, 0)), clip_norm=CLIP, engine=engine)
    jax.eval_shape(usual, w, batch)
