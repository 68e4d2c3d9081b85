"""Add Gaussian noise that is correlated between steps to a clipped sum.

The noise of step t is row t of C⁻¹Z, where C is the matrix of a `Correlation`, and row t of Z is
the noise that `add_gaussian_noise` would draw in step t. If C is banded, a recursion computes row t
of C⁻¹Z from the noise of the last steps. If C⁻¹ is banded, row t of C⁻¹Z is a weighted sum of a few
rows of Z. A row of Z depends only on the key, the step and the paths of the leaves, so past rows of
Z are drawn again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lsdp._checks import check_positive, frozen_number, refusal
from optax_lsdp._clipped import WithSlack
from optax_lsdp._keys import check_key
from optax_lsdp._mesh import check_shard_specs, explicit_spec, vary, varying_axes
from optax_lsdp._trees import check_structure, compute_once, describe_arrays, widen
from optax_lsdp._types import PyTree
from optax_lsdp.correlation import Correlation
from optax_lsdp.noise import (
    AddGaussianNoiseState,
    SumLeaves,
    add_drawn,
    add_scaled,
    check_stddev,
    draw_noise,
    read_batch_size,
    read_sum,
)

__all__ = ["AddCorrelatedNoiseState", "add_correlated_noise"]

_OTHER = "`correlation` must be the one for which the state was made, got a different one"


class AddCorrelatedNoiseState(NamedTuple):
    """The state of `add_correlated_noise`. The key and the past noises are secrets.

    Attributes:
        key: the key of all draws.
        step: the number of steps so far.
        start: the step at which this noise began: 0, or the step of the last `restart_noise`.
        fingerprint: a hash of the `correlation` for which this state was made: two uint32 words.
            An update with another correlation raises an error, or returns NaN inside `jit`.
        past: if C has b bands, then for each leaf the noises of the last b − 1 steps, divided by
            `stddev` and stacked along a first axis. Row t mod (b − 1) is the noise of step t. If no
            past noises are needed, `past` is ().
        stddev: the `stddev` of step `start`, or 0 before that step. A later step with a
            different `stddev` raises an error, or returns NaN inside `jit`.
    """

    key: jax.Array
    step: jax.Array
    start: jax.Array
    fingerprint: jax.Array
    past: PyTree
    stddev: jax.Array

    @property
    def adds_noise(self) -> bool:
        """Mark the noise in the state of a chain, so that `watch` can refuse to precede it."""
        return True

    def __repr__(self) -> str:
        return f"AddCorrelatedNoiseState(key=<secret>, step={self.step!r}, past=<secret>)"


def add_correlated_noise(
    stddev: float,
    correlation: Correlation,
    *,
    key: jax.Array,
    shard_specs: PyTree = None,
    expected_batch_size: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Add Gaussian noise that is correlated between steps: row t of S + stddev·C⁻¹Z.

    Row t of S is the clipped sum of step t. Z is independent noise with standard deviation 1. The
    sum of the noises of many steps is smaller than with independent noise; see
    `optax_lsdp.correlation`. `accounting.CorrelatedGaussian` computes ε, which requires batches of
    a `CyclicPoissonSampler`, or the same order of examples in every epoch. A `PrivacyPlan` with a
    `correlation` draws such batches and computes ε.

    If C has b bands, the state holds the noises of the last b − 1 steps, in float32 or float64. If
    C⁻¹ is banded, the state holds no noises: earlier draws are drawn again. As with
    `add_gaussian_noise`, the noise is the same after resuming and on any mesh.

    There is no noise for steps beyond `correlation.steps`, for a state of a different correlation,
    or for a `stddev` that changes. In these cases, `update` raises an error or, inside `jit`,
    returns NaN. To take more steps, start again with a new key and a new state. This counts as
    a second mechanism.

    Args:
        stddev: the standard deviation of the noise before it is correlated: the noise multiplier
            times `sensitivity(clip_norm)`. One number for all steps. If `optax.inject_hyperparams`
            injects a value that is not positive, the result is NaN.
        correlation: C, the same in all steps.
        key: one typed key; see `add_gaussian_noise`.
        shard_specs: how `shard_map` splits the updates; see `add_gaussian_noise`. It splits `past`
            in the same way, along all axes but the first.
        expected_batch_size: by what the noisy sum is divided; see `add_gaussian_noise`.

    Raises:
        TypeError: if `correlation` is not a Correlation; for other arguments, see
            `add_gaussian_noise`.
        ValueError: if `stddev` is a schedule; if `updates` differ from the parameters for which
            the state was made; if there is no noise for a step, as described above; or as for
            `add_gaussian_noise`.

    >>> from optax_lsdp.correlation import optimize_banded
    >>> tx = add_correlated_noise(1.0, optimize_banded(100, bands=8), key=jax.random.key(0))
    >>> zeros, total, update = jnp.zeros(10_000), 0.0, jax.jit(tx.update)
    >>> state = tx.init(zeros)
    >>> for _ in range(100):
    ...     noise, state = update(zeros, state)
    ...     total += noise
    >>> print(round(float(total.std()), 1))  # of independent noise: 10
    4.1
    """
    if callable(stddev):
        demand = "one number, because schedules of correlated noise have no analysis"
        raise refusal("stddev", demand, stddev)
    check_positive("stddev", stddev, "for a chain without privacy, leave the noise out")
    stddev = frozen_number(stddev)
    check_stddev(stddev)
    if not isinstance(correlation, Correlation):
        remedy = "make one with optax_lsdp.correlation"
        raise TypeError(f"`correlation` must be a Correlation, got {correlation!r}; {remedy}.")
    check_key("key", key)
    check_shard_specs(shard_specs)
    size = 1.0 if expected_batch_size is None else read_batch_size(expected_batch_size)
    coefficients = np.array(correlation.coefficients)
    rows = 0 if correlation.is_inverse else len(coefficients) - 1
    # If C has one band, C⁻¹ is 1/c₀, rounded up.
    draws = coefficients if correlation.is_inverse else (1 + 2e-7) / coefficients[:1]
    digest = hashlib.blake2b(repr(correlation).encode(), digest_size=8).digest()
    fingerprint = np.frombuffer(digest, "<u4").astype(np.uint32)

    def init(params: optax.Params) -> AddCorrelatedNoiseState:
        if rows and params is None:
            raise ValueError("`params` must be passed to `init`, for their shapes, got None.")

        def zeros(param: jax.Array) -> jax.Array:
            one = vary(jnp.zeros_like(widen(jnp.asarray(param))), varying_axes(param))
            return jnp.broadcast_to(one, (rows, *one.shape))

        past = jax.tree.map(zeros, params) if rows else ()
        return AddCorrelatedNoiseState(
            jnp.copy(key), jnp.int32(0), jnp.int32(0), jnp.array(fingerprint), past, jnp.float32(0)
        )

    def update(
        updates: optax.Updates,
        state: AddCorrelatedNoiseState,
        params: optax.Params | None = None,
        **extra_args: object,
    ) -> tuple[optax.Updates, AddCorrelatedNoiseState]:
        del extra_args
        if not isinstance(state, AddCorrelatedNoiseState):
            demand = "the state of `add_correlated_noise`"
            raise TypeError(f"`state` must be {demand}, got {type(state).__name__}.")
        if isinstance(updates, WithSlack):
            raise ValueError(
                "`slack` must be None with correlated noise, got a sum with slack; leave `slack` "
                "and `AdaptiveClip` out, or use `add_gaussian_noise`."
            )
        _check_state(state, fingerprint, correlation.steps)
        independent = AddGaussianNoiseState(state.key, state.step)
        total = read_sum("add_correlated_noise", updates, params, independent, shard_specs)
        total = total._replace(divisor=size)
        is_planned = state.step - state.start < correlation.steps
        is_good = is_planned & (state.fingerprint == fingerprint).all()
        now = jnp.asarray(stddev, jnp.float32)
        first = jnp.where(state.stddev == 0, now, state.stddev)
        is_first = now == first
        if not (isinstance(is_first, jax.core.Tracer) or is_first or jnp.isnan(now)):
            raise refusal("stddev", f"the same as in the first step, {first}", float(now))
        is_good &= is_first
        past = state.past
        if rows:
            _check_past(updates, total, past, rows)
            drawn = draw_noise(independent, total)
            noises = _subtract_past(coefficients, state.step, drawn, past)
            noises = list(map(compute_once, noises))
            put = partial(jax.lax.dynamic_update_index_in_dim, index=state.step % rows, axis=0)
            past = jax.tree.map(put, past, jax.tree.unflatten(total.structure, noises))
            noisy = add_scaled(total, noises, stddev, is_good)
        else:
            draw = partial(_combine_draws, draws, independent, state.start, total)
            noisy = add_drawn(total, draw, independent, stddev, is_good)
        step = optax.safe_increment(state.step)
        return noisy, state._replace(step=step, past=past, stddev=first)

    return optax.GradientTransformationExtraArgs(init, update)


def is_noise_state(node: object) -> bool:
    """Return whether a node of an optimizer's state holds a noise key and the number of steps."""
    return isinstance(node, AddGaussianNoiseState | AddCorrelatedNoiseState)


def has_correlated_noise(state: optax.OptState) -> bool:
    """Return whether an optimizer's state contains a state of `add_correlated_noise`."""
    leaves = jax.tree.leaves(state, is_leaf=is_noise_state)
    return any(isinstance(leaf, AddCorrelatedNoiseState) for leaf in leaves)


def with_noise_key(state: optax.OptState, key: jax.Array) -> optax.OptState:
    """Return an optimizer state in which the noise of `privatize` is drawn from `key`."""
    return _change_first_noise(state, lambda node: node._replace(key=jnp.copy(key)))


def restart_noise(state: optax.OptState, key: jax.Array) -> optax.OptState:
    """Return an optimizer state whose noise begins again at its present step, with a new key.

    Correlated noise after the restart is a second mechanism, independent of all earlier noise.
    """

    def restarted(node: PyTree) -> PyTree:
        if isinstance(node, AddCorrelatedNoiseState):
            past = jax.tree.map(jnp.zeros_like, node.past)
            zero = jnp.zeros_like(node.stddev)
            node = node._replace(start=jnp.copy(node.step), past=past, stddev=zero)
        return node._replace(key=jnp.copy(key))

    return _change_first_noise(state, restarted)


def _change_first_noise(
    state: optax.OptState, change: Callable[[PyTree], PyTree]
) -> optax.OptState:
    """Apply `change` to the first noise state, which belongs to `privatize`, and to no other."""
    changes = iter([change])

    def change_one(node: PyTree) -> PyTree:
        return next(changes, lambda node: node)(node) if is_noise_state(node) else node

    return jax.tree.map(change_one, state, is_leaf=is_noise_state)


def _subtract_past(
    coefficients: np.ndarray, step: jax.Array, drawn: Sequence[jax.Array], past: PyTree
) -> list[jax.Array]:
    """Return row t of C⁻¹Z for a banded C: wₜ = (zₜ − Σₖ cₖ·wₜ₋ₖ) / c₀ for each leaf.

    Float32 rounds 1/c₀ and cₖ/c₀ by 6e-8 at most. The code multiplies 1/c₀ by 1 + 2e-7. So no entry
    of the matrix that the code effectively uses exceeds the same entry of C, and the ε that is
    computed for C holds.
    """
    rows = len(coefficients) - 1
    lags = (
        1 + (step - 1 - jnp.arange(rows, dtype=step.dtype)) % rows
    )  # how many steps ago the noise in each row of `past` was added
    noises = []
    for noise, its_past in zip(drawn, jax.tree.leaves(past), strict=True):
        weights = jnp.asarray(coefficients / coefficients[0], noise.dtype)[lags]
        noise = noise * jnp.asarray((1 + 2e-7) / coefficients[0], noise.dtype)
        noises.append(_subtract_rows(noise, weights, its_past))
    return noises


def _subtract_rows(noise: jax.Array, weights: jax.Array, past: jax.Array) -> jax.Array:
    """Return noise − Σᵣ weights[r]·past[r], entry by entry: the same bits on any mesh.

    Accelerators read eight rows in one kernel. CPUs read one row at a time: for a kernel of eight
    rows, XLA would copy each row once and the whole past twice. For leaves that are vectors, TPUs
    read one row at a time too. Their memory interleaves the rows, so XLA would copy the rows first.
    """

    def subtract(row: int | jax.Array, rest: jax.Array) -> jax.Array:
        return rest - weights[row] * past[row]

    def in_loop(noise: jax.Array, *, unroll: int) -> jax.Array:
        return jax.lax.fori_loop(0, len(past), subtract, noise, unroll=unroll)

    if any(spec := explicit_spec(past)) or any(explicit_spec(noise)):
        # The loop needs noise with the sharding of the past.
        mesh = jax.typeof(past).sharding.mesh
        noise = jax.sharding.reshard(noise, jax.NamedSharding(mesh, jax.P(*spec[1:])))
    one_by_one, in_eights = partial(in_loop, unroll=1), partial(in_loop, unroll=8)
    on_tpu = in_eights if past.ndim > 2 else one_by_one
    return jax.lax.platform_dependent(noise, cpu=one_by_one, tpu=on_tpu, default=in_eights)


def _combine_draws(
    coefficients: np.ndarray, state: AddGaussianNoiseState, start: jax.Array, total: SumLeaves
) -> list[jax.Array]:
    """Return row t of C⁻¹Z for a banded C⁻¹: c₀·Σₖ (cₖ/c₀)·zₜ₋ₖ for each leaf.

    `Correlation` has rounded c₀ and cₖ/c₀ to float32, so ε is computed for exactly this matrix.
    """
    noises: list[jax.Array] = []
    for lag, ratio in enumerate((coefficients / coefficients[0]).tolist()):
        step = jnp.maximum(state.step - lag, start)
        drawn = draw_noise(AddGaussianNoiseState(state.key, step), total)
        weight = jnp.where(state.step - start >= lag, ratio, 0.0)
        terms = [weight.astype(noise.dtype) * noise for noise in drawn]
        noises = [a + b for a, b in zip(noises, terms, strict=True)] if lag else terms
    return [jnp.asarray(coefficients[0], noise.dtype) * noise for noise in noises]


def _check_state(state: AddCorrelatedNoiseState, fingerprint: np.ndarray, steps: int) -> None:
    """Raise, outside `jit`, if the state is for a different correlation or has no steps left."""
    is_same, taken = (state.fingerprint == fingerprint).all(), state.step - state.start
    if not (isinstance(is_same, jax.core.Tracer) or is_same):
        raise ValueError(f"{_OTHER}; resume with the same correlation.")
    if not isinstance(taken, jax.core.Tracer) and taken >= steps:
        raise ValueError(
            f"`state` must have taken fewer than {steps} steps, the steps of the correlation, got "
            f"{taken} steps; start again with a new key and a new state, as a second mechanism."
        )


def _check_past(updates: optax.Updates, total: SumLeaves, past: PyTree, rows: int) -> None:
    """Raise unless the past noises have the structure, shapes and precision of the updates."""
    leaves, noises = total.wide, jax.tree.leaves(past)
    if leaves and (found := {len(one) for one in noises} or {0}) != {rows}:
        got = f"that needs {rows} past noises for a state with {max(found)}"
        raise ValueError(f"{_OTHER} {got}; resume with the same correlation.")
    check_structure(updates, past)
    needed = [((rows, *leaf.shape), leaf.dtype) for leaf in leaves]
    if [(one.shape, one.dtype) for one in noises] != needed:
        raise ValueError(
            "`updates` must have the shapes and precision of the parameters that `init` got, got "
            f"{describe_arrays(updates)} for past noises of {describe_arrays(past)}; call `init` "
            "with the parameters."
        )
