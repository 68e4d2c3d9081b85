"""Check the paper's theory: γ and β, Theorem 1, the utility bounds, the nonconvex example."""

import math
from functools import partial
from typing import Any

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import scipy.optimize

import optax_lsdp as lsdp
from benchmarks.paper import _record
from benchmarks.paper._columns import OF_THE_CODE, theorem_noise
from benchmarks.paper._regression import loss
from optax_lsdp.accounting import SampledGaussian, calibrate_noise_multiplier
from optax_lsdp.smoothing import ring_beta, ring_gamma

SIZES, SMOOTHINGS = (1000, 10_000, 100_000), (1.0, 2.0, 3.0, 4.0, 5.0)
SETTINGS = {  # dataset, batch, steps
    "logistic regression": (60_000, 128, 23_450),
    "MNIST CNN": (60_000, 256, 14_100),
}


def constants() -> Any:
    """Return γ and β for the sizes and σ of the paper's tables."""
    exact = {"gamma": ring_gamma, "beta": ring_beta}
    return {
        name: {str(size): [float(function(s, size)) for s in SMOOTHINGS] for size in SIZES}
        for name, function in exact.items()
    }


def noise(epsilon: float) -> Any:
    """Compare Theorem 1's noise for Table 1 with the noise that its ε needs."""
    size, batch, steps = SETTINGS["logistic regression"]
    theorem = theorem_noise(epsilon, size, batch, steps)
    tight = calibrate_noise_multiplier(
        epsilon=epsilon, delta=_record.DELTA, steps=steps, sampling_rate=batch / size
    )
    code = theorem.noise_multiplier * OF_THE_CODE
    return {
        "theorem": theorem.noise_multiplier,
        "code": code,
        "tight": tight,
        "theorem_holds": theorem.holds,
        "epsilon_of_theorem": theorem.poisson_epsilon,
        "epsilon_of_code": SampledGaussian(code, batch / size, steps).epsilon(_record.DELTA),
    }


def holds_from(name: str) -> Any:
    """Return the smallest ε at which both conditions of Theorem 1 hold."""

    def holds(epsilon: float) -> bool:
        return theorem_noise(epsilon, *SETTINGS[name]).holds

    low, high = 0.1, 0.1
    while not holds(high):
        low, high = high, 1.1 * high
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def bounds(data: _record.Split, iterations: int) -> Any:
    """Return the factor of each σ in Theorem 2's bound, at the optimum of a real problem.

    The bound is proportional to √(γ(D_σ + G²/b)), with D_σ = ‖w⁰ − w*‖² in the norm of A_σ: γ falls
    with σ, but D_σ grows. G = 1 is the clip norm, b = 128.
    """
    features, labels = map(jnp.asarray, data.private)
    first = {
        "kernel": jnp.zeros((features.shape[1], data.classes)),
        "bias": jnp.zeros(data.classes),
    }
    zeros, unravel = jax.flatten_util.ravel_pytree(first)

    @jax.jit
    def descent(flat: jax.Array) -> Any:
        def mean(flat: jax.Array) -> jax.Array:
            losses = jax.vmap(loss, (None, 0))(unravel(flat), (features, labels))
            return losses.mean() + 0.5e-4 * jnp.vdot(flat, flat)

        return jax.value_and_grad(mean)(flat)

    def in_double(flat: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = descent(jnp.asarray(flat, jnp.float32))
        return float(value), np.asarray(slope, np.float64)

    found = scipy.optimize.minimize(
        in_double,
        np.asarray(zeros, np.float64),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": iterations, "maxcor": 30, "ftol": 0.0, "gtol": 1e-6},
    )
    kernel = unravel(jnp.asarray(found.x, jnp.float32))["kernel"]
    optimum = np.asarray(kernel.T.ravel(), np.float64)  # inputs of each class in turn
    differences = np.roll(optimum, -1) - optimum

    def bound(smoothing: float) -> float:
        distance = optimum @ optimum + smoothing * differences @ differences
        return math.sqrt(float(ring_gamma(smoothing, optimum.size)) * (distance + 1 / 128))

    return {
        "gradient_norm": float(np.linalg.norm(in_double(found.x)[1])),
        "distance": float(optimum @ optimum),
        "factors": {str(s): bound(s) / bound(0.0) for s in (0.0, *SMOOTHINGS)},
    }


def example() -> Any:
    """Return gradient norms of the nonconvex example on both sides of its two points."""

    def inside(p: jax.Array) -> jax.Array:
        return p[0] ** 2 / 4 + p[1] ** 2

    def outside(p: jax.Array) -> jax.Array:
        return jnp.sin(jnp.pi / 2 * inside(p))

    points = {"a1": (2.0, 0.0), "a2": (1.0, math.sqrt(3) / 2)}
    return {
        name: {
            "distance": math.hypot(*point),
            **{
                side: float(jnp.linalg.norm(jax.grad(function)(jnp.array(point))))
                for side, function in (("inside", inside), ("outside", outside))
            },
        }
        for name, point in points.items()
    }


def energy(smoothing: float, size: int) -> Any:
    """Return ‖A⁻¹n‖²/‖n‖² and ⟨n, A⁻¹n⟩/⟨n, n⟩ of random noise n: estimates of β and γ."""
    noise = np.asarray(jax.random.normal(jax.random.key(0), (size,)), np.float64)
    tx = lsdp.laplacian_smooth(smoothing)
    smoothed, _ = tx.update(jnp.asarray(noise, jnp.float32), tx.init(None))
    smoothed = np.asarray(smoothed, np.float64)
    whole = noise @ noise
    return {
        "beta": {"seen": smoothed @ smoothed / whole, "exact": float(ring_beta(smoothing, size))},
        "gamma": {"seen": smoothed @ noise / whole, "exact": float(ring_gamma(smoothing, size))},
    }


def main() -> None:
    """Compute everything that has no record yet."""
    args = _record.arguments(__doc__, "theory")
    data = _record.mnist(args)
    size = 10**4 if args.smoke else 10**6
    work: dict[str, dict[str, Any]] = {
        "constants": {"tables": constants},
        "noise": {str(e): partial(noise, e) for e in _record.EPSILONS[: 1 if args.smoke else None]},
        "holds from": {name: partial(holds_from, name) for name in SETTINGS},
        "bounds": {"Theorem 2": partial(bounds, data, 20 if args.smoke else 3000)},
        "example": {"points": example},
        "energy": {str(s): partial(energy, s, size) for s in SMOOTHINGS},
    }
    _record.measure(args.output, work)


if __name__ == "__main__":
    main()
