"""Clipping bounds an example's whole contribution, however devices split the model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lsdp as lsdp

CLIP = 0.5
PARAMS = {
    "w": jax.random.normal(jax.random.key(0), (4, 16)),
    "v": jax.random.normal(jax.random.key(1), (16,)),
    "b": jnp.array([0.5, -1.0, 2.0, 0.1]),
}
BATCH = jax.random.normal(jax.random.key(2), (8, 4)).at[3].set(jnp.nan)
SPECS = {"w": jax.P(None, "model"), "v": jax.P("model"), "b": jax.P()}


def mesh_of(kind, shape=(2, 4)):
    types = (getattr(jax.sharding.AxisType, kind),) * 2
    return jax.make_mesh(shape, ("data", "model"), axis_types=types)


def part(params, x):
    """Return the contribution of some hidden units to the loss."""
    return jnp.sum(jnp.tanh((x + params["b"]) @ params["w"]) * params["v"])


def with_psum(params, x):
    return jnp.square(jax.lax.psum(part(params, x), "model"))


def alone(params, x):
    """Return a loss for each shard; the loss of the whole model is their sum."""
    return part(params, x)


def by_tokens(params, x):
    """Return a loss to which each shard adds some entries of the example, with whole parameters."""
    mine = jax.lax.axis_index("model") == jnp.arange(4)
    return jnp.square(jax.lax.psum(part(params, jnp.where(mine, x, 0)), "model"))


def by_tokens_at_once(params, x):
    rows = jnp.where(jnp.eye(4, dtype=bool), x, 0)
    return jnp.square(sum(part(params, row) for row in rows))


def can_map_psum():
    """Return whether JAX can map a psum inside shard_map; JAX 0.8.2 raises an internal error."""
    mapped = jax.vmap(lambda x: jax.lax.psum(x, "model"))
    run = jax.shard_map(mapped, mesh=mesh_of("Auto"), in_specs=jax.P("model"), out_specs=jax.P())
    try:
        jax.eval_shape(run, jnp.zeros(8))
    except TypeError:
        return False
    return True


maps_psum = pytest.mark.skipif(not can_map_psum(), reason="JAX cannot map a psum in shard_map")

LOSSES = {
    "with psum": (with_psum, lambda p, x: jnp.square(part(p, x)), SPECS),
    "without psum": (alone, part, SPECS),
    "by tokens": (by_tokens, by_tokens_at_once, dict.fromkeys(SPECS, jax.P())),  # replicated
}


@functools.cache
def gradients_on_one_device(loss):
    return jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(PARAMS, BATCH)


def expected(loss, clip_norm):
    """Return Σᵢ gᵢ·min(1, C/‖gᵢ‖) of the whole model on one device, in float64."""
    grads = gradients_on_one_device(loss)
    rows = {name: np.asarray(g, np.float64).reshape(8, -1) for name, g in grads.items()}
    norms = {name: np.linalg.norm(row, axis=1) for name, row in rows.items()}
    if not isinstance(clip_norm, dict):
        norms = dict.fromkeys(norms, np.sqrt(sum(norm**2 for norm in norms.values())))
        clip_norm = dict.fromkeys(norms, clip_norm)
    counts = np.isfinite(np.sum([*norms.values()], axis=0))
    sums = {}
    for name, row in rows.items():
        factors = np.minimum(1, clip_norm[name] / norms[name])
        sums[name] = (factors[counts, None] * row[counts]).sum(axis=0).reshape(PARAMS[name].shape)
    return sums


def clipped_in_shard_map(loss, specs, **options):
    """Return the clipped sum; each device has its part of the model and of the batch."""
    grad = lsdp.clipped_grad(loss, **options)

    def run(params, batch):
        return jax.lax.psum(grad(params, batch), "data")

    return jax.jit(
        jax.shard_map(run, mesh=mesh_of("Auto"), in_specs=(specs, jax.P("data")), out_specs=specs)
    )(PARAMS, BATCH)


def assert_same(total, sums):
    for name, leaf in sums.items():
        np.testing.assert_allclose(total[name].value, leaf, atol=1e-5)


@maps_psum
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    "options",
    [
        {"clip_norm": CLIP},
        {"clip_norm": CLIP, "microbatch_size": 3},
        {"clip_norm": {"w": 0.5, "v": 0.3, "b": 0.1}},
    ],
    ids=["one norm", "microbatches", "groups"],
)
def test_norms_are_taken_over_all_parts_of_the_model(name, options):
    in_shard_map, whole, specs = LOSSES[name]
    replicated = "model" if name == "by tokens" else ()
    total = clipped_in_shard_map(in_shard_map, specs, **options, replicated_axes=replicated)
    assert_same(total, expected(whole, options["clip_norm"]))


@maps_psum
@pytest.mark.parametrize("style", ["threshold", "automatic"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_no_whole_contribution_exceeds_the_clip_norm(dtype, style):
    """Some examples are tiny, huge or masked, or not finite in one part of the model only."""
    small = 0.01  # far below all gradients, except those of the tiny example
    params = jax.tree.map(lambda x: x.astype(dtype), PARAMS)
    sizes = jnp.array([1.0, 1e-3, 1e3, jnp.nan, 1e-8, 30.0, jnp.inf, 0.1], dtype)
    batch = jnp.ones((8, 4), dtype) * sizes[:, None]
    grad = lsdp.clipped_grad(part, clip_norm=small, clip_style=style)
    spread = jax.jit(
        jax.shard_map(
            grad, mesh=mesh_of("Auto", (1, 8)), in_specs=(SPECS, jax.P(), jax.P()), out_specs=SPECS
        )
    )

    def length(params, mask):
        leaves = jax.tree.leaves(spread(params, batch, jnp.asarray(mask)))
        return np.sqrt(sum(np.sum(np.asarray(x, np.float64) ** 2) for x in leaves))

    lengths = [length(params, np.arange(8) == i) for i in range(8)]
    assert max(lengths) <= small * (1 + 1e-6) and lengths[0] > 0.9 * small
    assert lengths[3] == lengths[6] == length(params, np.zeros(8, bool)) == 0
    broken = {**params, "v": params["v"].at[-1].set(jnp.nan)}  # only on the last device
    assert length(broken, np.ones(8, bool)) == 0


def test_bookkeeping_is_refused_where_shards_split_an_example():
    for loss, _, specs in LOSSES.values():
        with pytest.raises(ValueError, match="`engine` must be 'auto' or 'vmap'"):
            clipped_in_shard_map(
                loss, specs, clip_norm=CLIP, engine="bookkeeping", replicated_axes="model"
            )


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_under_jit_norms_are_taken_over_sharded_parameters(kind):
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        params = {
            name: jax.device_put(x, jax.NamedSharding(mesh, SPECS[name]))
            for name, x in PARAMS.items()
        }
        batch = jax.device_put(BATCH, jax.NamedSharding(mesh, jax.P("data")))
        total = jax.jit(lsdp.clipped_grad(part, clip_norm=CLIP))(params, batch)
    assert_same(total, expected(part, CLIP))


@pytest.mark.parametrize("loss", [with_psum, alone])
def test_split_parameters_are_refused_where_jax_tracks_nothing(loss):
    def run(**options):
        grad = lsdp.clipped_grad(loss, clip_norm=CLIP, **options)
        mapped = jax.shard_map(
            grad,
            mesh=mesh_of("Auto"),
            in_specs=(SPECS, jax.P("data")),
            out_specs=SPECS,
            check_vma=False,
        )
        jax.eval_shape(mapped, PARAMS, BATCH)

    with pytest.raises(
        ValueError, match=r"`replicated_axes` must name .* got none for data, model"
    ):
        run()
    with pytest.raises(ValueError, match=r"`replicated_axes` must name .* got none for model"):
        run(replicated_axes="data")


def test_inside_pmap_the_axis_of_the_batch_must_be_named():
    grads = [lsdp.clipped_grad(part, clip_norm=CLIP, replicated_axes=axes) for axes in ((), "data")]
    split = BATCH.reshape(8, 1, 4)
    with pytest.raises(ValueError, match="`replicated_axes` must name"):
        jax.pmap(grads[0], axis_name="data", in_axes=(None, 0))(PARAMS, split)
    sums = jax.pmap(grads[1], axis_name="data", in_axes=(None, 0))(PARAMS, split)
    assert_same(jax.tree.map(lambda x: x.sum(axis=0), sums), expected(part, CLIP))


@maps_psum
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("loss", [with_psum, alone])
def test_stacked_gradients_of_split_parameters_are_refused(loss, check_vma):
    link = lsdp.clip_per_example(CLIP, replicated_axes="data")

    def run(params, batch):
        stacked = jax.vmap(jax.grad(loss), (None, 0))(params, batch)
        return link.update(stacked, link.init(params), params)[0]

    mapped = jax.shard_map(
        run, mesh=mesh_of("Auto"), in_specs=(SPECS, jax.P()), out_specs=SPECS, check_vma=check_vma
    )
    with pytest.raises(ValueError, match="`replicated_axes` must name"):
        jax.eval_shape(mapped, PARAMS, BATCH)


@pytest.mark.parametrize("check_vma", [True, False])
def test_stacked_gradients_of_split_batches_are_clipped(check_vma):
    link = lsdp.clip_per_example(CLIP, replicated_axes=("data", "model"))
    axes = ("data", "model")

    def run(params, batch):
        vary = (
            functools.partial(jax.lax.pcast, axis_name=axes, to="varying")
            if check_vma
            else lambda x: x
        )
        moving = jax.tree.map(vary, params)
        stacked = jax.vmap(jax.grad(part), (None, 0))(moving, batch)
        return jax.lax.psum(link.update(stacked, link.init(params), params)[0], axes)

    mapped = jax.shard_map(
        run,
        mesh=mesh_of("Auto"),
        in_specs=(jax.P(), jax.P(axes)),
        out_specs=jax.P(),
        check_vma=check_vma,
    )
    total = jax.jit(mapped)(PARAMS, BATCH)
    for name, leaf in expected(part, CLIP).items():
        np.testing.assert_allclose(total[name], leaf, atol=1e-5)


def with_varying_keys(params, batch, mask):
    index = jax.lax.axis_index("model")
    keys = jax.vmap(jax.random.fold_in, (0, None))(jax.random.split(jax.random.key(0), 8), index)
    return params, (batch, keys), mask


def with_a_varying_mask(params, batch, mask):
    return params, (batch, batch), jax.lax.pcast(mask, ("model",), to="varying")


def with_varying_rows(params, batch, mask):
    return params, (jax.lax.pcast(batch, ("model",), to="varying"), batch), mask


@pytest.mark.parametrize("change", [with_varying_keys, with_a_varying_mask, with_varying_rows])
def test_inputs_that_vary_like_split_parameters_are_refused(change):
    """Such an axis of the parameters could not be told from an axis of the batch."""
    grad = lsdp.clipped_grad(lambda p, example: part(p, example[0]), clip_norm=CLIP)
    mapped = jax.shard_map(
        lambda *inputs: grad(*change(*inputs)),
        mesh=mesh_of("Auto", (1, 8)),
        in_specs=(SPECS, jax.P(), jax.P()),
        out_specs=SPECS,
    )
    with pytest.raises(ValueError, match=r"`replicated_axes` must name .* none for model"):
        jax.eval_shape(mapped, PARAMS, BATCH, jnp.ones(8, bool))


def test_a_tracked_shard_map_inside_an_untracked_one_is_refused():
    """In the inner shard_map, parameters that the outer shard_map splits look replicated."""

    def inner(params, batch):
        return jax.lax.psum(lsdp.clipped_grad(part, clip_norm=CLIP)(params, batch), "data")

    def outer(params, batch):
        specs = (jax.P(), jax.P("data"))
        return jax.shard_map(inner, in_specs=specs, out_specs=jax.P(), axis_names={"data"})(
            params, batch
        )

    mapped = jax.shard_map(
        outer,
        mesh=mesh_of("Auto"),
        in_specs=(SPECS, jax.P()),
        out_specs=SPECS,
        axis_names={"model"},
        check_vma=False,
    )
    with pytest.raises(ValueError, match=r"`replicated_axes` must name .* none for model"):
        jax.eval_shape(mapped, PARAMS, BATCH)


def test_gathered_parameters_are_accepted_if_the_caller_names_the_axis():
    def run(params, batch):
        whole = jax.lax.all_gather(params["v"], "model", tiled=True)
        grad = lsdp.clipped_grad(jnp.vdot, clip_norm=CLIP, replicated_axes="model")
        return jax.lax.psum(grad(whole, batch), ("data", "model"))

    mapped = jax.shard_map(
        run,
        mesh=mesh_of("Auto"),
        in_specs=({"v": jax.P("model")}, jax.P(("data", "model"))),
        out_specs=jax.P(),
    )
    batch = jnp.concatenate([BATCH] * 4, axis=1)
    wanted = jax.jit(lsdp.clipped_grad(jnp.vdot, clip_norm=CLIP))(PARAMS["v"], batch)
    found = jax.jit(mapped)({"v": PARAMS["v"]}, batch)
    np.testing.assert_allclose(found.value, wanted.value, atol=1e-5)


@maps_psum
def test_stacked_gradients_that_vary_over_an_unnamed_axis_are_refused():
    link = lsdp.clip_per_example(CLIP, replicated_axes="data")

    def run(params, batch):
        moving = jax.tree.map(lambda x: jax.lax.pcast(x, ("model",), to="varying"), params)
        stacked = jax.vmap(jax.grad(part), (None, 0))(moving, batch)
        return jax.lax.psum(link.update(stacked, link.init(params), params)[0], "model")

    mapped = jax.shard_map(
        run, mesh=mesh_of("Auto"), in_specs=(jax.P(), jax.P()), out_specs=jax.P()
    )
    with pytest.raises(ValueError, match="must name the mesh axes over which stacked gradients"):
        jax.eval_shape(mapped, PARAMS, BATCH)


@pytest.mark.parametrize("engine", ["bookkeeping", "vmap"])
@pytest.mark.parametrize(
    "collective",
    [
        lambda x: x - jax.lax.pmean(x, "shards"),
        lambda x: jax.lax.all_gather(x, "shards").sum(axis=0),
        lambda x: jax.lax.ppermute(x, "shards", [(0, 1), (1, 0)]),
        lambda x: jax.lax.pmax(x, ("shards",)),
        lambda x: jax.lax.scan(lambda c, _: (c + jax.lax.psum(x, "shards"), None), x, None, 2)[0],
    ],
    ids=["pmean", "all_gather", "ppermute", "pmax", "in a scan"],
)
def test_collectives_over_the_axis_of_a_vmap_are_refused(collective, engine):
    grad = lsdp.clipped_grad(lambda w, x: jnp.vdot(w, collective(x)), clip_norm=CLIP, engine=engine)
    mapped = jax.vmap(grad, (None, 0), axis_name="shards")
    with pytest.raises(ValueError, match=r"must not look across the shards .* axis 'shards'"):
        jax.eval_shape(mapped, jnp.ones(4), jnp.ones((2, 3, 4)))


@maps_psum
def test_a_loss_may_use_collectives_over_axes_that_it_maps_itself():
    """The axis of an inner vmap or shard_map lies within one example."""

    def heads(w, x):
        return jnp.sum(jax.vmap(lambda y: y * jax.lax.psum(y, "heads"), axis_name="heads")(w * x))

    inner = jax.shard_map(
        lambda w, x: jax.lax.psum(jnp.vdot(w, x), "model"),
        mesh=mesh_of("Auto"),
        in_specs=(jax.P("model"), jax.P("model")),
        out_specs=jax.P(),
        axis_names={"model"},
    )
    for loss, plain in ((heads, lambda w, x: jnp.square(jnp.vdot(w, x))), (inner, jnp.vdot)):
        found, wanted = (
            jax.jit(lsdp.clipped_grad(f, clip_norm=CLIP))(jnp.ones(4), BATCH[:3]).value
            for f in (loss, plain)
        )
        np.testing.assert_allclose(found, wanted, atol=1e-6)
