"""Run the tasks of an experiment, and write each result to its JSON record at once."""

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from sklearn.datasets import load_digits

from benchmarks import _data, _timing
from benchmarks._results import RESULTS

DELTA = 1e-5
EPSILONS = (0.30, 0.25, 0.20, 0.15, 0.10)  # the ε of the paper's Table 1
Examples = tuple[np.ndarray, np.ndarray]


class Split(NamedTuple):
    """Features between 0 and 1, (n, d), and labels."""

    private: Examples
    public: Examples
    test: Examples

    @property
    def classes(self) -> int:
        """The number of classes, which is public."""
        return int(self.test[1].max()) + 1

    def centred(self) -> "Split":
        """Subtract the mean of the public features; the model is the same, but starts closer."""
        mean = self.public[0].mean(axis=0)
        return Split(*((features - mean, labels) for features, labels in self))


def arguments(description: str | None, name: str) -> argparse.Namespace:
    """Parse the options that all experiments share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--data-dir", type=Path, help="a folder that holds mnist/, adult/ and cifar10/"
    )
    parser.add_argument("--smoke", action="store_true", help="digits instead of MNIST, in seconds")
    parser.add_argument("--output", type=Path, help="a JSON file (default: in benchmarks/results)")
    args = parser.parse_args()
    if args.output is None:  # a smoke run must not overwrite a real record
        folder = Path(tempfile.mkdtemp()) if args.smoke else RESULTS / "paper"
        args.output = folder / f"{name}.json"
    return args


def mnist(args: argparse.Namespace) -> Split:
    """Return MNIST, cut as in the paper; scikit-learn's digits for a smoke run."""
    if args.smoke:
        images, labels = load_digits(return_X_y=True)
        features = (images / 16).astype(np.float32)
        cuts = np.split(np.random.default_rng(0).permutation(len(labels)), [1000, 1400])
        return Split(*((features[cut], labels[cut].astype(np.int32)) for cut in cuts))
    data = _data.mnist(args.data_dir)

    def flat(images: np.ndarray) -> np.ndarray:
        return (images.reshape(len(images), -1) * 0.3081 + 0.1307).clip(0, 1).astype(np.float32)

    return cut((flat(data.train[0]), data.train[1]), (flat(data.test[0]), data.test[1]), 10_000)


def adult(args: argparse.Namespace) -> Split:
    """Return Adult; 6,000 of its training rows are treated as public."""
    data = _data.adult(args.data_dir)
    return cut(data.train, data.test, 6_000)


def cut(train: Examples, test: Examples, public: int) -> Split:
    """Return data with a random part of the training examples marked as public."""
    order = np.random.default_rng(0).permutation(len(train[1]))
    parts = [(train[0][cut], train[1][cut]) for cut in (order[:-public], order[-public:])]
    return Split(*parts, test)


def asked(task: Callable[[], Any]) -> str:
    """Return the arguments of a task, without data and paths."""

    def is_plain(x: Any) -> bool:
        if isinstance(x, tuple):
            return all(map(is_plain, x))
        return x is None or isinstance(x, (int, float, str)) or is_dataclass(x)

    given = (*getattr(task, "args", ()), *getattr(task, "keywords", {}).values())
    return repr([x for x in given if is_plain(x)])


def timed(task: Callable[[], Any]) -> dict[str, Any]:
    """Return the result of a task, its arguments, and its seconds."""
    begin = time.perf_counter()
    found = task()
    return {
        "found": found,
        "asked": asked(task),
        "seconds": round(time.perf_counter() - begin, 1),
    }


def measure(path: Path, work: Mapping[str, Mapping[str, Callable[[], Any]]]) -> None:
    """Run every task that has no result yet, and write each result at once.

    A task whose arguments changed runs again. So do all later tasks that read the record, which
    are those with its path among their arguments.
    """
    record = _timing.load_record(path)
    stale = False
    for part, tasks in work.items():
        known = record.get(part, {})
        was_stale = stale
        for name, task in tasks.items():
            given = getattr(task, "args", ())
            reads = any(isinstance(x, Path) and x == path for x in given)
            is_same = known.get(name, {}).get("asked") == asked(task)
            if not is_same or (reads and was_stale):
                known.pop(name, None)
                stale = True
        for name in known.keys() - tasks.keys():
            del known[name]
            stale = True
    if stale and record:
        _timing.write(path, {**record, "is_whole": False})
    timed_work = {
        part: {name: partial(timed, task) for name, task in tasks.items()}
        for part, tasks in work.items()
    }
    _timing.measure_missing(path, timed_work)


def rounded(values: Any) -> list[Any]:
    """Round numbers to six digits, which is more than their precision."""
    return np.vectorize(lambda x: float(f"{x:.6g}"))(np.asarray(values, np.float64)).tolist()
