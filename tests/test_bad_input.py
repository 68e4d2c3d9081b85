"""Bad input gets one sentence that names the argument, the demand, the value and the remedy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lsdp as lsdp

KEY = jax.random.key(0)
PARAMS = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
STACK = {"w": jnp.ones((5, 2, 3)), "b": jnp.ones((5, 3))}
GOOD = dict(clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=4, key=KEY)


def loss(params, x):
    return jnp.vdot(params["w"], x["w"]) + jnp.vdot(params["b"], x["b"])


def privatize(**changes):
    return lsdp.privatize(optax.sgd(1.0), **{**GOOD, **changes})


def grad(params=PARAMS, batch=STACK, mask=None, loss_fn=loss, clip_norm=1.0, **kwargs):
    return lsdp.clipped_grad(loss_fn, clip_norm=clip_norm, **kwargs)(params, batch, mask)


def update(updates, params=PARAMS, **changes):
    tx = privatize(**changes)
    return tx.update(updates, tx.init(PARAMS), params)


def marked(clip_norm=1.0):
    """Return a marked sum, compiled."""
    return jax.jit(lambda batch: grad(batch=batch, clip_norm=clip_norm))(STACK)


def half_marked():
    return {**marked(), "b": jnp.ones(3)}


def smooth(smoothing, updates=None, **kwargs):
    tx = lsdp.laplacian_smooth(smoothing, **kwargs)
    return tx.update(jnp.ones(3) if updates is None else updates, tx.init(None))[0]


CASES = {
    # numbers
    "clip norm zero": (lambda: privatize(clip_norm=0.0), "`clip_norm` .* positive.* got 0.0"),
    "clip norm negative": (lambda: privatize(clip_norm=-1), "`clip_norm` .* got -1"),
    "clip norm infinite": (lambda: privatize(clip_norm=np.inf), "`clip_norm` .* got inf"),
    "clip norm NaN": (lambda: grad(clip_norm=float("nan")), "`clip_norm` .* got nan"),
    "clip norm None": (lambda: grad(clip_norm=None), "`clip_norm` .* got None"),
    "clip norm text": (lambda: grad(clip_norm="1"), "`clip_norm` .* got '1'"),
    "clip norm in a group": (lambda: grad(clip_norm={"w": 1.0, "b": -2.0}), "`clip_norm` .*-2.0"),
    "clip norm beyond float32": (lambda: privatize(clip_norm=1e31), "`clip_norm` .* to 1e30"),
    "groups that are no prefix": (lambda: grad(clip_norm={"v": 1.0}), "`clip_norm` .* prefix"),
    "clip norm of an empty group": (
        lambda: grad(
            {"w": jnp.ones(2), "b": None},
            {"w": jnp.ones((5, 2)), "b": None},
            None,
            lambda p, x: jnp.vdot(p["w"], x["w"]),
            {"w": 1.0, "b": 1.0},
        ),
        r"`clip_norm` must be None at the empty .*b.*, got 1.0",
    ),
    "schedule below zero": (lambda: grad(clip_norm=lambda step: -1.0), "`clip_norm` .* got -1.0"),
    "schedule without step": (lambda: grad(clip_norm=lambda step: 1.0), "`step` must be passed"),
    "learning rate NaN": (lambda: lsdp.dp_sgd(np.nan, **GOOD), "`learning_rate` .* got nan"),
    "learning rate negative": (lambda: lsdp.dp_adam(-0.1, **GOOD), "`learning_rate` .* got -0.1"),
    "noise negative": (lambda: privatize(noise_multiplier=-1.0), "`noise_multiplier` .* got -1.0"),
    "noise zero": (lambda: privatize(noise_multiplier=0), "got 0; .* use the optimizer without"),
    "noise NaN": (lambda: privatize(noise_multiplier=np.nan), "`noise_multiplier` .* got nan"),
    "noise None": (lambda: privatize(noise_multiplier=None), "must be a number or .* got None"),
    "noise zero, an array": (
        lambda: privatize(noise_multiplier=jnp.array(0.0)),
        "`noise_multiplier` must be positive",
    ),
    "noises": (lambda: privatize(noise_multiplier=np.ones(3)), "`noise_multiplier` .* a number"),
    "batch size a function": (
        lambda: privatize(expected_batch_size=len),
        "`expected_batch_size` must be a plain number",
    ),
    "batch size that came": (
        lambda: jax.jit(lambda n: privatize(expected_batch_size=n).init(PARAMS))(5.0),
        "`expected_batch_size` must be a plain number.*, never the number of examples in a batch",
    ),
    "no optimizer": (lambda: lsdp.privatize(0.1, **GOOD), "`optimizer` .* got 0.1"),
    "stddev zero": (
        lambda: lsdp.add_gaussian_noise(0.0, key=KEY),
        "`stddev` .* leave `add_gaussian_noise` out",
    ),
    "batch size zero": (lambda: privatize(expected_batch_size=0), "`expected_batch_size` .* got 0"),
    "smoothing negative": (lambda: privatize(smoothing=-0.1), "`smoothing` .* got -0.1"),
    "smoothing NaN": (lambda: lsdp.laplacian_smooth(np.nan), "`smoothing` .* got nan"),
    "smoothing infinite": (lambda: lsdp.laplacian_smooth(np.inf), "`smoothing` .* got inf"),
    "microbatch zero": (lambda: grad(microbatch_size=0), "`microbatch_size` .* got 0"),
    "microbatch float": (lambda: grad(microbatch_size=4.0), "`microbatch_size` .* got 4.0"),
    "microbatch fraction": (lambda: grad(microbatch_size=1.5), "`microbatch_size` .* got 1.5"),
    "slack zero": (lambda: grad(slack=0), "`slack` .* 1 or more, got 0"),
    "slack negative": (lambda: grad(slack=-1), "`slack` .* got -1"),
    "slack fraction": (lambda: privatize(slack=1.5), "`slack` .* whole number.* got 1.5"),
    "slack beyond its limit": (lambda: grad(slack=1025), "`slack` .* at most 1024, got 1025"),
    "estimates without slack": (
        lambda: lsdp.estimate_norms(1.0, slack=0, stddev=1.0, expected_batch_size=1),
        "`slack` .* got 0",
    ),
    "estimates of a state without slack": (
        lambda: lsdp.norm_estimates(privatize().init(PARAMS)),
        "`state` must be the state of an optimizer with slack",
    ),
    "slack with discrete noise": (
        lambda: lsdp.discrete.add_discrete_gaussian_noise(1.0, key=KEY).update(
            jax.eval_shape(lambda: grad(slack=2)), None, PARAMS
        ),
        "`slack` must be None with discrete noise",
    ),
    # names
    "style": (lambda: grad(clip_style="soft"), "`clip_style` .*'automatic'.* got 'soft'"),
    "engine": (lambda: grad(engine="fast"), "`engine` .* got 'fast'"),
    "scope": (lambda: lsdp.laplacian_smooth(1.0, scope="all"), "`scope` .*'tree'.* got 'all'"),
    "method": (lambda: lsdp.laplacian_smooth(1.0, method="lu"), "`method` .*'fft'.* got 'lu'"),
    "layout": (lambda: lsdp.laplacian_smooth(1.0, layout="out"), "`layout` .* got 'out'"),
    "boundary": (
        lambda: lsdp.laplacian_smooth(1.0, boundary="zero"),
        "`boundary` .*'neumann'.* got 'zero'",
    ),
    "order": (lambda: lsdp.laplacian_smooth(1.0, order=0), "`order` .* got 0"),
    # keys
    "key missing": (lambda: privatize(key=None), "`key` .* typed key, got None; .*fresh_key"),
    "key integer": (lambda: privatize(key=7), "`key` .* got 7; .*jax.random.key"),
    "key raw": (lambda: privatize(key=jax.random.PRNGKey(0)), "`key` .* got uint32 of shape"),
    "keys": (lambda: privatize(key=jax.random.split(KEY)), r"`key` .* one typed key.*\(2,\)"),
    # trees
    "no parameters": (lambda: grad(params={}), "`params` must hold at least one array"),
    "no updates": (lambda: update({}, {}), "`updates` must hold at least one array"),
    "complex": (lambda: grad(params={"w": jnp.ones(2, complex)}), "`params` .* complex64 at 'w'"),
    "integer": (
        lambda: grad(params={"w": jnp.ones(2, int)}),
        "`params` .* int32 at 'w'; split off",
    ),
    "stacked integers": (
        lambda: update(jax.tree.map(lambda x: x.astype(int), STACK)),
        "`updates` .* int32 at 'b'",
    ),
    "plain gradient": (lambda: update(PARAMS), "`updates` .* plain gradient .* `clipped_grad`"),
    "no params": (lambda: update(STACK, None), "`params` must be passed"),
    "another clip norm": (
        lambda: update(marked(2.0)),
        "got 2.0 in `clipped_grad` and 1.0 in .* at 'b'",
    ),
    "groups for one norm": (
        lambda: update(marked({"w": 1.0, "b": 1.0})),
        r"got 1.0 for the group \['b'\] in `clipped_grad` and 1.0 in the optimizer at 'b'",
    ),
    "some marked": (
        lambda: update(half_marked()),
        "`updates` must be marked .* plain array at 'b'",
    ),
    "heights differ": (
        lambda: update({**STACK, "w": jnp.ones((4, 2, 3))}),
        r"`updates` .* got shape \(4, 2, 3\) at 'w' instead of \(5, 2, 3\)",
    ),
    "another shape": (
        lambda: update({**STACK, "w": jnp.ones((5, 3, 2))}),
        r"`updates` .* got shape \(5, 3, 2\) at 'w'",
    ),
    "a marked sum of another tree": (
        lambda: update(marked(), {"w": PARAMS["w"]}),
        "`updates` must have the structure of `params`",
    ),
    "another tree": (lambda: update({"w": STACK["w"]}), "`updates` must have the structure"),
    # batches
    "mask too short": (lambda: grad(mask=jnp.ones(4, bool)), r"`mask` .* \(5,\).* \(4,\)"),
    "mask a list": (lambda: grad(mask=[True] * 5), "`mask` .* got list"),
    "mask a label": (
        lambda: grad(mask=jnp.arange(5)),
        "`mask` .* pass several arrays of data as one",
    ),
    "mask of floats": (lambda: grad(mask=jnp.ones(5)), "`mask` must be a bool .* got float32"),
    "batch of scalars": (
        lambda: grad(batch={**STACK, "t": jnp.float32(1)}),
        "`batch` .* got one float32 at 't'; .* let `loss_fn` close over",
    ),
    "batch of numbers": (lambda: grad(batch=[[1.0, 2.0]]), "`batch` .* got one float at '0/0'"),
    "one key for all": (lambda: grad(batch=(STACK, KEY)), "`batch` .* jax.random.split"),
    "batch is empty": (lambda: grad(batch={}), "`batch` must hold at least one array"),
    "lengths differ": (
        lambda: grad(batch={**STACK, "y": jnp.ones(3)}),
        "`batch` .* got 5 at 'b' and 3 at 'y'",
    ),
    "loss of a batch": (lambda: grad(loss_fn=lambda p, x: p["b"]), r"`loss_fn` .* shape \(3,\)"),
    "text in a batch": (lambda: grad(batch={"w": np.array(["a"])}), "numbers or keys, got <U1"),
    "batch to explain": (
        lambda: lsdp.explain_clipping(lambda p, x: x["b"] @ p["b"], PARAMS, STACK),
        "`example` must be one example without batch axis",
    ),
    "loss of nothing": (lambda: grad(loss_fn=lambda p, x: None), "`loss_fn` .* got NoneType"),
    "loss of whole numbers": (lambda: grad(loss_fn=lambda p, x: 1), "`loss_fn` .* got int"),
    "loss in a dict": (lambda: grad(loss_fn=lambda p, x: {"loss": 1.0}), "`loss_fn` .* got dict"),
    "loss that is complex": (
        lambda: grad(loss_fn=lambda p, x: jax.lax.complex(0.0, p["b"][0])),
        "got complex64",
    ),
    "loss that is no function": (lambda: grad(loss_fn=3.0), "`loss_fn` .* a function .* got 3.0"),
    "aux without has_aux": (lambda: grad(loss_fn=lambda p, x: (1.0, 2)), "`loss_fn` .* has_aux"),
    "has_aux without aux": (
        lambda: lsdp.value_and_clipped_grad(loss, clip_norm=1.0, has_aux=True)(PARAMS, STACK),
        "`loss_fn` must return a pair",
    ),
    "a function among the parameters": (
        lambda: grad(params={**PARAMS, "activation": jnp.tanh}),
        "`params` .* at 'activation'; .*eqx.partition",
    ),
    "sums clipped apart": (
        lambda: update(
            {
                name: jax.jit(lsdp.clipped_grad(lambda p, x: jnp.vdot(p, x), clip_norm=1.0))(
                    PARAMS[name], STACK[name]
                )
                for name in PARAMS
            }
        ),
        "`updates` must come from one call of `clipped_grad`, got 2 leaves, of which only 1 were",
    ),
    "sums in a stack": (
        lambda: update(jax.tree.map(lambda x: x[None], marked())),
        r"`updates` must have the shapes of `params`, got \(1, 3\) for \(3,\) at 'b'",
    ),
    "noise on integers": (
        lambda: lsdp.add_gaussian_noise(1.0, key=KEY).update(
            jnp.arange(3), lsdp.add_gaussian_noise(1.0, key=KEY).init(None)
        ),
        "`updates` must hold real floating-point arrays, got int32",
    ),
    "smoothing of complex numbers": (
        lambda: lsdp.laplacian_smooth(1.0).update(
            jnp.ones(3, complex), lsdp.laplacian_smooth(1.0).init(None)
        ),
        "`updates` must hold real floating-point arrays, got complex64",
    ),
    # transforms in the wrong order
    "noise before the clip": (
        lambda: lsdp.add_gaussian_noise(1.0, key=KEY).update(
            marked(), lsdp.add_gaussian_noise(1.0, key=KEY).init(PARAMS)
        ),
        "`updates` must have passed `clip_per_example` before `add_gaussian_noise`",
    ),
    "smoothing before the clip": (
        lambda: optax.chain(lsdp.laplacian_smooth(1.0), privatize()).update(
            marked(), optax.chain(lsdp.laplacian_smooth(1.0), privatize()).init(PARAMS), PARAMS
        ),
        "`updates` must have passed `clip_per_example` before `laplacian_smooth`",
    ),
    "a sum without noise": (
        lambda: optax.apply_updates(PARAMS, marked()),
        "`updates` must have noise .* got a clipped sum without noise",
    ),
    # layouts
    "a layout of something else": (
        lambda: lsdp.laplacian_smooth(1.0, layout=lambda path, shape: 3).update(
            PARAMS, lsdp.laplacian_smooth(1.0).init(PARAMS)
        ),
        "`layout` must give .* got 3 for 'b'",
    ),
    "a grid of another size": (
        lambda: lsdp.laplacian_smooth(
            1.0, layout=lambda path, shape: lsdp.Grid((0,), shape=(4, 2))
        ).update(PARAMS, lsdp.laplacian_smooth(1.0).init(PARAMS)),
        r"`Grid.shape` .* got \(4, 2\) for \(3,\) at 'b'",
    ),
    "a grid of no such axis": (
        lambda: lsdp.laplacian_smooth(1.0, layout=lambda path, shape: lsdp.Grid((5,))).update(
            PARAMS, lsdp.laplacian_smooth(1.0).init(PARAMS)
        ),
        r"`Grid.axes` .* got \(5,\) at 'b'",
    ),
    "a band of unknown width": (
        lambda: jax.jit(lambda s: smooth(s, method="banded"))(1.0),
        "`method` .* got 'banded', which needs σ as a number",
    ),
    "a band wider than the ring": (
        lambda: smooth(1.0, method="banded"),
        "`method` .* got 'banded', which needs .* entries for this σ, not 3",
    ),
    "a grid by one axis at a time": (
        lambda: smooth(1.0, method="recursive", layout=lambda p, s: lsdp.Grid((0, 1), (1, 3))),
        r"`method` .* got 'recursive', which smooths along one axis, .* \(1, 3\)",
    ),
    "an order that is too high": (
        lambda: smooth(1.0, method="halo", order=2),
        "`method` .* got 'halo', which supports order 1 only, not 2",
    ),
    "a matrix that is too large": (
        lambda: smooth(1.0, jnp.ones(5000), method="matrix"),
        "`method` .* got 'matrix', which takes at most 300 entries per axis, not 5000",
    ),
    "specs of another tree": (
        lambda: smooth(1.0, shard_specs={"a": jax.P(), "b": jax.P()}),
        "`shard_specs` must be a PartitionSpec, .* got 2 for 1 leaves",
    ),
    "a grid in one ring": (
        lambda: lsdp.laplacian_smooth(
            1.0, scope="tree", layout=lambda path, shape: lsdp.Grid((0,))
        ).update(PARAMS, lsdp.laplacian_smooth(1.0).init(PARAMS)),
        "`layout` .* Grid with scope='tree'",
    ),
}


@pytest.mark.parametrize(("call", "message"), CASES.values(), ids=list(CASES))
def test_bad_input_gets_one_sentence_that_names_it(call, message):
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        call()
    text = str(caught.value)
    assert text.endswith(".") and "\n" not in text


def test_a_traced_clip_norm_is_refused_with_the_remedy():
    with pytest.raises(TypeError, match="static_args"):
        optax.inject_hyperparams(lsdp.clip_per_example)(clip_norm=1.0).init(PARAMS)


def test_an_error_leaves_the_state_usable():
    tx = privatize()
    state, update = tx.init(PARAMS), jax.jit(tx.update)
    with pytest.raises(ValueError):
        update(PARAMS, state, PARAMS)
    update(STACK, state, PARAMS)
