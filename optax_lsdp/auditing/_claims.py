"""Check claims that need no statistics: about plans, quantized sums and likely mistakes.

Each function that returns text returns what is wrong, or "" if its claim holds.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Self, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy.stats import norm

from optax_lsdp._types import PyTree
from optax_lsdp.accounting import Ledger
from optax_lsdp.auditing._clipping import ENGINES, Engine, clipped_sum, loss_across_shards
from optax_lsdp.auditing._report import ClaimsReport, check_claims, expect_refusal
from optax_lsdp.auditing._training import fixed_surroundings, too_similar
from optax_lsdp.clipping import clip_per_example, clipped_grad
from optax_lsdp.correlation import Correlation, banded_inverse
from optax_lsdp.discrete import quantized_grad
from optax_lsdp.noise import add_gaussian_noise, fresh_key
from optax_lsdp.optimizers import steps_taken
from optax_lsdp.planning import PrivacyPlan
from optax_lsdp.sampling import FixedSizeSampler, PoissonSampler, Sampler, ShuffledSampler

_SIZE, _BATCH, _STEPS, _DELTA = 400, 40, 24, 1e-5
_plan = partial(PrivacyPlan, dataset_size=_SIZE, steps=_STEPS, delta=_DELTA)
poisson_plan = partial(_plan, expected_batch_size=_BATCH, noise_multiplier=1.0)
_full_plan = partial(_plan, expected_batch_size=_SIZE, sampling="full")
_LOSS_WIDTH = 5e-4  # the width of the bins of privacy losses
_MULTIPLE_OF = 64  # batches are padded to a multiple of this length
_CLIP_NORM, _RESOLUTION = 0.5, 2**10  # of quantized sums
_FACTORS = (1e-3, 0.02, 1.0, -30.0, 1e6, 1e20, np.nan, np.inf, 0.0)


def audit_plan(key: jax.Array) -> ClaimsReport:
    """Check a plan's ε, its number of steps, its masks and its keys."""
    checks: dict[str, Callable[[], str]] = {
        "ε of full batches is at least the closed form": _check_full_batches,
        "ε of Poisson batches is at least a numerical bound": _check_poisson_batches,
        "steps beyond the plan are refused": partial(_check_steps_beyond, key),
        "steps beyond the budget are refused": _check_budget,
        "batches without a mask are refused": _check_missing_mask,
        "jit draws the same batches": partial(_check_batches_in_jit, key),
        "sampler, noise and plans have different keys": partial(_check_keys, key),
        "fresh keys are random": _check_fresh_keys,
    }
    return check_claims(checks)


def audit_likely_mistakes(key: jax.Array) -> ClaimsReport:
    """Check that likely mistakes of users either raise an error or do no harm."""
    samplers: dict[str, Sampler] = {
        "Poisson": PoissonSampler(_SIZE, _BATCH / _SIZE, key),
        "fixed-size": FixedSizeSampler(_SIZE, _BATCH, key, multiple_of=_MULTIPLE_OF),
        "shuffled": ShuffledSampler(_SIZE, _BATCH, key, multiple_of=_MULTIPLE_OF),
    }
    checks: dict[str, Callable[[], str]] = {
        f"padding of {name} batches repeats no example": partial(_check_padding, sampler)
        for name, sampler in samplers.items()
    }
    checks |= {
        "a mask for stacked gradients is applied": _check_mask_of_stacked_gradients,
        "later changes to a dict of clip norms have no effect": _check_changed_clip_norms,
        "leaves with similar paths have different noise": partial(_check_similar_paths, key),
    }
    for engine in ENGINES:
        claim = f"collectives over an axis of vmap are refused, engine {engine!r}"
        checks[claim] = partial(_check_collectives_of_vmap, engine)
    return check_claims(checks)


def audit_quantized_sums(key: jax.Array) -> ClaimsReport:
    """Compare each example's contribution to a quantized sum with its clipped gradient."""
    sizes = {"a": 6, "b": 4, "c": 3, "d": 2}
    params = {name: jnp.zeros(size) for name, size in sizes.items()}
    factors = jnp.asarray(_FACTORS, jnp.float32)
    batch = {
        name: factors[:, None] * jax.random.normal(one, (size,))
        for one, (name, size) in zip(jax.random.split(key, 4), sizes.items(), strict=True)
    }

    def loss(params: optax.Params, example: PyTree) -> jax.Array:  # its gradient is the example
        return jnp.sum(jnp.stack([jnp.vdot(params[name], example[name]) for name in sizes]))

    gradient = jax.jit(quantized_grad(loss, clip_norm=_CLIP_NORM, resolution=_RESOLUTION))
    indices = np.arange(len(_FACTORS))

    def quanta(mask: np.ndarray) -> np.ndarray:
        marked = gradient(params, batch, jnp.asarray(mask))
        return np.concatenate([np.asarray(marked[name].value, np.int64) for name in sizes])

    most = gradient(params, batch, jnp.asarray(indices < 0))["a"].sensitivity
    exact = np.concatenate([np.asarray(batch[name], np.float64) for name in sizes], axis=1)
    exact[~np.isfinite(exact).all(axis=1)] = 0
    lengths = np.linalg.norm(exact, axis=1, keepdims=True)
    wanted = exact / np.maximum(lengths, _CLIP_NORM) * _RESOLUTION
    alone = np.stack([quanta(indices == i) for i in indices])
    too_long = inexact = ""
    for i, (found, exact) in enumerate(zip(alone, wanted, strict=True)):
        if np.linalg.norm(found) > most:
            too_long = f"example {i} adds {np.linalg.norm(found):.6g} quanta, more than {most}"
        if np.abs(found - exact).max() > 1:  # ½ for rounding to quanta, the rest for float32
            inexact = f"example {i} adds {found} instead of {exact} quanta"
    is_sum = np.array_equal(quanta(indices >= 0), alone.sum(axis=0))
    claims = {
        "no example adds more than the sensitivity": too_long,
        "each example adds its clipped gradient": inexact,
        "a batch is the sum of its examples": "" if is_sum else "the two sums differ",
    }
    return ClaimsReport(claims)


def _check_full_batches() -> str:
    """Check ε of full batches: all steps are one Gaussian mechanism with μ = √steps/z."""
    for plan in (_full_plan(noise_multiplier=1.0), _full_plan(epsilon=2.0)):
        if wrong := _too_small_for(plan, math.sqrt(plan.steps) / plan.noise_multiplier):
            return wrong
    return ""


def _too_small_for(plan: PrivacyPlan, mu: float) -> str:
    """Return what is wrong if one step with sensitivity `mu`·stddev costs more than a plan's ε."""
    epsilon = plan.epsilon  # the mechanism has δ = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ)
    log_second = epsilon + norm.logcdf(-mu / 2 - epsilon / mu)
    delta = norm.cdf(mu / 2 - epsilon / mu) - math.exp(log_second)
    return "" if delta <= _DELTA * (1 + 1e-6) else f"at ε = {epsilon:.4g}, δ is {delta:.3g}"


def _check_poisson_batches() -> str:
    """Check a plan's ε by a numerical lower bound on δ(ε), with privacy losses rounded down."""
    plan = poisson_plan()
    return _too_small(plan, _BATCH / _SIZE, plan.steps)


def _too_small(plan: PrivacyPlan, rate: float, steps: int) -> str:
    """Return what is wrong if `steps` Poisson batches cost more than a plan's ε; otherwise ""."""
    noise = plan.noise_multiplier
    edges = np.linspace(-12 * noise, 1 + 12 * noise, 20_001)
    middle = (edges[1:] + edges[:-1]) / 2
    without = np.diff(norm.cdf(edges, scale=noise))
    with_one = (1 - rate) * without + rate * np.diff(norm.cdf(edges, loc=1, scale=noise))
    loss = np.log1p(rate * np.expm1((2 * middle - 1) / (2 * noise**2)))
    width = 2 ** math.ceil(math.log2(4 * steps / _LOSS_WIDTH))
    rounded = np.floor(loss / _LOSS_WIDTH).astype(int) - 1  # −1: the lower edge has a smaller loss
    masses = np.bincount(rounded % width, with_one, width)
    composed = np.fft.irfft(np.fft.rfft(masses) ** steps, width).clip(0)
    losses = _LOSS_WIDTH * (np.arange(width) - np.where(np.arange(width) > width // 2, width, 0))
    kept = losses > plan.epsilon
    delta = float(np.sum(composed[kept] * -np.expm1(plan.epsilon - losses[kept])))
    return "" if delta <= _DELTA else f"at ε = {plan.epsilon:.4g}, δ is at least {delta:.3g}"


def audit_correlated_plan(key: jax.Array) -> ClaimsReport:
    """Check plans with correlated noise: matrix, ε, and the steps between uses of an example."""
    cyclic, ordered = correlated_plans()
    checks: dict[str, Callable[[], str]] = {
        "no column of a banded matrix is too long": partial(_check_columns, cyclic),
        "no column is too long if the inverse is banded": partial(_check_columns, ordered),
        "ε of cyclic batches is at least a numerical bound": partial(_check_cycles, cyclic),
        "ε of a fixed order is at least the closed form": partial(_check_fixed_order, ordered),
        "cyclic batches use no example twice in a cycle": partial(_check_separation, cyclic, key),
        "a fixed order repeats no example too early": partial(_check_separation, ordered, key),
        "steps with new noise count as new cycles": partial(_check_second_mechanism, cyclic),
        "estimates for independent noise are refused": partial(_check_watching, cyclic, key),
    }
    return check_claims(checks)


def correlated_plans() -> tuple[PrivacyPlan, PrivacyPlan]:
    """Return a plan with a banded matrix C, and a plan with a banded C⁻¹ and a fixed order."""
    inverse = banded_inverse(_STEPS + 1, 3, min_separation=_SIZE // _BATCH)
    options = {"steps": _STEPS + 1, "noise_multiplier": 2.0}  # the last cycle is not complete
    cyclic = poisson_plan(correlation=4, **options)
    return cyclic, poisson_plan(correlation=inverse, neighbouring="zero_out", **options)


def dense_matrix(plan: PrivacyPlan) -> np.ndarray:
    """Return the matrix C of a plan's correlation, built from its coefficients."""
    correlation = cast(Correlation, plan.correlation)
    lags = np.subtract.outer(np.arange(plan.steps), np.arange(plan.steps))
    column = np.zeros(plan.steps)
    column[: len(correlation.coefficients)] = correlation.coefficients
    found = np.where(lags >= 0, column[lags], 0.0)
    return np.linalg.inv(found) if correlation.is_inverse else found


def _check_columns(plan: PrivacyPlan) -> str:
    longest = np.sqrt(np.sum(dense_matrix(plan) ** 2, axis=0)).max()
    return "" if longest <= 1 + 1e-8 else f"one has a norm of {longest:.9g}"


def _check_cycles(plan: PrivacyPlan) -> str:
    bands = len(cast(Correlation, plan.correlation).coefficients)
    return _too_small(plan, bands * _BATCH / _SIZE, -(-plan.steps // bands))


def _check_fixed_order(plan: PrivacyPlan) -> str:
    """Check ε by δ(ε) of the Gaussian mechanism, for an example used in steps 0, 10 and 20."""
    used = dense_matrix(plan)[:, :: _SIZE // _BATCH].sum(axis=1)
    return _too_small_for(plan, math.sqrt(float(used @ used)) / plan.noise_multiplier)


def _check_separation(plan: PrivacyPlan, key: jax.Array) -> str:
    """Check that an example is used again only after as many steps as the accountant assumes."""
    correlation = cast(Correlation, plan.correlation)
    least = _SIZE // _BATCH if correlation.is_inverse else len(correlation.coefficients)
    sampler, last = plan.sampler(key), np.full(_SIZE, -least)
    for step in range(40 * least):
        indices, mask = sampler.batch(step)
        drawn = np.asarray(indices)[np.asarray(mask)]
        if drawn.size and (closest := step - last[drawn].max()) < least:
            return f"an example is used again after {closest} steps instead of {least}"
        last[drawn] = step
    return ""


def _check_second_mechanism(plan: PrivacyPlan) -> str:
    bands = len(cast(Correlation, plan.correlation).coefficients)
    ledger = Ledger([plan.event(0)] * 3)
    counted = sum(part.steps for part in Ledger.from_json(ledger.to_json()).parts)
    return "" if counted == 3 else f"3 restarts with {bands} bands count as {counted} cycles"


def _check_watching(plan: PrivacyPlan, key: jax.Array) -> str:
    return expect_refusal(
        lambda: plan.optimizer(optax.sgd(1.0), key, watch=True), "a training curve is accepted"
    )


def _check_steps_beyond(key: jax.Array) -> str:
    """Check that a step beyond the plan changes nothing inside `jit` and is refused outside."""
    plan = poisson_plan(steps=2)
    params, batch, mask = jnp.ones(3), jnp.ones((2, 3)), jnp.ones(2, bool)
    optimizer = plan.optimizer(optax.sgd(1.0, momentum=0.9), key)
    update = jax.jit(optimizer.update)
    total = jax.jit(plan.clipped_grad(jnp.vdot))(params, batch, mask)
    state = jax.jit(optimizer.init)(params)
    for step in range(plan.steps):
        moves, state = update(total, state, params)
        if not np.any(moves) or int(steps_taken(state)) != step + 1:
            return f"step {step} of {plan.steps} changes nothing, or is not counted"
    moves, after = update(total, state, params)
    if np.any(moves):
        return "inside jit, a further step changes the parameters"
    arrays = zip(_leaves(state, keys=False), _leaves(after, keys=False), strict=True)
    if any(np.any(one != other) for one, other in jax.device_get(list(arrays))):
        return "inside jit, a further step changes the optimizer state"
    return expect_refusal(
        lambda: optimizer.update(total, state, params), "outside jit, a further step is accepted"
    )


def _leaves(state: optax.OptState, *, keys: bool) -> list[jax.Array]:
    """Return the random keys in a state if `keys` is true. Otherwise return all other leaves."""
    leaves = jax.tree.leaves(state)
    return [x for x in leaves if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) == keys]


def _check_budget() -> str:
    """Check that a repeated step spends budget, so that fewer steps remain."""
    plan = poisson_plan(epsilon=1.1 * poisson_plan().epsilon)
    event = plan.event(0)
    if plan.remaining_steps(Ledger()) != plan.steps:
        return f"{plan.remaining_steps(Ledger())} of {plan.steps} steps remain at the start"
    for counted, taken in ((plan.steps, plan.steps), (20, 10), (2 * plan.steps, 3)):
        ledger = Ledger([replace(event, steps=counted)])
        left = plan.remaining_steps(ledger, taken)
        spent = replace(event, steps=counted + left).epsilon(plan.delta_of_noise)
        if left and (spent > plan.epsilon or taken + left > plan.steps):
            return f"after {counted} steps, {left} more are allowed, at ε = {spent:.4g}"
        if plan.allows(ledger, taken) != (left > 0):
            return f"after {counted} steps, `allows` contradicts the {left} remaining steps"
    return ""


def _check_missing_mask() -> str:
    plan, params, batch = poisson_plan(), jnp.zeros(3), jnp.ones((50, 3))
    gradient = plan.clipped_grad(jnp.vdot)
    optimizer = plan.optimizer(optax.sgd(1.0), jax.random.key(0))
    state = jax.eval_shape(optimizer.init, params)
    return expect_refusal(
        lambda: jax.eval_shape(gradient, params, batch), "the gradient accepts them without a mask"
    ) or expect_refusal(
        lambda: jax.eval_shape(lambda state: optimizer.update(batch, state, params), state),
        "the optimizer accepts stacked gradients without a mask",
    )


def _check_batches_in_jit(key: jax.Array) -> str:
    sampler = poisson_plan().sampler(key)
    compiled = jax.jit(sampler.batch)
    for step in (0, 1, 1000, 2**31 - 2):
        pairs = zip(sampler.batch(step), compiled(jnp.asarray(step, jnp.int32)), strict=True)
        if not all(np.array_equal(one, other) for one, other in pairs):
            return f"the batch of step {step} differs"
    return ""


def _check_keys(key: jax.Array) -> str:
    """Check that the keys that two plans derive from one key are different."""
    found = {"the key itself": _bits(key)}
    derived_from = {}
    for name, plan in (("one plan", poisson_plan()), ("another plan", poisson_plan(steps=2))):
        state = jax.jit(plan.optimizer(optax.sgd(1.0), key).init)(np.zeros(1, np.float32))
        found[f"the noise of {name}"] = _bits(_leaves(state, keys=True)[0])
        found[f"the sampler of {name}"] = _bits(cast(PoissonSampler, plan.sampler(key)).key)
        for label in ("sampling", "noise", "examples"):
            found[f"{label!r} of {name}"] = _bits(plan.derive_key(key, label))
        derived_from[f"'noise' of {name}"] = f"the noise of {name}"
        derived_from[f"'sampling' of {name}"] = f"the sampler of {name}"
    for one, other in ((a, b) for a in found for b in found if a < b and found[a] == found[b]):
        if derived_from.get(one) != other:
            return f"{one} and {other} have the same key"
    return ""


def _check_fresh_keys() -> str:
    """Check that two fresh keys differ although the clock and all seeds are fixed."""
    draw = fixed_surroundings()(fresh_key)
    one, other = (int.from_bytes(_bits(draw())) for _ in range(2))
    return too_similar(one, other)


def _bits(key: jax.Array) -> bytes:
    return np.asarray(jax.random.key_data(key)).tobytes()


def _check_padding(sampler: Sampler) -> str:
    for step in range(_STEPS):
        times = np.bincount(np.asarray(sampler.batch(step).indices), minlength=_SIZE)
        if times.max() > 1:
            return f"example {times.argmax()} occurs {times.max()} times in step {step}"
    return ""


def _check_mask_of_stacked_gradients() -> str:
    clip, params = clip_per_example(1.0), np.zeros(2, np.float32)
    stacked = np.asarray([[3.0, 4.0], [0.0, 0.5], [6.0, 8.0]], np.float32)
    mask = np.asarray([True, True, False])

    @jax.jit
    def clip_and_sum(stacked: jax.Array, mask: jax.Array) -> jax.Array:
        return clip.update(stacked, clip.init(params), params, mask=mask)[0]

    total = np.asarray(clip_and_sum(stacked, mask))
    return "" if np.abs(total - [0.6, 1.3]).max() < 1e-5 else f"the sum is {total}, not [0.6 1.3]"


def _check_changed_clip_norms() -> str:
    def loss(params: optax.Params, example: jax.Array) -> jax.Array:
        return jnp.vdot(params["w"], example)

    clip_norm, zeros = {"w": 1.0}, {"w": np.zeros(2, np.float32)}
    release = clipped_sum(clipped_grad(loss, clip_norm=clip_norm), zeros, clip_norm)
    clip_norm["w"] = 1000.0
    released = release(jnp.asarray([[3.0, 4.0]]), jnp.ones(1, bool))
    length = float(np.linalg.norm(released["w"]))
    return "" if length < 1.00001 else f"an example adds {length:.6g} clip norms"


@jax.tree_util.register_pytree_with_keys_class
class _Numbered(dict[int, PyTree]):
    """A container in which the paths of `x[1][11]` and `x[11][1]` have the same text, "111"."""

    def tree_flatten_with_keys(self) -> tuple[list[tuple[int, PyTree]], tuple[int, ...]]:
        """Return all items, and their keys."""
        return list(self.items()), tuple(self)

    @classmethod
    def tree_unflatten(cls, keys: tuple[int, ...], values: Iterable[PyTree]) -> Self:
        """Restore the container."""
        return cls(zip(keys, values, strict=True))


def _check_similar_paths(key: jax.Array) -> str:
    zeros = _Numbered({1: _Numbered({11: jnp.zeros(9)}), 11: _Numbered({1: jnp.zeros(9)})})
    noise = add_gaussian_noise(1.0, key=key)
    drawn = jax.jit(lambda zeros: noise.update(zeros, noise.init(zeros))[0])(zeros)
    same = np.array_equal(drawn[1][11], drawn[11][1])
    return "x[1][11] and x[11][1] have the same noise" if same else ""


def _check_collectives_of_vmap(engine: Engine) -> str:
    batches, w = jnp.ones((4, 3, 2)), jnp.ones(2)
    for collective in (jax.lax.pmean, jax.lax.psum, jax.lax.pmax):
        loss = partial(loss_across_shards, partial(collective, axis_name="shards"))
        gradient = clipped_grad(loss, clip_norm=1.0, engine=engine)
        mapped = jax.vmap(gradient, (None, 0), axis_name="shards")
        call = partial(jax.eval_shape, mapped, w, batches)
        if wrong := expect_refusal(call, f"{collective.__name__} is accepted"):
            return wrong
    return ""
