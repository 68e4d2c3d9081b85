"""The report: records go in, the text of this folder's README comes out, with its figures."""

from collections.abc import Callable, Iterable
from functools import partial

from benchmarks._results import RESULTS
from benchmarks._timing import load_record
from benchmarks.paper._cnn_figures import CNN_FIGURES
from benchmarks.paper._cnn_tables import CNN_TABLES
from benchmarks.paper._figures import FIGURES
from benchmarks.paper._tables import TABLES

NOT_RUN = "*Not run yet.*"


def are_run(records: Iterable[str]) -> bool:
    """Tell whether all records are there and whole."""
    paths = [RESULTS / "paper" / f"{name}.json" for name in records]
    return all(load_record(path).get("is_whole") for path in paths)


def parts() -> dict[str, Callable[[], str]]:
    """Return what fills each place of the text."""
    found: dict[str, Callable[[], str]] = {}
    for name, (record, table) in (TABLES | CNN_TABLES).items():
        found[name] = table if are_run([record]) else lambda: NOT_RUN
    for name, (records, _, alt) in (FIGURES | CNN_FIGURES).items():
        picture = f"![{alt}](../results/paper/{name}.png)" if are_run(records) else NOT_RUN
        found[f"figure {name}"] = partial(str, picture)
    return found


def draw() -> None:
    """Draw all figures whose records are there."""
    for records, function, _ in (FIGURES | CNN_FIGURES).values():
        if are_run(records):
            function()
