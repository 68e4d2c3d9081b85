"""Choose σ and the layout of each leaf from past releases, which costs no privacy.

**The question.** A release is y = g + n: g is a mean of clipped gradients, and the entries of the
noise n have variance s². Which candidate (σ, layout) should smooth the next release? A candidate
has the matrix A = (I − σL)⁻¹ for the second difference L of its layout. σ = 0 leaves A = I.

**One release says too little.** In one step, noise is far larger than signal. Let D be the sum of
all releases so far, D = S + N, with the signal S = Σ g and the noise N = Σ n. An entry of N has
variance V = Σ s². A signal that persists makes ‖S‖² grow with the square of the number of steps,
but V grows only in proportion.

**Which candidate is best.** With one A for all releases, the smoothed releases add up to A D. Let
⟨S, A D⟩ be the progress of A D: to first order, it is proportional to the fall of the loss. The
progress has the mean ⟨S, A S⟩, because the noise is centred. A longer step makes more progress but
adds more noise. So compare progress at equal length: the largest J(A) = ⟨S, A S⟩² / ‖A D‖² wins.
S is unknown, but ⟨D, A D⟩ has the mean ⟨S, A S⟩ + V·tr A. Without signal, ⟨D, A D⟩ has the standard
deviation V·√(2 tr A²). So J is computed from p(A), a low estimate of ⟨S, A S⟩. The next paragraphs
define κ and M:

    p(A) = max(0, ⟨D, A D⟩ − V·tr A − M − κ·V·√(2 tr A²)), J(A) = p(A)² / ‖A D‖².

**κ makes false alarms rare.** There is evidence if p(A) > 0 for at least one candidate. With pure
noise, this should have a probability of at most α = 5 %. By the union bound over m candidates, this
holds if κ is the (1 − α/m)-quantile of (⟨D, A D⟩ − V·tr A) / (V·√(2 tr A²)). This weighted sum of
centred χ² variables has a skewness of at most √(8/tr A²). So κ is the quantile of a Gaussian, which
the Cornish–Fisher expansion corrects for this skewness.

**Means do not count.** The gradients of one output unit's weights may have a common mean, even if
the order of the inputs means nothing. A large σ would keep only this mean. So the mean of each
output unit over its inputs is first subtracted from D. If the order of the inputs means nothing,
what remains of D has a flat spectrum. Then, if noise dominates, J(A)/J(I) is
(tr A)² / (d·tr A²) ≤ 1 for d entries, so nothing is smoothed.

**M covers sampling.** Poisson batches of expected size b, sampled at rate q, add sampling noise to
g. Sampling noise is as smooth as the examples, so it would pass for signal. The variance of
sampling noise, summed over all entries of all leaves, is at most v² = C²(1 − q)/b per step, where C
is the clip norm. A does not lengthen vectors. So M = Σ v² bounds what sampling noise adds to the
mean of ⟨D, A D⟩, summed over all leaves. The rule subtracts the whole M for every leaf.

**Without evidence**, the last choice stays while ⟨D, A D⟩ − V·tr A − M is positive for its A. After
that, nothing is smoothed. Evidence fades after training has converged: only V still grows.

**How long the step is.** If A wins, J(A) ≥ J(I). So A D, stretched to the length of D, makes at
least as much progress as D. The rule therefore multiplies the step by ℓ = min(4, ‖D‖/‖A D‖) ≥ 1.
But ℓ lengthens the steps in smooth directions. A learning rate close to the largest stable one then
becomes too large. Adam cancels ℓ. The optimizer sees noise of variance ℓ²·s²·(tr A²)/d.

**What the rule cannot see.** ‖A D‖ counts noise equally in all directions. But noise raises the
loss in proportion to V·tr(A H A) for the Hessian H, not to V·tr A². If H has the spectrum of S and
noise dominates, no A improves on A = I. Smooth inputs come close to this case. H depends on the
examples, so the rule must not use H.

**What remains true.** The choice is post-processing of the releases before this step. So smoothing
is linear in this step's release and keeps its noise Gaussian, and `watch` stays unbiased.

**Cost.** For a large leaf, D holds only the first output units. The leaf's shape decides how many;
see `enough_units`. If these units are a share f of the leaf, the evidence is √f times as strong. D
is smoothed with every candidate after 1 to 8, 10, 12, 14, 16, 20, 24, 28, 32, … steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

import optax_lsdp._checks as checks
import optax_lsdp._mesh as mesh
from optax_lsdp._clipped import has_noise, is_before_noise, unmarked_leaves
from optax_lsdp._trees import check_shapes, check_structure, compute_once, widen
from optax_lsdp._types import PyTree
from optax_lsdp.smoothing._dispatch import METHODS, check_leaf, smooth_leaves
from optax_lsdp.smoothing._layout import (
    Layout,
    Leaf,
    arrange_leaf,
    centre_units,
    check_layout,
    enough_units,
    first_units,
)
from optax_lsdp.smoothing._spectrum import BOUNDARIES, Boundary, Candidates, list_candidates
from optax_lsdp.smoothing.methods.spectral import Operator

SmoothLeaf: TypeAlias = Callable[[Leaf, jax.Array, jax.Array], jax.Array]
SMOOTHINGS = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # the candidates for σ, besides 0
LAYOUTS: tuple[Layout, ...] = ("inputs", "images")  # the candidates for the layout
_FALSE_ALARM = 0.05  # α
_LONGEST = 4.0  # the largest ℓ


class Choice(NamedTuple):
    """The choice for each leaf, made from past releases only: arrays of shape (leaves,)."""

    layout: jax.Array  # 0 for no smoothing, 1 for the first of the layouts, and so on
    smoothing: jax.Array  # σ
    beta: jax.Array  # the share of the noise's variance that smoothing leaves
    length: jax.Array  # ℓ, by which smoothed releases are multiplied


class AutoSmoothState(NamedTuple):
    """The state of `auto_smooth`: the sum of past releases, its noise, and the current choice."""

    optimizer: optax.OptState
    step: jax.Array
    total: optax.Updates  # D; for a large leaf, of its first output units only
    variance: jax.Array  # V, of the noise in each entry of D
    sampling: jax.Array  # M, which bounds the squared norm of the sampling noise in D
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
    """Smooth releases in front of an optimizer. Choose σ and layouts from past releases.

    `privatize`, `PrivacyPlan` and `fit` use this transform with smoothing="auto". In a chain of
    your own, put it around all transforms that follow the noisy mean, which is called a release.
    Each leaf has its own σ and layout, and the choice costs no privacy. A leaf is smoothed if the
    sum of its past releases shows that neighbouring entries are similar. Smoothed steps keep their
    length, so a learning rate that was tuned without smoothing usually stays tuned.
    `chosen_smoothing` shows the choices.

    Let D be the sum of all past releases, and V the variance of the noise in each entry of D. For
    each A = (I − σL)⁻¹ with σ ≥ 0, the number p = ⟨D, A D⟩ − V·tr A − κ·V·√(2 tr A²) estimates the
    progress of a step A D. The margin κ keeps noise from passing for signal. Of all A with p > 0,
    choose the A with the largest p²/‖A D‖². Multiply the step by ‖D‖/‖A D‖, but at most by 4. This
    module's docstring derives the rule, and adds a term to p for sampled batches.

    Args:
        optimizer: everything that follows the noisy mean.
        stddev: s, the standard deviation of the noise on the *mean*; a number or a schedule. If you
            pass `release_scale` to `update`, it multiplies both standard deviations in this step.
            For correlated noise, pass s·|c₀ + … + cₜ| in step t, with c = `noise_column()`.
        sampling_stddev: v = C·√((1 − q)/b) for Poisson batches of expected size b, sampled at rate
            q, where C is the `sensitivity`; a number or a schedule. Full batches have v = 0. If you
            leave v out for sampled batches, sampling noise may pass for signal.
        layouts: the layouts to choose from; see `laplacian_smooth`.
        boundary: see `laplacian_smooth`.
        order: see `laplacian_smooth`.
        method: any method of `laplacian_smooth` except "banded".
        shard_specs: how `shard_map` splits the updates; see `laplacian_smooth`.

    >>> tx = auto_smooth(optax.sgd(0.1), stddev=1.0)
    >>> wave = jnp.sin(jnp.arange(100) / 9)
    >>> state = tx.init(wave)
    >>> for key in jax.random.split(jax.random.key(0), 9):
    ...     updates, state = tx.update(wave + jax.random.normal(key, wave.shape), state)
    >>> chosen_smoothing(state).smoothing
    10.0
    """
    checks.check_positive("stddev", stddev, schedule=True)
    checks.check_non_negative("sampling_stddev", sampling_stddev, schedule=True)
    checks.check_choice("boundary", boundary, BOUNDARIES)
    checks.check_whole("order", 1 if order is None else order)
    checks.check_choice("method", method, [name for name in METHODS if name != "banded"])
    if isinstance(layouts, str) or not isinstance(layouts, Sequence) or not layouts:
        raise checks.refusal("layouts", "a sequence of layouts", layouts)
    for layout in layouts:
        check_layout(layout)
    mesh.check_shard_specs(shard_specs)
    stddev, sampling_stddev = checks.frozen_number(stddev), checks.frozen_number(sampling_stddev)
    kind = Operator(0.0, boundary, order or 1)
    # Other layouts can make entries of different units neighbours, so D then holds all units.
    has_units = all(layout in ("inputs", "images") for layout in layouts)
    inner = optax.with_extra_args_support(optimizer)

    def smooth(leaf: Leaf, array: jax.Array, smoothing: jax.Array) -> jax.Array:
        operator = kind._replace(smoothing=smoothing)
        return smooth_leaves([leaf._replace(array=array)], operator, "leaf", method)[0]

    def begin(path: tuple[object, ...], leaf: ArrayLike) -> jax.Array:
        array = jnp.zeros_like(widen(jnp.asarray(leaf)))
        return first_units(path, array, enough_units(path, array.shape)) if has_units else array

    def init(params: optax.Params) -> AutoSmoothState:
        zero, step = jnp.zeros([]), jnp.zeros([], jnp.int32)
        none, one = jnp.zeros(count := len(jax.tree.leaves(params))), jnp.ones(count)
        choice = Choice(none.astype(jnp.int32), none, one, one)
        total = jax.tree.map_with_path(begin, params)
        state = AutoSmoothState(None, step, total, zero, zero, choice)
        if has_noise(first := inner.init(params)):
            raise ValueError("`optimizer` must be what follows the noise, got one that adds noise.")
        return jax.tree.map(jnp.copy, state)._replace(optimizer=first)  # donation needs copies

    def candidates(updates: optax.Updates) -> tuple[list[list[Leaf | None]], list[mesh.Shard]]:
        named, _ = unmarked_leaves("auto_smooth", updates)
        shards = mesh.read_shards(shard_specs, [array for _, array in named])
        leaves = [
            _usable([arrange_leaf(layout, *leaf, shard) for layout in layouts], kind, method)
            for leaf, shard in zip(named, shards, strict=True)
        ]
        return leaves, shards

    @jax.jit  # otherwise, each call outside `jit` would compile the branches again
    def smooth_releases(
        updates: optax.Updates, total: optax.Updates, choice: Choice
    ) -> tuple[optax.Updates, optax.Updates]:
        """Return the smoothed releases ℓ·A y, and D plus the first output units of y."""
        named, structure = jax.tree.flatten_with_path(jax.tree.map(compute_once, updates))
        smoothed, sums = [], []
        options, totals = candidates(updates)[0], jax.tree.leaves(total)
        rows = zip(named, options, totals, _split(choice), strict=True)
        for (path, array), leaves, before, now in rows:
            branches = [_branch(smooth, leaf, now.smoothing) for leaf in (None, *leaves)]
            result = jax.lax.switch(now.layout, branches, array)
            smoothed.append(result * now.length.astype(result.dtype))
            sums.append(before + first_units(path, array, before.shape).astype(before.dtype))
        return jax.tree.unflatten(structure, smoothed), jax.tree.unflatten(structure, sums)

    @jax.jit
    def choose(state: AutoSmoothState) -> Choice:
        options, shards = candidates(state.total)
        names = [name for name, _ in unmarked_leaves("auto_smooth", state.total)[0]]

        def anew(total: optax.Updates) -> Choice:
            found = []
            arrays = jax.tree.leaves(total)
            rows = zip(names, arrays, shards, options, _split(state.choice), strict=True)
            for name, array, shard, leaves, last in rows:
                grids = tuple(leaf and leaf.arrangement.grid for leaf in leaves)
                usable = [leaf for leaf in leaves if leaf]
                size = max((math.prod(leaf.arrangement.shape) for leaf in usable), default=1)
                these = list_candidates(size, grids, SMOOTHINGS, kind.boundary, kind.order)
                sums = _sums(centre_units(name, array, shard.spec), shard, usable, smooth)
                noise = state.variance, state.sampling
                found.append(_choose_candidate(*sums, these, *noise, last))
            return Choice(*map(jnp.stack, zip(*found, strict=True)))

        is_due = mesh.all_under_vmap(_is_due(state.step))
        return jax.lax.cond(is_due, anew, lambda _: state.choice, state.total)

    def update(
        updates: optax.Updates,
        state: AutoSmoothState,
        params: optax.Params | None = None,
        *,
        release_scale: ArrayLike = 1.0,
        **extra_args: object,
    ) -> tuple[optax.Updates, AutoSmoothState]:
        unmarked_leaves("auto_smooth", updates)
        check_structure(updates, state.total)
        kept = jax.tree.map_with_path(
            lambda p, y, d: first_units(p, y, d.shape), updates, state.total
        )
        check_shapes(kept, state.total, "smooth what follows `add_gaussian_noise`")
        smoothed, total = smooth_releases(updates, state.total, state.choice)
        if "noise_stddev" in extra_args:  # from `privatize`: tell the optimizer what noise is left
            whole = jnp.asarray(extra_args["noise_stddev"])
            left = whole * state.choice.length * jnp.sqrt(state.choice.beta)
            extra_args["noise_stddev"] = jax.tree.unflatten(jax.tree.structure(total), [*left])
        moves, after = inner.update(smoothed, state.optimizer, params, **extra_args)
        settings = (x(state.step) if callable(x) else x for x in (stddev, sampling_stddev))
        s, v = (jnp.asarray(x, float) * jnp.asarray(release_scale, float) for x in settings)
        seen = optax.safe_increment(state.step), total, state.variance + s**2, state.sampling + v**2
        state = AutoSmoothState(None, *seen, state.choice)
        choice = choose(state) if jax.tree.leaves(total) else state.choice
        return moves, state._replace(optimizer=after, choice=choice)

    return optax.GradientTransformationExtraArgs(init, update)


def chosen_smoothing(state: PyTree) -> PyTree:
    """Return the choice for the next step: a tree with one `Choice` of numbers per leaf.

    `layout` is 0 for no smoothing, 1 for "inputs" and 2 for "images", unless you set `layouts`.
    `beta` is the share of the noise's variance that remains. Smoothed releases are multiplied by
    `length`. `state` is a tree that contains an `AutoSmoothState`, like the state of `privatize`.

    >>> chosen_smoothing(auto_smooth(optax.sgd(0.1), stddev=1.0).init({"w": jnp.zeros(3)}))
    {'w': Choice(layout=0, smoothing=0.0, beta=1.0, length=1.0)}
    """
    found = find_auto_state(state)
    if found is None:
        raise ValueError(
            "`state` must be the state of an optimizer with smoothing='auto', got one without; "
            "pass smoothing='auto' to `privatize` or `PrivacyPlan`."
        )
    if is_before_noise(state, _is_auto):
        raise ValueError("`state` must have `auto_smooth` after the noise, got the reverse order.")
    if isinstance(found.step, jax.core.Tracer):
        raise ValueError("`state` must have values, got one inside `jit`; call this outside.")
    if found.step.ndim:
        got = f"{found.step.size} runs; pass jax.tree.map(lambda x: x[0], state) for the first"
        raise ValueError(f"`state` must belong to one run, got {got}.")
    choice = jax.device_get(found.choice)
    each = [Choice(*(x[i].item() for x in choice)) for i in range(len(choice.layout))]
    return jax.tree.unflatten(jax.tree.structure(found.total), each)


def find_auto_state(state: PyTree) -> AutoSmoothState | None:
    """Return the first state of `auto_smooth` in a tree, or None if there is none."""
    return next(filter(_is_auto, jax.tree.leaves(state, is_leaf=_is_auto)), None)


def _is_auto(node: object) -> bool:
    return isinstance(node, AutoSmoothState)


def _split(choice: Choice) -> list[Choice]:
    """Return the choice of each leaf."""
    return [Choice(*(x[i] for x in choice)) for i in range(len(choice.layout))]


def _usable(leaves: list[Leaf | None], kind: Operator, method: str) -> list[Leaf | None]:
    """Replace a leaf by None if `method` cannot smooth it, or if it repeats an arrangement.

    `leaves` has one leaf in each layout. Raise if `method` supports no layout that applies to it.
    """
    traced = kind._replace(smoothing=jnp.zeros([]))
    found: list[Leaf | None] = []
    errors: list[ValueError] = []
    for leaf in leaves:
        if leaf is not None and leaf.arrangement in [one.arrangement for one in found if one]:
            leaf = None
        try:
            if leaf is not None:
                check_leaf(leaf, traced, method)
        except ValueError as error:  # for example, if `shard_map` splits an image
            errors, leaf = [*errors, error], None
        found.append(leaf)
    if errors and not any(found):
        raise errors[0]
    return found


def _branch(
    smooth: SmoothLeaf, leaf: Leaf | None, smoothing: jax.Array
) -> Callable[[jax.Array], jax.Array]:
    """Return the function that smooths a release like `leaf`, or keeps it if `leaf` is None."""
    return lambda y: y if leaf is None else smooth(leaf, y, smoothing)


def _is_due(step: jax.Array) -> jax.Array:
    """Return whether to choose again: whether `step` is n·2ᵏ for whole numbers n < 8 and k ≥ 0."""
    return step % (1 << jnp.maximum(29 - jax.lax.clz(step), 0)) == 0


def _sums(
    array: jax.Array, shard: mesh.Shard, leaves: Sequence[Leaf], smooth: SmoothLeaf
) -> tuple[jax.Array, jax.Array]:
    """Return ⟨D, A D⟩ and ‖A D‖² for all candidates of a leaf. `array` is D of this leaf."""

    def sums(smoothed: jax.Array) -> jax.Array:
        return mesh.sum_leaves([shard], lambda d, u: (d * u, u * u), [array], [smoothed])[0]

    rows = [sums(array)[None]]
    for leaf in leaves:
        values = jnp.asarray(SMOOTHINGS, array.dtype)
        rows.append(jax.lax.map(lambda now, leaf=leaf: sums(smooth(leaf, array, now)), values))
    products, squares = jnp.concatenate(rows).T
    return products, squares


def _choose_candidate(
    products: jax.Array,
    squares: jax.Array,
    candidates: Candidates,
    variance: jax.Array,
    sampling: jax.Array,
    last: Choice,
) -> Choice:
    """Return the choice for one leaf from ⟨D, A D⟩ and ‖A D‖²; see the top of this module."""
    trace, trace_square = candidates.trace, candidates.trace_square
    quantile = NormalDist().inv_cdf(1 - _FALSE_ALARM / len(trace))
    margin = quantile + (quantile**2 - 1) / 6 * np.sqrt(8 / trace_square)  # κ
    signal = products - variance * trace - sampling
    lower = jnp.maximum(signal - variance * margin * np.sqrt(2 * trace_square), 0)  # p(A)
    squares = jnp.maximum(squares, jnp.finfo(squares.dtype).tiny)
    progress = jnp.square(lower) / squares  # J(A)
    best = jnp.argmax(progress)
    is_evident = (progress[best] > 0) & jnp.all(jnp.isfinite(progress)) & (variance > 0)
    smoothings = jnp.asarray(candidates.smoothing, last.smoothing.dtype)
    is_last = (candidates.layout == last.layout) & (smoothings == last.smoothing)
    stays = jnp.any(is_last & (signal > 0))
    length = jnp.minimum(jnp.sqrt(squares[0] / squares[best]), _LONGEST)
    new = Choice(
        layout=jnp.asarray(candidates.layout)[best],
        smoothing=smoothings[best],
        beta=jnp.asarray(trace_square / trace_square[0], last.beta.dtype)[best],
        length=length.astype(last.length.dtype),
    )
    none = Choice(*(jnp.asarray(x, y.dtype) for x, y in zip((0, 0, 1, 1), last, strict=True)))
    old = jax.tree.map(lambda x, y: jnp.where(stays, x, y), last, none)
    return jax.tree.map(lambda x, y: jnp.where(is_evident, x, y), new, old)
