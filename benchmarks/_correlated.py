"""Generate the tables on what correlated noise costs and on the errors of its strategies."""

from typing import Any

from benchmarks._results import RESULTS, load, markdown
from benchmarks._timing import load_record
from benchmarks._trust import NOT_RUN, is_run

BYTES = 4 * 10**7  # of the leaves that are priced, in float32


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


def prices() -> str:
    """Return what the compilers for accelerators say of one step, beside independent noise."""
    record = load_record(RESULTS / "correlated_prices.json")
    if not {"tpu", "gpu"} <= record.keys():
        return NOT_RUN
    tpu, gpu = record["tpu"], record["gpu"]
    rows, how = [], set()
    for leaf, ways in tpu["leaves"].items():
        bases = ways["independent"], gpu["leaves"][leaf]["independent"]
        for name, row in ways.items():
            other = gpu["leaves"][leaf][name]
            how |= {row["how"], other["how"]}
            pairs = ((row, bases[0], "cycles"), (other, bases[1], "bytes_moved"))
            shown = [_against(row, base, field) for row, base, field in pairs]
            copies = [f"{x['temp_bytes'] / BYTES:.2f}" for x in (row, other)]
            rows.append([leaf, name, *shown, f"{row['past_bytes'] / BYTES:.0f}", *copies])
    head = ["leaf", "noise", "cycles on TPU", "bytes on A100", "past noises", "temporary, TPU"]
    version = record["circumstances"]["versions"]["jax"]
    return (
        f"{markdown([*head, 'temporary, A100'], rows)}\n\n{tpu['device']} and {gpu['device']}, "
        f"jax {version}: {' or '.join(sorted(how))}. Cycles and bytes are multiples\nof those of "
        "our independent noise for the same leaf. Memory is in copies of the leaf. Bytes say "
        "nothing of\narithmetic: a banded inverse draws as often as it has bands. The loop of JAX "
        "Privacy's banded inverse has no\nknown length, and so no price."
    )


def _against(row: dict[str, Any], base: dict[str, Any], field: str) -> str:
    """Return a price as a multiple of another, or why there is none."""
    return "unknown" if row["unknown_loops"] else f"{row[field] / base[field]:.2f}"


def best() -> str:
    """Return the error of `optimize_banded` beside that of the best banded matrix."""
    if not (is_run("correlated_noise") and "best" in (record := load("correlated_noise"))):
        return NOT_RUN
    rows = [
        [
            f"{int(steps):,}",
            bands,
            f"{row['optimize_banded']:.5g}",
            f"{row['error']:.5g}",
            f"{row['bound']:.5g}",
            f"{row['optimize_banded'] / row['bound']:.4f}",
            f"{(row['optimize_banded'] / row['bound']) ** 0.5:.4f}",
        ]
        for setting, row in record["best"].items()
        for steps, bands in [setting.split()]
    ]
    head = ["steps", "bands", "optimize_banded", "best banded matrix", "lower bound"]
    return markdown([*head, "squared error / bound", "error / bound"], rows)


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


TABLES = {
    "correlated noise": costs,
    "correlated prices": prices,
    "correlated errors": errors,
    "correlated best": best,
}
