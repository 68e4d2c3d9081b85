"""Choose settings on public examples, and train the chosen ones on private examples.

Batches are full, and the step size falls linearly to zero. The public mean is subtracted from all
features. The search uses five-fold cross-validation on the public examples, with the noise that the
mean gradient of all private examples will have.
"""

from itertools import product
from typing import Any, NamedTuple

import numpy as np

from benchmarks.paper import _record
from benchmarks.paper._regression import Protocol, Settings, train
from optax_lsdp.accounting import calibrate_noise_multiplier

FOLDS = 5
FIRST_SEED = 1000  # for searches: the choice must not depend on the noise of the final runs


class Variant(NamedTuple):
    """Settings that change the compiled program, and so cannot be mapped over."""

    steps: int
    layout: str = "inputs"
    scope: Any = "leaf"

    def protocol(self, size: int) -> Protocol:
        """Return the protocol for a given number of examples."""
        return Protocol(
            steps=self.steps, batch=size, layout=self.layout, scope=self.scope, rate="linear"
        )


def noise(epsilon: float, steps: int) -> float:
    """Return a noise multiplier that suffices for full batches, even after rounding to float32."""
    return (1 + 1e-6) * calibrate_noise_multiplier(
        epsilon=epsilon, delta=_record.DELTA, steps=steps, sampling="full", sampling_rate=1.0
    )


def search(
    data: _record.Split,
    epsilon: float,
    variant: Variant,
    smoothings: tuple[float, ...],
    step_sizes: tuple[float, ...],
) -> Any:
    """Return the cross-validated accuracy of every σ and step size on public examples."""
    features, labels = data.centred().public
    grid = np.array(list(product(smoothings, step_sizes)))
    accuracies = []
    for fold in range(FOLDS):
        held_out = np.arange(len(labels)) % FOLDS == fold
        size = int((~held_out).sum())
        scaled = noise(epsilon, variant.steps) * size / len(data.private[1])
        curves = train(
            variant.protocol(size),
            (features[~held_out], labels[~held_out]),
            {"held out": (features[held_out], labels[held_out])},
            Settings(np.full(len(grid), scaled), grid[:, 0], grid[:, 1]),
            [FIRST_SEED + fold],
            classes=data.classes,
        )
        accuracies.append(100 * curves.accuracies["held out"][0, :, -1])
    return [
        {**variant._asdict(), "smoothing": s, "step_size": r, "accuracy": a}
        for (s, r), a in zip(
            grid.tolist(), _record.rounded(np.mean(accuracies, axis=0)), strict=True
        )
    ]


def best(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the best setting on public examples."""
    return max(rows, key=lambda row: row["accuracy"])


def final(data: _record.Split, epsilon: float, chosen: dict[str, Any], seeds: int) -> Any:
    """Train the chosen setting on private examples, and return its test accuracies."""
    variant = Variant(chosen["steps"], chosen["layout"], chosen["scope"])
    multiplier = noise(epsilon, variant.steps)
    centred = data.centred()
    curves = train(
        variant.protocol(len(data.private[1])),
        centred.private,
        {"test": centred.test},
        Settings([multiplier], [chosen["smoothing"]], [chosen["step_size"]]),
        range(seeds),
        classes=data.classes,
    )
    accuracies = _record.rounded(100 * curves.accuracies["test"][:, 0, -1])
    found = {"noise_multiplier": multiplier, "seeds": seeds, "test_accuracies": accuracies}
    return {**chosen, **found}
