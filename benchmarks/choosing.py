"""What batch size, number of steps and δ cost, by the accountant alone.

Every row is a run on 60,000 examples with Poisson batches. Results are written row by row, and an
interrupted run continues where it stopped.
"""

import math
from functools import partial

from benchmarks import _timing
from optax_lsdp.accounting import SampledGaussian, calibrate_noise_multiplier

EXAMPLES = 60_000
DELTA = 1e-5
EPSILONS = (0.5, 1.0, 3.0, 8.0)
BATCHES = (64, 256, 1024, 4096, 16_384)
EPOCHS = 20
STEPS = (10, 100, 1000, 10_000)
BATCH = 1024  # where steps vary
DELTAS = (1e-4, 1e-5, 1e-6, 1e-7, 1e-8)
NOISES = (0.7, 1.0, 2.0)


def noise(epsilon: float, batch: int, steps: int) -> dict[str, float]:
    """Return the noise that a run needs.

    The last number is the standard deviation of the noise on the mean of all released gradients, in
    clip norms: z / (b·√T).
    """
    multiplier = calibrate_noise_multiplier(
        epsilon=epsilon, delta=DELTA, sampling_rate=batch / EXAMPLES, steps=steps
    )
    return {
        "steps": steps,
        "noise_multiplier": multiplier,
        "one_step": multiplier / batch,
        "whole_run": multiplier / (batch * math.sqrt(steps)),
    }


def epsilon(noise_multiplier: float, delta: float) -> float:
    """Return ε of a run with batches of `BATCH` examples."""
    run = SampledGaussian(noise_multiplier, BATCH / EXAMPLES, EPOCHS * EXAMPLES // BATCH)
    return run.epsilon(delta)


def main() -> None:
    """Compute everything that has no record yet."""
    options = _timing.arguments(__doc__ or "", "choosing.json")
    epsilons = EPSILONS[-1:] if options.smoke else EPSILONS
    work = {
        "batches": {
            f"{goal:g} {batch}": partial(noise, goal, batch, round(EPOCHS * EXAMPLES / batch))
            for goal in epsilons
            for batch in BATCHES
        },
        "steps": {
            f"{goal:g} {steps}": partial(noise, goal, BATCH, steps)
            for goal in epsilons
            for steps in STEPS
        },
        "deltas": {
            f"{multiplier:g} {delta:g}": partial(epsilon, multiplier, delta)
            for multiplier in NOISES
            for delta in DELTAS
        },
    }
    _timing.measure_missing(options.output, work)


if __name__ == "__main__":
    main()
