"""When does smoothing help? Its gain over σ = 0, each with its own tuned step size.

The script varies noise level, layout, scope and data. Its twenty seeds draw the same noise with and
without smoothing.
"""

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks._timing import load_record
from benchmarks.paper import _record
from benchmarks.paper._search import Variant, best, final, search

EPSILONS = (0.02, 0.05, 0.1, 0.3, 1.0)
SMOOTHINGS = (0.3, 1.0, 3.0, 10.0, 30.0)
STEP_SIZES = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
STEPS, SEEDS = 60, 20
VARIANTS = {
    "none": Variant(STEPS),
    "inputs": Variant(STEPS),
    "stored": Variant(STEPS, "stored"),
    "grid": Variant(STEPS, "grid"),
    "inputs, whole tree": Variant(STEPS, "inputs", "tree"),
}


def chosen(path: Path, data: _record.Split, epsilon: float, name: str, seeds: int) -> Any:
    """Train the best setting of a variant."""
    return final(data, epsilon, best(load_record(path)["search"][name]["found"]), seeds)


def main() -> None:
    """Search and train everything that has no record yet."""
    args = _record.arguments(__doc__, "when")
    sets = {"MNIST": _record.mnist(args)}
    if not args.smoke:
        sets["Adult"] = _record.adult(args)
    epsilons = EPSILONS[2:3] if args.smoke else EPSILONS
    searched: dict[str, Any] = {}
    trained: dict[str, Any] = {}
    for (title, data), epsilon, (name, variant) in product(
        sets.items(), epsilons, VARIANTS.items()
    ):
        if title == "Adult" and name == "grid":  # a table has no grid
            continue
        smoothings = SMOOTHINGS if name != "none" else (0.0,)
        key = f"{title} {epsilon} {name}"
        searched[key] = partial(search, data, epsilon, variant, smoothings, STEP_SIZES)
        seeds = 2 if args.smoke else SEEDS
        trained[key] = partial(chosen, args.output, data, epsilon, key, seeds)
    _record.measure(args.output, {"search": searched, "final": trained})


if __name__ == "__main__":
    main()
