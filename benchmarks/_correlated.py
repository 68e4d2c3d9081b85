"""Generate the tables on what correlated noise costs and on the errors of its strategies."""

from benchmarks._results import load, markdown
from benchmarks._trust import NOT_RUN, is_run


def costs() -> str:
    """Return time and memory of one step of correlated noise, beside independent noise."""
    if not is_run("correlated_noise"):
        return NOT_RUN
    record = load("correlated_noise")
    ((size, ways),) = record["steps"].items()
    copy = 4 * int(size)  # bytes of the vector in float32
    base = ways["independent"]["milliseconds"]
    rows = [
        [
            name,
            f"{row['milliseconds']:.0f} ms",
            f"{row['milliseconds'] / base:.2f}",
            f"{row['past_bytes'] / copy:.0f}",
            f"{row['temp_bytes'] / copy:.2f}",
        ]
        for name, row in ways.items()
    ]
    where = record["circumstances"]
    return (
        f"{markdown(['noise', 'a step', 'against independent', 'past noises', 'temporary'], rows)}"
        f"\n\nA vector of {int(size):,} entries on {where['device']}, jax "
        f"{where['versions']['jax']}, medians of interleaved rounds. Memory is in copies of the\n"
        "vector: the past noises in the state, and XLA's temporary buffers."
    )


def errors() -> str:
    """Return the squared errors of strategies beside the bound on the error of any matrix."""
    if not is_run("correlated_noise"):
        return NOT_RUN
    rows = []
    for setting, found in load("correlated_noise")["errors"].items():
        steps, bands = setting.split()
        for name, row in found["ways"].items():
            rows.append(
                [
                    f"{int(steps):,}",
                    bands,
                    name,
                    f"{row['mean']:.5g}",
                    f"{row['mean'] / found['least']:.2f}",
                    f"{row['max']:.5g}",
                ]
            )
    head = ["steps", "bands", "strategy", "mean", "mean / lower bound", "largest"]
    return markdown(head, rows)


TABLES = {"correlated noise": costs, "correlated errors": errors}
