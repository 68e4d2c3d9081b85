"""Bias and variance of the smoothed gradient along a private run, against the true gradient.

Let g be the mean of all clipped gradients. Smoothing the noisy gradient gives A⁻¹(g + n). Its bias
is A⁻¹g − g. Its variance is E‖A⁻¹n‖², which is β times that of the noise. Clipping adds its own
bias, g minus the mean of all gradients, which is the same for every σ.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lsdp as lsdp
from benchmarks.paper import _record
from benchmarks.paper._regression import loss
from benchmarks.paper._search import noise
from optax_lsdp.smoothing import Grid, grid_beta, ring_beta

SMOOTHINGS = (0.3, 1.0, 3.0, 10.0, 30.0)
STEPS, STEP_SIZE, LOOKS, DRAWS = 80, 8.0, 9, 20


def layouts(side: int, classes: int) -> dict[str, Any]:
    """Return the layouts of an image kernel, and the share of noise that each leaves."""
    size = side * side * classes
    return {
        "inputs": ("inputs", lambda s: ring_beta(s, size)),
        "stored": ("stored", lambda s: ring_beta(s, size)),
        "grid": (
            lambda path, shape: Grid((0, 1), (side, side, classes)),
            lambda s: grid_beta(s, (side, side)),
        ),
    }


def errors(data: _record.Split, epsilon: float, steps: int) -> Any:
    """Train with DP-SGD, and compute bias and variance of every σ and layout at some steps."""
    features, labels = data.centred().private
    size, width, classes = len(labels), features.shape[1], data.classes
    batch = jnp.asarray(features), jnp.asarray(labels)
    multiplier = noise(epsilon, steps)
    deviation = multiplier / size  # standard deviation per entry of the mean, for clip norm 1
    rate = optax.linear_schedule(STEP_SIZE, 0.0, steps)
    optimizer = lsdp.privatize(
        optax.sgd(rate),
        clip_norm=1.0,
        noise_multiplier=multiplier,
        expected_batch_size=size,
        key=jax.random.key(0),
    )
    gradient = lsdp.clipped_grad(loss, clip_norm=1.0)
    exact = lsdp.clip_per_example(1.0)
    whole = jax.grad(lambda params: jax.vmap(loss, (None, 0))(params, batch).mean())

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        total = gradient(params, batch)
        updates, state = optimizer.update(total, state, params)
        mean, _ = exact.update(total, exact.init(params), params)
        clipped = mean["kernel"] / size
        return optax.apply_updates(params, updates), state, clipped, whole(params)["kernel"]

    params = {"kernel": jnp.zeros((width, classes)), "bias": jnp.zeros(classes)}
    state = optimizer.init(params)
    looked_at = set(np.linspace(0, steps - 1, LOOKS).round().astype(int).tolist())
    found = []
    for number in range(steps):
        params, state, mean, true = step(params, state)
        if number in looked_at:
            rows = _split(np.asarray(mean), deviation, layouts(round(width**0.5), classes))
            clipping = {
                "true": float(jnp.sum(true**2)),
                "clipping": float(jnp.sum((mean - true) ** 2)),
            }
            found.append({"step": number, **clipping, **rows})
    return found


def _split(mean: np.ndarray, deviation: float, layouts: dict[str, Any]) -> dict[str, Any]:
    """Return squared bias and variance of every layout and σ, and of the unsmoothed gradient."""
    energy = mean.size * deviation**2
    rows: dict[str, Any] = {"signal": float(np.sum(mean**2)), "noise": energy}
    noise = deviation * jax.random.normal(jax.random.key(0), (DRAWS, *mean.shape))
    for name, (layout, beta) in layouts.items():
        rows[name] = {}
        for smoothing in SMOOTHINGS:
            tx = lsdp.laplacian_smooth(smoothing, layout=layout)

            def smooth(update: jax.Array, tx: Any = tx) -> jax.Array:
                return tx.update(update, tx.init(None))[0]

            seen = jax.vmap(smooth)(noise)
            rows[name][str(smoothing)] = {
                "bias": float(np.sum((np.asarray(smooth(jnp.asarray(mean))) - mean) ** 2)),
                "variance": float(jnp.sum(seen**2)) / DRAWS,
                "variance_by_beta": float(beta(smoothing)) * energy,
            }
    return rows


def main() -> None:
    """Compute everything that has no record yet."""
    args = _record.arguments(__doc__, "errors")
    data = _record.mnist(args)
    steps = 10 if args.smoke else STEPS
    epsilons = (0.1,) if args.smoke else (0.1, 0.3, 1.0)
    work = {str(epsilon): partial(errors, data, epsilon, steps) for epsilon in epsilons}
    _record.measure(args.output, {"runs": work})


if __name__ == "__main__":
    main()
