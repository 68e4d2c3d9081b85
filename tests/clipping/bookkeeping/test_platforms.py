"""Every strategy is sound on every platform: a search for the largest contribution.

A CPU evaluates the engine with operands rounded as another platform rounds them. Its additions
round like those of a CPU, which the bounds of all platforms allow.

Each loss is linear in its weight, so that a batch sets the factors a_t and g_t of the gradient
Σ_t a_t ⊗ g_t directly. All losses of a platform are compiled into one program, which returns the
contribution of each example alone.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lsdp as lsdp
from optax_lsdp.clipping.bookkeeping import _engine, emulate_platform
from optax_lsdp.clipping.bookkeeping._platforms import CPU, PLATFORMS, Platform
from optax_lsdp.clipping.bookkeeping._strategy import Strategy
from tests.cases import slow
from tests.clipping.bookkeeping import losses, structures
from tests.clipping.bookkeeping.structures import conv

N = 32  # examples in a batch
SLACK = 1 + 1e-6
CLIP_NORMS = (1.0, 0.37, 1e-25, 1e25, 1e6)
CASES = losses.LOSSES | structures.LOSSES
NO_CLIP = CLIP_NORMS.index(1e6)
GROUPS = {"one": 0.3, "other": 7000.0}  # the clip norms of models with two groups


def matrix_unit(product, platform, subscripts, a, g):
    """Return a product as a matrix unit computes it, which cuts off bits of its operands."""
    if platform.mantissa_bits < 23:
        bits = {"exponent_bits": 8, "mantissa_bits": platform.mantissa_bits}
        a, g = (jax.lax.reduce_precision(x, **bits) for x in (a, g))
    return product(platform, subscripts, a, g)


@jax.custom_vjp
def product_without_a_rule(w, a):
    return a @ w


product_without_a_rule.defvjp(lambda w, a: (a @ w, a), lambda a, g: (a.T @ g, jnp.zeros_like(a)))


def tied(w, a, g):
    """Use w twice, once transposed; a holds the operands of both uses, and g the cotangents."""
    return jnp.vdot(a[:, :6] @ w, g[:, :5]) + jnp.vdot(a[:, 6:] @ w.T, g[:, 5:])


def tied_embedding(w, a, g):
    """Look up rows of w, one of them twice, and multiply by w transposed."""
    ids = jnp.where(jnp.isinf(a[:, 0]), 3, jnp.array([0, 2, 2, 1]))  # constants need no rule
    return jnp.vdot(w[ids], g[:, :5]) + jnp.vdot(a @ w.T, g[:, 5:])


def several_leaves(p, a, g):
    """Use an outer product, a matrix with several rows, and two biases of equal shape."""
    return jnp.vdot(a @ p["rows"] + p["bias"], g) + jnp.vdot(a[0] @ p["row"] + p["shift"], g[0])


class Model(NamedTuple):
    """A loss of (w, a, g), the strategy of its matrices, and shapes for one example."""

    kind: str
    loss: Any
    weight: Any
    a: tuple[int, ...]
    g: tuple[int, ...]
    has_bias: bool = False  # biases are materialised
    groups: dict[str, float] | None = None  # the clip norms of the weights, if they differ


def by_strategy(kind):
    """Return models with one and with several blocks, and with tied uses, for one strategy."""
    return {
        kind: Model(kind, lambda w, a, g: jnp.vdot(a @ w, g), (6, 5), (4, 6), (4, 5)),
        f"{kind}, blocks": Model(
            kind,
            lambda w, a, g: jnp.vdot(jnp.einsum("btp,bpq->btq", a, w), g),
            (2, 5, 6),
            (2, 3, 5),
            (2, 3, 6),
        ),
        f"{kind}, tied": Model(kind, tied, (6, 5), (3, 11), (3, 11)),
    }


def convolved(w, a, g):
    return jnp.vdot(conv(a[None], w, padding=[(1, 0), (0, 0)]), g[None])


def convolved_with_strides(w, a, g):
    return jnp.vdot(conv(a[None], w, stride=2, padding=[(1, 1), (0, 0)]), g[None])


MODELS = {
    "outer product": Model("outer product", lambda w, a, g: jnp.vdot(a @ w, g), (6, 5), (6,), (5,)),
    "outer product, blocks": Model(
        "outer product",
        lambda w, a, g: jnp.vdot(jnp.einsum("bp,bpq->bq", a, w), g),
        (3, 5, 6),
        (3, 5),
        (3, 6),
    ),
    **by_strategy("Gram matrices"),
    "tied embedding": Model("Gram matrices", tied_embedding, (6, 5), (4, 5), (4, 11)),
    "Gram matrices of patches": Model(
        "Gram matrices of patches", convolved, (2, 2, 2, 3), (3, 4, 2), (3, 3, 3)
    ),
    "Gram matrices of patches, strides": Model(
        "Gram matrices of patches", convolved_with_strides, (4, 2, 2, 3), (4, 4, 2), (2, 2, 3)
    ),
    "by offset, strides": Model(
        "by offset", convolved_with_strides, (4, 2, 2, 3), (4, 4, 2), (2, 2, 3)
    ),
    "by offset": Model("by offset", convolved, (2, 2, 2, 3), (3, 4, 2), (3, 3, 3)),
    "by patches": Model("by patches", convolved, (2, 2, 2, 3), (3, 4, 2), (3, 3, 3)),
    "by patches, strides": Model(
        "by patches", convolved_with_strides, (4, 2, 2, 3), (4, 4, 2), (2, 2, 3)
    ),
    "materialised": by_strategy("materialised")["materialised"],
    "materialised, convolution": Model(
        "materialised", convolved, (2, 2, 2, 3), (3, 4, 2), (3, 3, 3)
    ),
    "materialised, no rule": Model(
        "materialised, no rule",
        lambda w, a, g: jnp.vdot(product_without_a_rule(w, a), g),
        (6, 5),
        (4, 6),
        (4, 5),
    ),
    "several leaves": Model(
        "Gram matrices",
        several_leaves,
        {"row": (6, 5), "rows": (6, 5), "bias": (5,), "shift": (5,)},
        (4, 6),
        (4, 5),
        has_bias=True,
    ),
    "Gram matrices, two groups": Model(
        "Gram matrices",
        lambda p, a, g: jnp.vdot(a @ p["one"], g[:, :2]) + jnp.vdot(a @ p["other"], g[:, 2:]),
        {"one": (6, 2), "other": (6, 3)},
        (4, 6),
        (4, 5),
        groups=GROUPS,
    ),
    "materialised, two groups": Model(
        "materialised",
        lambda p, a, g: jnp.vdot(a @ jnp.concatenate([p["one"], p["other"]], axis=1), g),
        {"one": (6, 2), "other": (6, 3)},
        (4, 6),
        (4, 5),
        groups=GROUPS,
    ),
}


@functools.cache
def compiled(platform):
    """Return `run(batch, clip_norm)` → each example's norm and contributions, for all models.

    The contributions, in clip norms, are those by "threshold" and by "automatic" clipping: for each
    group, an array with one row per example, and a last row for all examples together. `clip_norm`
    is an index of CLIP_NORMS. `platform` may also be "vmap", the reference engine.
    """
    name = ""
    masks = jnp.concatenate([jnp.eye(N, dtype=bool), jnp.ones((1, N), bool)])

    chosen = {model: set() for model in MODELS}

    def choose(leaf, platform):
        is_possible = leaf.parts is not None or not leaf.has_rule
        kind = MODELS[name].kind if is_possible else "materialised"
        chosen[name].add(kind)
        return Strategy(kind, 0, 0, 0)

    def contributions(style, batch, step):
        groups = MODELS[name].groups
        weight = jax.tree.map(
            jnp.zeros, MODELS[name].weight, is_leaf=lambda x: isinstance(x, tuple)
        )
        grad = lsdp.value_and_clipped_grad(
            lambda w, example: MODELS[name].loss(w, *example),
            # A sum that is clipped by a schedule is divided by the clip norm.
            clip_norm=groups or (lambda step: jnp.asarray(CLIP_NORMS)[step]),
            engine="vmap" if platform == "vmap" else "bookkeeping",
            clip_style=style,
        )

        def masked(mask):
            return grad(weight, batch, mask, step=None if groups else step)

        private, total = jax.vmap(masked)(masks)
        leaves = [leaf.reshape(len(masks), -1) for leaf in jax.tree.leaves(total)]
        if groups:
            rows = [x / norm for x, norm in zip(leaves, groups.values(), strict=True)]
        else:
            rows = [jnp.concatenate(leaves, axis=1)]
        return jax.tree.map(lambda norms: norms[-1], private.norms), rows

    @jax.jit
    def run(batches, step):
        nonlocal name
        results = {}
        for name, batch in batches.items():
            norms, threshold = contributions("threshold", batch, step)
            _, automatic = contributions("automatic", batch, step)
            results[name] = Result(norms, threshold, automatic)
            used = {MODELS[name].kind} | ({"materialised"} if MODELS[name].has_bias else set())
            assert platform == "vmap" or chosen[name] == used, name
        return results

    def patched(batches, step):
        with pytest.MonkeyPatch.context() as patch:
            if platform != "vmap":
                product = functools.partial(matrix_unit, Platform.product)
                patch.setattr(Platform, "product", functools.partialmethod(product))
                patch.setattr(_engine, "choose", choose)
            with emulate_platform(CPU.name if platform == "vmap" else platform):
                return jax.device_get(run(batches, jnp.asarray(step)))

    return patched


class Result(NamedTuple):
    """Norms, and the contributions by both styles, in clip norms, as `compiled` returns them."""

    norms: Any
    threshold: Any
    automatic: Any


def lengths(rows):
    """Return the length of each row, in float64."""
    return np.linalg.norm(np.asarray(rows, np.float64), axis=-1)


def unit_roundoff(platform):
    return 2.0 ** -(PLATFORMS[platform].mantissa_bits + 1)


def constant_rows(rng, a, g):
    """Return rows of equal entries; weighted entries then are just above half of a last bit."""
    return np.linspace(1, 2, N).reshape(-1, *[1] * (a.ndim - 1)) * np.ones_like(a), np.ones_like(g)


def cancelling_rows(rng, a, g):
    """Return rows that cancel except for 10⁻⁵ to 10⁻¹ of their lengths."""
    rest = 10.0 ** rng.uniform(-5, -1, size=(N, *[1] * (g.ndim - 1)))
    a = np.repeat(a[..., :1, :], a.shape[-2], axis=-2) if a.ndim > 2 else a
    signs = (-1.0) ** np.arange(g.shape[-2])[:, None] if g.ndim > 2 else 1
    return a, np.repeat(g[..., :1, :], g.shape[-2], axis=-2) * signs + rest * g


def unequal_rows(rng, a, g):
    """Return factors of which one is as large as the other one is small, up to 10¹⁵."""
    power = 10.0 ** rng.uniform(-15, 15, size=(N, *[1] * (a.ndim - 1)))
    return a * power, g / power.reshape(-1, *[1] * (g.ndim - 1))


def unequal_entries(rng, a, g):
    """Return entries of all magnitudes from 10⁻⁶ to 1."""
    return tuple(x * 10.0 ** rng.uniform(-6, 0, size=x.shape) for x in (a, g))


def tiny_rows(rng, a, g):
    """Return gradients whose squares, in units of the clip norm, are near the smallest float."""
    power = 10.0 ** rng.uniform(-1, 1, size=(N, *[1] * (g.ndim - 1)))
    return 1e-10 * a, 1e-9 * power * g


FAMILIES = {
    "typical": lambda rng, a, g: (a, 100 * g),
    "constant": constant_rows,
    "cancelling": cancelling_rows,
    "unequal factors": unequal_rows,
    "unequal entries": unequal_entries,
    "tiny": tiny_rows,
}


def batches(family, clip_norm, seed=0):
    """Return a batch for each model; gradients are of the order of the clip norm or larger."""
    rng, drawn = np.random.default_rng(seed), {}
    for name, model in MODELS.items():
        a, g = (rng.normal(size=(N, *shape)) for shape in (model.a, model.g))
        a, g = FAMILIES[family](rng, a, g)
        scale = max(GROUPS.values()) if model.groups else clip_norm
        with np.errstate(over="ignore"):  # an infinite gradient contributes nothing
            drawn[name] = np.float32(a), np.float32(g * scale)
    return drawn


@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_strategy_agrees_with_vmap_up_to_rounding(platform):
    """Without clipping, each entry is off by three roundings of each of its products."""
    drawn = batches("typical", 1.0)
    for name in (name for name, model in MODELS.items() if model.groups):
        drawn[name] = jax.tree.map(lambda x: np.float32(1e-5) * x, drawn[name])
    found, expected, absolute = (
        compiled(engine)(batch, NO_CLIP)
        for engine, batch in (
            (platform, drawn),
            ("vmap", drawn),
            ("vmap", jax.tree.map(np.abs, drawn)),  # Σ_t |a_t| ⊗ |g_t|
        )
    )
    rounding = 3.1 * unit_roundoff(platform) + 1e-5
    for name in MODELS:
        triples = zip(
            *(jax.tree.leaves(x[name][:2]) for x in (found, expected, absolute)), strict=True
        )
        for one, other, reach in triples:  # norms, and contributions
            assert np.all(np.abs(one - other) <= rounding * np.abs(reach)), name


@pytest.mark.parametrize("seed", [0, *slow(*range(1, 20))])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_no_contribution_exceeds_the_clip_norm(platform, family, seed):
    for step, clip_norm in enumerate(CLIP_NORMS):
        for name, result in compiled(platform)(batches(family, clip_norm, seed), step).items():
            for rows in (*result.threshold, *result.automatic):
                longest = lengths(rows[:N]).max()
                assert longest <= SLACK, f"{name} at {clip_norm}: {longest}"


@pytest.mark.parametrize("platform", PLATFORMS)
def test_typical_examples_get_nearly_the_clip_norm(platform):
    least = 0.99 if PLATFORMS[platform].mantissa_bits == 23 else 0.95
    for step, clip_norm in enumerate(CLIP_NORMS):
        for name, result in compiled(platform)(batches("typical", clip_norm), step).items():
            for rows in result.threshold:
                shortest = lengths(rows[:N]).min()
                assert shortest >= least, f"{name} at {clip_norm}: {shortest}"


@pytest.mark.parametrize("odd", [np.nan, np.inf, 1e30, 1e-30])
@pytest.mark.parametrize("platform", PLATFORMS)
def test_an_example_changes_no_bit_of_another_contribution(platform, odd):
    """Not even if the other examples have operands that are not finite, masked or not."""
    drawn, broken = batches("typical", 1.0), np.arange(N) % 3 == 0
    spoilt = jax.tree.map(
        lambda x: np.where(broken.reshape(-1, *[1] * (x.ndim - 1)), np.float32(odd), x), drawn
    )
    before, after = (compiled(platform)(batch, 0) for batch in (drawn, spoilt))
    for name in MODELS:
        for one, other in zip(
            *(x[name].threshold + x[name].automatic for x in (before, after)), strict=True
        ):
            np.testing.assert_array_equal(one[:N][~broken], other[:N][~broken], name)
            assert np.isfinite(odd) or not np.any(other[:N][broken]), name
            total = other[:N].sum(axis=0, dtype=np.float64)
            np.testing.assert_allclose(other[N], total, rtol=0, atol=1e-6 * N, err_msg=name)


QUICK = ("rows", "2-d", "2-d, wide window")


@pytest.mark.parametrize("name", [*QUICK, *slow(*(name for name in CASES if name not in QUICK))])
@pytest.mark.parametrize("platform", ["tpu", *slow("cuda")])
def test_any_loss_is_clipped_to_nearly_the_clip_norm(platform, name):
    """With the strategies that the platform would choose."""
    case, clip_norm = CASES[name], 0.01
    grad = lsdp.value_and_clipped_grad(case.loss, clip_norm=clip_norm)
    masks = jnp.eye(losses.N, dtype=bool)
    with emulate_platform(platform):
        private, total = jax.jit(jax.vmap(grad, (None, None, 0)))(case.params, case.batch, masks)
    rows = [leaf.reshape(losses.N, -1) for leaf in jax.tree.leaves(total)]
    contributed = lengths(np.concatenate(rows, axis=1)) / clip_norm
    assert contributed.max() <= SLACK
    norms = np.diagonal(private.norms)
    assert np.all(contributed[norms > 1.01 * clip_norm] >= 0.95)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_operands_of_mixed_precision_are_clipped_to_the_clip_norm(platform):
    """A product may take float32 operands and return float64: all bounds are then in float64."""
    with jax.enable_x64(True), emulate_platform(platform):

        def loss(w, example):
            x, g = example
            axes = (((0,), (0,)), ((), ()))
            return jnp.vdot(jax.lax.dot_general(x, w, axes, preferred_element_type=jnp.float64), g)

        grad = lsdp.clipped_grad(loss, clip_norm=1.0, engine="bookkeeping")
        alone = jax.jit(jax.vmap(lambda *example: grad(jnp.zeros((3, 40), jnp.float32), example)))
        g = jnp.linspace(1.9, 2.1, N)[:, None, None] * jnp.ones((1, 1, 40)) / np.sqrt(3 * 40)
        total = alone(jnp.ones((N, 1, 3), jnp.float32), g).value
        assert lengths(total.reshape(N, -1)).max() <= SLACK
