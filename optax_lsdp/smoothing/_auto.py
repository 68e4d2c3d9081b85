"""Choose σ and the layout of each leaf from past releases."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lsdp import _mesh as mesh
from optax_lsdp._checks import (
    check_choice,
    check_non_negative,
    check_positive,
    check_whole,
    frozen_number,
)
from optax_lsdp._clipped import unmarked_leaves
from optax_lsdp._trees import check_shapes, compute_once, widen
from optax_lsdp._types import PyTree
from optax_lsdp.smoothing._dispatch import METHODS, smooth_leaves
from optax_lsdp.smoothing._layout import Arrangement, Layout, Leaf, arrange_leaf, check_layout
from optax_lsdp.smoothing._spectrum import BOUNDARIES, Boundary, grid_beta, grid_gamma
from optax_lsdp.smoothing.methods.spectral import Operator

SMOOTHINGS = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # the candidates for σ, besides 0
LAYOUTS: tuple[Layout, ...] = ("inputs", "images")  # the candidates for the layout
_FALSE_ALARM = 0.05  # the probability that pure noise is smoothed
_LONGEST = 4.0  # the longest step, in steps without smoothing


class Choice(NamedTuple):
    """What was chosen for each leaf: arrays (leaves,). It depends on past releases only.

    Attributes:
        layout: 0 for no smoothing; otherwise the place of the layout among the leaf's candidates.
        smoothing: σ.
        beta: β, the share of the noise's variance that smoothing leaves.
        length: by how much the step is longer than A y.
        limit: the largest length.
        evidence: the largest z of the candidates when the number of releases was last a power of 2.
    """

    layout: jax.Array
    smoothing: jax.Array
    beta: jax.Array
    length: jax.Array
    limit: jax.Array
    evidence: jax.Array


class AutoSmoothState(NamedTuple):
    """The sum D of all releases, the noise in it, and what was chosen from it."""

    optimizer: optax.OptState
    step: jax.Array
    total: optax.Updates  # D
    variance: jax.Array  # V, the variance of the noise in each entry of D
    sampling: jax.Array  # N, a bound on the squared norm of the sampling noise in D
    choice: Choice


def auto_smooth(
    optimizer: optax.GradientTransformation,
    *,
    stddev: optax.ScalarOrSchedule,
    sampling_stddev: optax.ScalarOrSchedule = 0.0,
    layouts: Sequence[Layout] = LAYOUTS,
    boundary: Boundary = "periodic",
    order: int | None = None,
    method: str = "auto",
    shard_specs: PyTree = None,
) -> optax.GradientTransformationExtraArgs:
    """Return the same optimizer, which sees releases smoothed with a σ that is chosen from them.

    Args:
        optimizer: everything that follows the noisy mean.
        stddev: s, the standard deviation of the noise on the *mean*; a number or a schedule. If you
            pass `release_scale` to `update`, it multiplies both standard deviations in this step.
        sampling_stddev: v = C·√((1 − q)/b) for Poisson batches of expected size b, sampled at rate
            q and clipped to `sensitivity` C; a number or a schedule. It is 0 for full batches.
        layouts: the candidates; see `laplacian_smooth`.
        boundary: see `laplacian_smooth`.
        order: see `laplacian_smooth`.
        method: see `laplacian_smooth`.
        shard_specs: see `laplacian_smooth`.
    """
    check_positive("stddev", stddev, schedule=True)
    check_non_negative("sampling_stddev", sampling_stddev, schedule=True)
    check_choice("boundary", boundary, BOUNDARIES)
    check_whole("order", 1 if order is None else order)
    check_choice("method", method, METHODS)
    for layout in layouts:
        check_layout(layout)
    mesh.check_shard_specs(shard_specs)
    stddev, sampling_stddev = frozen_number(stddev), frozen_number(sampling_stddev)
    kind = Operator(0.0, boundary, order or 1)
    inner = optax.with_extra_args_support(optimizer)

    def smooth(leaf: Leaf, array: jax.Array, smoothing: jax.Array) -> jax.Array:
        operator = kind._replace(smoothing=smoothing)
        return smooth_leaves([leaf._replace(array=array)], operator, "leaf", method)[0]

    def init(params: optax.Params) -> AutoSmoothState:
        zero, count = jnp.zeros([]), len(jax.tree.leaves(params))
        none, one = jnp.zeros(count), jnp.ones(count)
        choice = Choice(none.astype(jnp.int32), none, one, one, one, none)
        total = jax.tree.map(lambda x: jnp.zeros_like(widen(x)), params)
        step = jnp.zeros([], jnp.int32)
        state = AutoSmoothState(None, step, total, zero, zero, choice)
        # Copies, because a caller can donate each array only once.
        return jax.tree.map(jnp.copy, state)._replace(optimizer=inner.init(params))

    def update(
        updates: optax.Updates,
        state: AutoSmoothState,
        params: optax.Params | None = None,
        *,
        release_scale: jax.typing.ArrayLike = 1.0,
        **extra_args: object,
    ) -> tuple[optax.Updates, AutoSmoothState]:
        check_shapes(updates, state.total, "smooth what follows `add_gaussian_noise`")
        named, structure = unmarked_leaves("auto_smooth", compute_once(updates))
        shards = mesh.read_shards(shard_specs, [array for _, array in named])
        options = [
            _arrangements(layouts, name, array, shard)
            for (name, array), shard in zip(named, shards, strict=True)
        ]
        smoothed, releases = [], []
        for index, ((_, array), leaves) in enumerate(zip(named, options, strict=True)):
            one = jax.tree.map(lambda x, i=index: x[i], state.choice)

            def branch(leaf: Leaf, now: jax.Array = one.smoothing) -> Callable[..., PyTree]:
                return lambda y: (smooth(leaf, y, now), y)

            if leaves:
                # The branches return y, or XLA on CPUs would draw the noise again at each use.
                branches = [lambda y: (y, y), *map(branch, leaves)]
                result, array = jax.lax.switch(one.layout, branches, array)
            else:
                result = array
            smoothed.append(result / jnp.sqrt(one.beta).astype(result.dtype))
            releases.append(array)
        tree = jax.tree.unflatten(structure, smoothed)
        moves, after = inner.update(tree, state.optimizer, params, **extra_args)
        factors = jax.tree.unflatten(structure, list(state.choice.length * state.choice.beta**0.5))
        moves = jax.tree.map(lambda u, x: u * x.astype(u.dtype), moves, factors)

        settings = (x(state.step) if callable(x) else x for x in (stddev, sampling_stddev))
        s, v = (jnp.asarray(x, float) * jnp.asarray(release_scale, float) for x in settings)
        total = [
            d + y.astype(d.dtype)
            for d, y in zip(jax.tree.leaves(state.total), releases, strict=True)
        ]
        state = AutoSmoothState(
            optimizer=after,
            step=optax.safe_increment(state.step),
            total=jax.tree.unflatten(structure, total),
            variance=state.variance + s**2,
            sampling=state.sampling + v**2,
            choice=state.choice,
        )

        def choose() -> Choice:
            found = []
            for index, (array, shard, leaves) in enumerate(
                zip(total, shards, options, strict=True)
            ):
                last = jax.tree.map(lambda x, i=index: x[i], state.choice)
                if not leaves:
                    found.append(last)
                    continue
                sums = _sums(array, shard, leaves, smooth)
                tables = _tables(tuple(leaf.arrangement for leaf in leaves), kind)
                found.append(
                    choose_candidate(
                        *sums, tables, state.variance, state.sampling, state.step, last
                    )
                )
            return Choice(*map(jnp.stack, zip(*found, strict=True)))

        if any(options):
            is_due = mesh.all_under_vmap(_is_due(state.step))
            chosen = jax.lax.cond(is_due, choose, lambda: state.choice)
            state = state._replace(choice=chosen)
        return moves, state

    return optax.GradientTransformationExtraArgs(init, update)


class Candidates(NamedTuple):
    """The candidates of one leaf; the first is no smoothing. Arrays (candidates,)."""

    layout: np.ndarray
    smoothing: np.ndarray
    gamma: np.ndarray
    beta: np.ndarray
    size: int  # of the leaf


def choose_candidate(
    products: jax.Array,
    squares: jax.Array,
    candidates: Candidates,
    variance: jax.Array,
    sampling: jax.Array,
    step: jax.Array,
    last: Choice,
) -> Choice:
    """Return the choice for one leaf.

    `products` has ⟨D, A D⟩ for each candidate, and `squares` has ‖A D‖².
    """
    trace, trace_square = (candidates.size * x for x in (candidates.gamma, candidates.beta))
    spread = np.sqrt(2 * trace_square)
    signal = products - variance * trace - sampling
    z = signal / (variance * spread)
    level = NormalDist().inv_cdf(1 - _FALSE_ALARM / len(trace))
    # The skewness is at most √8/√(tr A²): Cornish and Fisher's correction of the quantile.
    demand = level + (level**2 - 1) / 6 * np.sqrt(8 / trace_square)
    is_found = jnp.any(z > demand)
    lower = jnp.maximum(signal - variance * spread, 0)
    squares = jnp.maximum(squares, jnp.finfo(squares.dtype).tiny)
    best = jnp.argmax(lower**2 / squares)
    length = lower / squares
    limit = jnp.where(length[0] > 0, length[best] / length[0], _LONGEST)
    limit = jnp.where(is_found, jnp.clip(limit, 1, _LONGEST), last.limit)
    evidence = jnp.max(z)
    doubled = (step & (step - 1)) == 0
    growth = jnp.clip(evidence / jnp.maximum(last.evidence, 1e-9), 0.25, 4)
    growth = jnp.where(doubled & (last.evidence > 0) & (evidence > 0), growth, 1)
    picked = Choice(
        layout=jnp.asarray(candidates.layout)[best],
        smoothing=jnp.asarray(candidates.smoothing, jnp.float32)[best],
        beta=jnp.asarray(candidates.beta, jnp.float32)[best],
        length=last.length,
        limit=limit,
        evidence=last.evidence,
    )
    picked = jax.tree.map(lambda new, old: jnp.where(is_found, new, old), picked, last)
    length = jnp.where(picked.layout > 0, jnp.clip(last.length * growth, 1, limit), 1)
    seen = jnp.where(doubled & is_found, evidence, last.evidence)
    return picked._replace(length=length, evidence=seen)


def chosen_smoothing(state: PyTree) -> PyTree:
    """Return what was chosen for each leaf, as a tree of `Choice` with one number per field.

    Args:
        state: the state of `auto_smooth`, or a tree that contains it.
    """
    found = next(filter(_is_state, jax.tree.leaves(state, is_leaf=_is_state)), None)
    if found is None:
        raise ValueError(
            "`state` must be the state of an optimizer with smoothing='auto', got none; pass "
            "smoothing='auto' to `privatize` or `PrivacyPlan`."
        )
    choice = jax.device_get(found.choice)
    structure = jax.tree.structure(found.total)
    each = [Choice(*(x[i].item() for x in choice)) for i in range(structure.num_leaves)]
    return jax.tree.unflatten(structure, each)


def _is_state(node: object) -> bool:
    return isinstance(node, AutoSmoothState)


def _arrangements(
    layouts: Sequence[Layout], name: str, array: jax.Array, shard: mesh.Shard
) -> list[Leaf]:
    """Return the leaf in each of its different layouts."""
    found: list[Leaf] = []
    for layout in layouts:
        leaf = arrange_leaf(layout, name, array, shard)
        if leaf is not None and leaf.arrangement not in [x.arrangement for x in found]:
            found.append(leaf)
    return found


def _is_due(step: jax.Array) -> jax.Array:
    """Return whether to choose after `step` steps: at 1 to 8, 10, 12, 14, 16, 20, 24, 28, 32, …"""
    bits = 31 - jax.lax.clz(step)
    return step % (1 << jnp.maximum(bits - 2, 0)) == 0


def _sums(
    array: jax.Array,
    shard: mesh.Shard,
    leaves: Sequence[Leaf],
    smooth: Callable[[Leaf, jax.Array, jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Return ⟨D, A D⟩ and ‖A D‖² of one leaf, for all candidates: arrays (candidates,)."""

    def sums(smoothed: jax.Array) -> jax.Array:
        terms = lambda d, u: (d * u, u * u)
        return mesh.sum_leaves([shard], terms, [array], [smoothed])[0]

    rows = [sums(array)[None]]
    for leaf in leaves:
        values = jnp.asarray(SMOOTHINGS, array.dtype)
        rows.append(jax.lax.map(lambda now, leaf=leaf: sums(smooth(leaf, array, now)), values))
    products, squares = jnp.concatenate(rows).T
    return products, squares


@lru_cache(maxsize=1024)
def _tables(arrangements: tuple[Arrangement, ...], kind: Operator) -> Candidates:
    """Return the candidates of a leaf with these layouts."""
    options = {"boundary": kind.boundary, "order": kind.order}
    rows = [(0, 0.0, 1.0, 1.0)]
    for place, one in enumerate(arrangements, 1):
        for now in SMOOTHINGS:
            gains = (f(now, one.grid, **options) for f in (grid_gamma, grid_beta))
            rows.append((place, now, *gains))
    layout, *others = map(np.array, zip(*rows, strict=True))
    return Candidates(layout.astype(np.int32), *others, math.prod(arrangements[0].shape))
