"""Audits of plans: what they claim of ε, how many steps they allow, and which keys they use."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy.stats import norm

from optax_lsdp.accounting import Ledger
from optax_lsdp.auditing._noise import audit_noise
from optax_lsdp.auditing._renewal import at_noon, what_two_share
from optax_lsdp.auditing._report import (
    ClaimsReport,
    StatisticsReport,
    checked,
    unless_refused,
)
from optax_lsdp.noise import fresh_key
from optax_lsdp.optimizers import steps_taken
from optax_lsdp.planning import PrivacyPlan

_SIZE, _BATCH, _STEPS, _NOISE, _DELTA = 400, 40, 24, 1.0, 1e-5
_SHAPES = {"kernel": (20, 30), "bias": (30,), "scale": (30,), "shift": (7,)}
_GRID = 5e-4  # of privacy losses


def _plan(**changes: Any) -> PrivacyPlan:
    chosen: dict[str, Any] = {
        "dataset_size": _SIZE,
        "expected_batch_size": _BATCH,
        "steps": _STEPS,
        "noise_multiplier": _NOISE,
        "delta": _DELTA,
    }
    return PrivacyPlan(**{**chosen, **changes})


def audit_plan(key: jax.Array) -> ClaimsReport:
    """Hold a plan to its ε, its steps, its masks and its keys."""
    return checked(
        {
            "ε of full batches is at least the closed form": _full_batches,
            "ε of Poisson batches is at least a numerical bound": _poisson_batches,
            "steps beyond the plan are refused": partial(_steps_beyond, key),
            "steps that a budget does not cover are refused": _budget,
            "batches without their mask are refused": _without_mask,
            "batches are the same inside of jit": partial(_inside_jit, key),
            "sampler, noise and plans have keys of their own": partial(_keys, key),
            "fresh keys are random numbers": _fresh_keys,
        }
    )


def audit_plan_noise(key: jax.Array) -> StatisticsReport:
    """Compare the noise of a plan's optimizer with what its ε needs."""
    plan = _plan()
    params = {name: jnp.zeros(shape) for name, shape in _SHAPES.items()}
    optimizer = plan.optimizer(optax.sgd(1.0), key)
    gradient = plan.clipped_grad(_loss)
    batch, nobody = jnp.zeros((2, 4)), jnp.zeros(2, bool)

    @jax.jit
    def release(state: Any) -> Any:
        return optimizer.update(gradient(params, batch, nobody), state, params)

    noises, state = [], optimizer.init(params)
    for _ in range(plan.steps):
        noise, state = release(state)
        noises.append(noise)
    scale = plan.noise_multiplier * plan.clip_norm / plan.expected_batch_size
    return audit_noise(noises.__getitem__, scale=scale, steps=plan.steps)


def _loss(params: Any, example: jax.Array) -> jax.Array:
    return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(params)) * jnp.sum(example)


def _full_batches() -> str:
    """Compare with δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ), μ = √T/z."""
    everyone: dict[str, Any] = {"sampling": "full", "expected_batch_size": _SIZE}
    for plan in (_plan(**everyone), _plan(**everyone, noise_multiplier=None, epsilon=2.0)):
        mu, epsilon = math.sqrt(plan.steps) / plan.noise_multiplier, plan.epsilon
        log_second = epsilon + norm.logcdf(-mu / 2 - epsilon / mu)
        delta = norm.cdf(mu / 2 - epsilon / mu) - math.exp(log_second)
        if delta > _DELTA * (1 + 1e-6):
            return f"at ε = {epsilon:.4g}, δ is {delta:.3g}"
    return ""


def _poisson_batches() -> str:
    """Compose the privacy losses of all steps on a grid, each rounded down."""
    plan = _plan()
    rate, noise = plan.expected_batch_size / plan.dataset_size, plan.noise_multiplier
    edges = np.linspace(-12 * noise, 1 + 12 * noise, 20_001)
    middle = (edges[1:] + edges[:-1]) / 2
    without = np.diff(norm.cdf(edges, scale=noise))
    with_one = (1 - rate) * without + rate * np.diff(norm.cdf(edges, loc=1, scale=noise))
    loss = np.log1p(rate * np.expm1((2 * middle - 1) / (2 * noise**2)))
    width = 2 ** math.ceil(math.log2(4 * plan.steps / _GRID))
    cells = np.floor(loss / _GRID).astype(int) - 1  # a cell more is for the grid of `edges`
    masses = np.bincount(cells % width, with_one, width)
    composed = np.fft.irfft(np.fft.rfft(masses) ** plan.steps, width).clip(0)
    losses = _GRID * (np.arange(width) - np.where(np.arange(width) > width // 2, width, 0))
    kept = losses > plan.epsilon
    delta = float(np.sum(composed[kept] * -np.expm1(plan.epsilon - losses[kept])))
    return "" if delta <= _DELTA else f"at ε = {plan.epsilon:.4g}, δ is at least {delta:.3g}"


def _steps_beyond(key: jax.Array) -> str:
    """Take one step more than planned, inside and outside of `jit`."""
    plan = _plan(steps=2)
    params, batch, mask = jnp.ones(3), jnp.ones((2, 3)), jnp.ones(2, bool)
    optimizer = plan.optimizer(optax.sgd(1.0, momentum=0.9), key)
    gradient = plan.clipped_grad(jnp.vdot)
    update = jax.jit(optimizer.update)
    total, state = jax.jit(gradient)(params, batch, mask), optimizer.init(params)
    for step in range(plan.steps):
        moves, state = update(total, state, params)
        if not np.any(moves) or int(steps_taken(state)) != step + 1:
            return f"step {step} of {plan.steps} does not move or is not counted"
    moves, after = update(total, state, params)
    if np.any(moves):
        return "inside of jit, a step beyond moves the parameters"
    plain = [
        jax.tree.leaves(x) for x in jax.device_get((_without_keys(state), _without_keys(after)))
    ]
    if any(np.any(one != other) for one, other in zip(*plain, strict=True)):
        return "inside of jit, a step beyond moves the state"
    return unless_refused(lambda: optimizer.update(total, state, params), "a step beyond is taken")


def _without_keys(state: Any) -> list[jax.Array]:
    leaves = jax.tree.leaves(state)
    return [x for x in leaves if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]


def _budget() -> str:
    """Ask how many steps are left after some were counted twice, and compose them all again."""
    plan = _plan(epsilon=1.1 * _plan().epsilon)
    step = plan.event(0)
    if plan.remaining_steps(Ledger()) != plan.steps:
        return f"of {plan.steps} steps {plan.remaining_steps(Ledger())} are left at first"
    for recorded, taken in ((plan.steps, plan.steps), (20, 10), (2 * plan.steps, 3)):
        ledger = Ledger([replace(step, steps=recorded)])
        left = plan.remaining_steps(ledger, taken)
        spent = replace(step, steps=recorded + left).epsilon(plan.delta_of_noise)
        if left and (spent > plan.epsilon or taken + left > plan.steps):
            return f"after {recorded} steps {left} more are allowed, at ε = {spent:.4g}"
        if plan.allows(ledger, taken) != (left > 0):
            return f"after {recorded} steps another one is allowed, and {left} are left"
    return ""


def _without_mask() -> str:
    plan, params, batch = _plan(), jnp.zeros(3), jnp.ones((50, 3))
    gradient = plan.clipped_grad(jnp.vdot)
    optimizer = plan.optimizer(optax.sgd(1.0), jax.random.key(0))
    state = jax.eval_shape(optimizer.init, params)

    def stacked(state: Any) -> Any:
        return optimizer.update(batch, state, params)

    return unless_refused(
        lambda: jax.eval_shape(gradient, params, batch), "a gradient takes a batch without one"
    ) or unless_refused(
        lambda: jax.eval_shape(stacked, state), "an optimizer takes stacked gradients without one"
    )


def _inside_jit(key: jax.Array) -> str:
    sampler = _plan().sampler(key)
    compiled = jax.jit(sampler.batch)
    for step in (0, 1, 1000, 2**31 - 2):
        pairs = zip(sampler.batch(step), compiled(jnp.asarray(step, jnp.int32)), strict=True)
        if not all(np.array_equal(one, other) for one, other in pairs):
            return f"that of step {step} is another one"
    return ""


def _keys(key: jax.Array) -> str:
    """Compare all keys that two plans derive from one."""
    plans = {"one plan": _plan(), "another plan": _plan(steps=2)}
    found = {"the key itself": _bits(key)}
    for name, plan in plans.items():
        state = plan.optimizer(optax.sgd(1.0), key).init(jnp.zeros(1))
        keys = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
        found[f"the noise of {name}"] = _bits(keys[0])
        found[f"the sampler of {name}"] = _bits(getattr(plan.sampler(key), "key", None))
        for label in ("sampling", "noise", "examples"):
            found[f"{label!r} of {name}"] = _bits(plan.derive_key(key, label))
    pairs = [(a, b) for a in found for b in found if a < b and found[a] == found[b]]
    derived = {
        (f"{label!r} of {name}", f"the {part} of {name}")
        for name in plans
        for label, part in (("sampling", "sampler"), ("noise", "noise"))
    }
    shared = [pair for pair in pairs if pair not in derived]
    return f"{shared[0][0]} and {shared[0][1]} have one key" if shared else ""


def _fresh_keys() -> str:
    """Compare two fresh keys that are made at one moment by one process."""
    found = []
    for _ in range(2):
        with at_noon():
            found.append(int.from_bytes(_bits(fresh_key())))
    return what_two_share(*found)


def _bits(key: Any) -> bytes:
    return np.asarray(jax.random.key_data(key)).tobytes()
