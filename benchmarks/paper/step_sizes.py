"""The effect of the step size a/t: test accuracy at ε = 0.1 and 0.2, in both columns."""

from functools import partial

from benchmarks.paper import _record
from benchmarks.paper._columns import COLUMNS, EPOCHS, column

STEP_SIZES = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0)
EPSILONS, SMOOTHINGS = (0.1, 0.2), (0.0, 1.0, 3.0)


def main() -> None:
    """Train everything that has no record yet."""
    args = _record.arguments(__doc__, "step_sizes")
    data = _record.mnist(args)
    sizes, epochs = (STEP_SIZES[:1], 2) if args.smoke else (STEP_SIZES, EPOCHS)
    work = {
        name: {
            str(a): partial(
                column, name, data, EPSILONS, SMOOTHINGS, epochs=epochs, seeds=3, step_size=a
            )
            for a in sizes
        }
        for name in COLUMNS
    }
    _record.measure(args.output, work)


if __name__ == "__main__":
    main()
