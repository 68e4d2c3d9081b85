"""Tables of what many chips exchange in a step: priced by the compiler, not measured."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks._results import RESULTS, markdown
from benchmarks._timing import load_record
from benchmarks._trust import NOT_RUN

PRIVATE = "bookkeeping"


class Step(NamedTuple):
    """One compiled step, and its row in the record."""

    way: str
    layout: str
    chips: int
    row: dict[str, Any]


def steps() -> Iterator[Step]:
    """Yield every step of the record, by way, layout and number of chips."""
    for way, layouts in load_record(RESULTS / "chips.json").get("steps", {}).items():
        for layout, by_chips in layouts.items():
            for chips, row in sorted(by_chips.items(), key=lambda pair: int(pair[0])):
                yield Step(way, layout, int(chips), row)


def _megabytes(size: float) -> str:
    return f"{size / 1e6:,.1f} MB"


def chips() -> str:
    """Return what a step communicates, by layout and number of chips."""
    record = load_record(RESULTS / "chips.json")
    if not record:
        return NOT_RUN
    rows = []
    for step in steps():
        case = [step.way, step.layout, str(step.chips)]
        if "error" in step.row:
            rows.append([*case, "does not fit", *["–"] * 4])
            continue
        kinds = [
            f"{kind} {_megabytes(part['bytes'])} ({part['count']})"
            for kind, part in step.row["collectives"].items()
        ]
        sizes = [step.row[f"{kind}_bytes"] for kind in ("largest", "temp", "argument")]
        cycles = f"{step.row['cycles']:,}" if "cycles" in step.row else "–"
        rows.append([*case, ", ".join(kinds) or "none", *map(_megabytes, sizes), cycles])
    head = ["gradient", "layout", "chips", "collectives: bytes (how many)", "largest"]
    head += ["temporary memory of a chip", "arguments of a chip", "cycles of a chip"]
    parameters = _parameter_bytes()
    is_old = any("cycles" not in step.row for step in steps() if "error" not in step.row)
    old = " Rows without cycles are of a step that does not return the loss." if is_old else ""
    return (
        f"{markdown(head, rows)}\n\n"
        f"One step of {record['model']} on TPU v5e, {record['examples']} examples over all chips: "
        f"priced by the compiler, not measured.\nThe parameters take {_megabytes(parameters)}, and "
        f"{record['examples']} gradients would take "
        f"{_megabytes(record['examples'] * parameters)}.{old}"
    )


def _parameter_bytes() -> int:
    return next(step.row["parameter_bytes"] for step in steps() if "error" not in step.row)


def in_short() -> str:
    """Return what the private step exchanges, for the manual."""
    record = load_record(RESULTS / "chips.json")
    found = {step[:3]: step.row for step in steps() if "error" not in step.row}
    rows = []
    for (way, layout, chips), row in found.items():
        if way != PRIVATE:
            continue
        other = found.get(("non-private", layout, chips), {})
        ordinary = other.get("temp_bytes") if "cycles" in other else None  # the same step
        total = sum(part["bytes"] for part in row["collectives"].values())
        memory = [ordinary, row["temp_bytes"]]
        rows.append(
            [
                layout,
                str(chips),
                _megabytes(total),
                _megabytes(row["largest_bytes"]),
                " / ".join("–" if size is None else _megabytes(size) for size in memory),
            ]
        )
    head = ["parameters", "chips", "exchanged", "largest array", "temporary memory of a chip"]
    parameters = _parameter_bytes()
    return (
        f"{markdown(head, rows)}\n\n{record['model']}, {record['examples']} examples over all "
        "chips of TPU v5e: priced by the compiler, not measured. The parameters take\n"
        f"{_megabytes(parameters)}, and {record['examples']} gradients would take "
        f"{_megabytes(record['examples'] * parameters)}. Memory is that of ordinary training / of "
        "the private step."
    )
