"""Figure 1: how DP-SGD's losses grow as ε falls, in both columns."""

import math
from functools import partial

from benchmarks.paper import _record
from benchmarks.paper._columns import COLUMNS, EPOCHS, column

EPSILONS = (math.inf, 1.0, 0.5, 0.3, 0.2, 0.1)


def main() -> None:
    """Train everything that has no record yet."""
    args = _record.arguments(__doc__, "degradation")
    data = _record.mnist(args)
    epsilons, epochs = (EPSILONS[:2], 2) if args.smoke else (EPSILONS, EPOCHS)
    work = {
        name: partial(column, name, data, epsilons, (0.0,), epochs=epochs, seeds=3)
        for name in COLUMNS
    }
    _record.measure(args.output, {"columns": work})


if __name__ == "__main__":
    main()
