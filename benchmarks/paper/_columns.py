"""The paper's protocol in two columns: as published, and as private.

*As published* does what the authors' code does: it clips each tensor of a batch's mean gradient,
shuffles all 60,000 images, and adds the noise of their Theorem 1 divided by √5. It is not
differentially private. *As private* clips every example, samples by Poisson from 50,000 images, and
adds the least noise that suffices. Both train for 50 epochs of batches of 128 on standardised
pixels, starting at zero, with weight decay 1e-4 and step size a/t, where t is the first step of the
epoch.
"""

import math
from itertools import product
from typing import Any

import numpy as np

from benchmarks.paper import _record
from benchmarks.paper._regression import Protocol, Settings, train
from optax_lsdp import PrivacyPlan
from optax_lsdp.accounting import PaperNoise, paper_noise

BATCH, EPOCHS = 128, 50
MEAN, DEVIATION = np.float32(0.1307), np.float32(0.3081)  # the published values for MNIST's pixels
COLUMNS = ("published", "private")
OF_THE_CODE = 1 / math.sqrt(5)  # the authors' code multiplies the theorem's noise by it
NO_NOISE = 1e-9  # for ε = ∞, since `add_gaussian_noise` refuses zero


def noise(column: str, data: _record.Split, epsilon: float, epochs: int) -> tuple[int, float]:
    """Return the number of steps and the noise multiplier of a column."""
    size = len(data.private[1]) + (len(data.public[1]) if column == "published" else 0)
    steps = epochs * (size // BATCH)
    if epsilon == math.inf:
        return steps, NO_NOISE
    if column == "private":
        plan = PrivacyPlan(
            dataset_size=size,
            expected_batch_size=BATCH,
            steps=steps,
            epsilon=epsilon,
            delta=_record.DELTA,
        )
        return steps, plan.noise_multiplier
    return steps, theorem_noise(epsilon, size, BATCH, steps).noise_multiplier * OF_THE_CODE


def theorem_noise(epsilon: float, size: int, batch: int, steps: int) -> PaperNoise:
    """Return the noise of the paper's Theorem 1, whether or not its conditions hold."""
    return paper_noise(
        epsilon=epsilon,
        delta=_record.DELTA,
        dataset_size=size,
        batch_size=batch,
        steps=steps,
        lipschitz=1.0,
        number_alone=True,
    )


def column(
    name: str,
    data: _record.Split,
    epsilons: tuple[float, ...],
    smoothings: tuple[float, ...],
    *,
    epochs: int = EPOCHS,
    seeds: int = 5,
    step_size: float = 1.0,
) -> Any:
    """Train all ε and σ of a column together, and return accuracies and curves."""
    grid = list(product(epsilons, smoothings))
    found = [noise(name, data, epsilon, epochs) for epsilon, _ in grid]
    private = name == "private"
    data = _record.Split(*(((x - MEAN) / DEVIATION, labels) for x, labels in data))
    together = [np.concatenate(parts) for parts in zip(data.private, data.public, strict=True)]
    examples = data.private if private else (together[0], together[1])
    validation = (
        data.public if private else data.test
    )  # the published protocol trains on all others
    curves = train(
        Protocol(
            steps=found[0][0],
            batch=BATCH,
            weight_decay=1e-4,
            rate="1/t",
            is_private=private,
            points=epochs,
        ),
        examples,
        {"training": _some(data.private), "validation": validation, "test": data.test},
        Settings([z for _, z in found], [s for _, s in grid], [step_size] * len(grid)),
        range(seeds),
    )
    return [
        {
            "epsilon": epsilon if epsilon < math.inf else None,
            "smoothing": smoothing,
            "noise_multiplier": z,
            "steps": steps,
            "seeds": seeds,
            "test_accuracies": _record.rounded(100 * curves.accuracies["test"][:, i, -1]),
            "losses": {
                part: _record.rounded(curves.losses[part][:, i].mean(axis=0))
                for part in ("training", "validation")
            },
        }
        for i, ((epsilon, smoothing), (steps, z)) in enumerate(zip(grid, found, strict=True))
    ]


def _some(examples: Any, count: int = 10_000) -> Any:
    """Return enough examples to estimate a loss."""
    return tuple(part[:count] for part in examples)
