"""Search: settings are compared on public examples, and what is chosen is trained on private ones.

All examples are in every batch, and the step size falls linearly to zero. The public examples get
the noise that the mean over all private ones will have.
"""

from itertools import product
from typing import Any, NamedTuple

import numpy as np

from benchmarks.paper import _record
from benchmarks.paper._regression import Protocol, Settings, train
from optax_lsdp.accounting import calibrate_noise_multiplier

HELD_OUT = 0.2  # of the public examples, on which settings are compared


class Variant(NamedTuple):
    """What cannot be a setting among others, as it changes the program."""

    steps: int
    layout: str = "inputs"
    scope: Any = "leaf"

    def protocol(self, size: int) -> Protocol:
        """Return the protocol for so many examples."""
        return Protocol(
            steps=self.steps, batch=size, layout=self.layout, scope=self.scope, rate="linear"
        )


def noise(epsilon: float, steps: int) -> float:
    """Return the smallest sufficient noise multiplier for full batches."""
    return calibrate_noise_multiplier(
        epsilon=epsilon, delta=_record.DELTA, steps=steps, sampling="full", sampling_rate=1.0
    )


def search(
    data: _record.Split,
    epsilon: float,
    variant: Variant,
    smoothings: tuple[float, ...],
    step_sizes: tuple[float, ...],
    seeds: int = 2,
) -> Any:
    """Return the accuracy of every σ and step size on public examples that were held out."""
    features, labels = data.public
    cut = int(len(labels) * (1 - HELD_OUT))
    grid = np.array(list(product(smoothings, step_sizes)))
    scaled = noise(epsilon, variant.steps) * cut / len(data.private[1])
    curves = train(
        variant.protocol(cut),
        (features[:cut], labels[:cut]),
        {"held out": (features[cut:], labels[cut:])},
        Settings(np.full(len(grid), scaled), grid[:, 0], grid[:, 1]),
        seeds,
        classes=data.classes,
    )
    accuracies = 100 * curves.accuracies["held out"][..., -1].mean(axis=0)
    return [
        {**variant._asdict(), "smoothing": s, "step_size": r, "accuracy": a}
        for (s, r), a in zip(grid.tolist(), _record.rounded(accuracies), strict=True)
    ]


def best(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the setting that was best on public examples."""
    return max(rows, key=lambda row: row["accuracy"])


def final(data: _record.Split, epsilon: float, chosen: dict[str, Any], seeds: int) -> Any:
    """Train what was chosen on private examples, and return its accuracies on the test set."""
    variant = Variant(chosen["steps"], chosen["layout"], chosen["scope"])
    multiplier = noise(epsilon, variant.steps)
    curves = train(
        variant.protocol(len(data.private[1])),
        data.private,
        {"test": data.test},
        Settings([multiplier], [chosen["smoothing"]], [chosen["step_size"]]),
        seeds,
        classes=data.classes,
    )
    accuracies = _record.rounded(100 * curves.accuracies["test"][:, 0, -1])
    return {**chosen, "noise_multiplier": multiplier, "test_accuracies": accuracies}
