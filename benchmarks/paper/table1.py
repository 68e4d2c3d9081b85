"""Table 1, and the loss curves: softmax regression on MNIST by ε and σ, in both columns."""

from functools import partial

from benchmarks.paper import _record
from benchmarks.paper._columns import COLUMNS, EPOCHS, column

SMOOTHINGS = (0.0, 1.0, 2.0, 3.0)


def main() -> None:
    """Train everything that has no record yet."""
    args = _record.arguments(__doc__, "table1")
    data = _record.mnist(args)
    epsilons = _record.EPSILONS[-1:] if args.smoke else _record.EPSILONS
    epochs = 2 if args.smoke else EPOCHS
    work = {
        name: partial(column, name, data, epsilons, SMOOTHINGS, epochs=epochs) for name in COLUMNS
    }
    _record.measure(args.output, {"columns": work})


if __name__ == "__main__":
    main()
