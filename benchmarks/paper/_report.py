"""Generate the tables and figures of this folder's README from the records."""

from collections.abc import Callable, Iterable
from functools import partial

from benchmarks._results import RESULTS, markdown
from benchmarks._timing import load_record
from benchmarks.paper._cnn_figures import CNN_FIGURES
from benchmarks.paper._cnn_tables import CNN_TABLES
from benchmarks.paper._figures import FIGURES
from benchmarks.paper._stacked_tables import STACKED_TABLES, draw_tournament, exists
from benchmarks.paper._summary import summary
from benchmarks.paper._tables import TABLES

NOT_RUN = "*Not run yet.*"
TOURNAMENT = "What each denoiser gains over none, by problem and ε"


def are_run(records: Iterable[str]) -> bool:
    """Return whether all records exist and are complete."""
    paths = [RESULTS / "paper" / f"{name}.json" for name in records]
    return all(load_record(path).get("is_whole") for path in paths)


def numbers() -> dict[str, float]:
    """Return the headline numbers of all complete records."""
    return summary(lambda name: are_run([name]))


def times() -> str:
    """Return how long each script took, and on which device."""
    rows = []
    for path in sorted((RESULTS / "paper").glob("*.json")):
        record = load_record(path)
        where = record["circumstances"]
        seconds = sum(
            row["seconds"]
            for part in record.values()
            if isinstance(part, dict)
            for row in part.values()
            if isinstance(row, dict) and "seconds" in row
        )
        device = f"{where['device']} {where['machine']}, cores: {where['cores']}"
        state = "" if record["is_whole"] else "not finished"
        command = f"`{where['command']}`"
        rows.append([command, device, f"{seconds / 60:.1f}", where["date"], state])
    return markdown(["command", "device", "minutes", "date", ""], rows)


def parts() -> dict[str, Callable[[], str]]:
    """Return the content of each generated block."""
    found: dict[str, Callable[[], str]] = {"times": times}
    for name, (record, table) in (TABLES | CNN_TABLES).items():
        found[name] = table if are_run([record]) else lambda: NOT_RUN
    for name, (record, table) in STACKED_TABLES.items():  # these show the problems that are done
        found[name] = table if exists(record) else lambda: NOT_RUN
    found["figure tournament"] = lambda: f"![{TOURNAMENT}](../results/paper/tournament.png)"
    for name, (records, _, alt) in (FIGURES | CNN_FIGURES).items():
        picture = f"![{alt}](../results/paper/{name}.png)" if are_run(records) else NOT_RUN
        found[f"figure {name}"] = partial(str, picture)
    return found


def draw() -> None:
    """Draw all figures whose records exist."""
    for records, function, _ in (FIGURES | CNN_FIGURES).values():
        if are_run(records):
            function()
    draw_tournament()
