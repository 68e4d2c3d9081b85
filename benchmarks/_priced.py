"""Tables and a figure of what compilers for accelerators say: priced by them, not measured."""

import math
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from benchmarks import _exchanged
from benchmarks._batches import is_found
from benchmarks._results import PEERS, RESULTS, geometric_mean, markdown
from benchmarks._timing import load_record
from benchmarks._trust import NOT_RUN

OURS, ORDINARY = "bookkeeping", "non-private"
TIMES = ("milliseconds", "cycles", "bytes_moved")  # a measurement comes before a price
Rows = dict[str, dict[str, Any]]


def _models(target: str) -> Rows:
    """Return the rows of each model, by way; a model without an ordinary gradient is left out."""
    models = _record(target).get("models", {})
    return {name: ways for name, ways in models.items() if _time(ways.get(ORDINARY, {}))}


def _record(target: str) -> dict[str, Any]:
    """Return what is known of a target."""
    return load_record(RESULTS / "accelerators.json").get(target, {})


def _time(row: dict[str, Any]) -> float | None:
    """Return milliseconds, cycles or bytes, or None if there are none."""
    return next((row[field] for field in TIMES if field in row), None)


def _best(ways: dict[str, Any], way: str) -> dict[str, Any]:
    """Return the row of a way in the better of its settings; an empty row is not priced yet."""
    rows = [ways[name] for name in PEERS.get(way, (way,)) if name in ways]
    return min(rows, key=lambda row: _time(row) or math.inf, default={})


def cost(ways: dict[str, Any], way: str) -> float | None:
    """Return the time of a way as a multiple of the ordinary gradient's.

    A program with a loop of unknown length has no known price, so it has no multiple either.
    """
    row, base = _best(ways, way), ways[ORDINARY]
    if row.get("unknown_loops") or base.get("unknown_loops"):
        return None
    field = next((field for field in TIMES if field in row and base.get(field)), None)
    return row[field] / base[field] if field else None


def _cell(ways: dict[str, Any], way: str) -> str:
    """Return a ratio, or why there is none."""
    ratio, row = cost(ways, way), _best(ways, way)
    if ratio is not None:
        return f"**{ratio:.2f}**" if way == OURS else f"{ratio:.3g}"
    if "error" not in row and row.get("unknown_loops"):
        return "unknown"
    error = row.get("error", "")
    if "RESOURCE_EXHAUSTED" in error or "memory" in error:
        return "too large"
    return ("too slow" if "did not compile" in error else "fails") if error else "–"


def _ratio(ways: dict[str, Any], field: str, way: str = OURS, base: str = ORDINARY) -> float | None:
    """Return the ratio of two ways in one field, or None if it is not known."""
    one, other = (_best(ways, name).get(field) for name in (way, base))
    return one / other if one is not None and other else None


def _shown(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}"


def _compile_ratio(ways: dict[str, Any]) -> float | None:
    """Return what it takes to compile ours, as a multiple of what it takes to compile vmap."""
    return _ratio(ways, "processor_seconds", OURS, "vmap")


def _pair(ways: dict[str, Any], field: str) -> str:
    """Return bytes of the ordinary gradient and of ours, in megabytes."""
    sizes = [_best(ways, way).get(field) for way in (ORDINARY, OURS)]
    return " / ".join("–" if size is None else f"{size / 1e6:,.0f} MB" for size in sizes)


def _how(models: Rows) -> str:
    """Return how the numbers came about, in the words of the record."""
    every = (row for ways in models.values() for row in ways.values())
    return " or ".join(sorted({row["how"] for row in every if "how" in row}))


def _in_all(models: Rows) -> str:
    """Return the geometric mean and the worst ratio of each way, over the models that it has."""
    texts = []
    for way in (OURS, *PEERS):
        found = [ratio for ways in models.values() if (ratio := cost(ways, way)) is not None]
        if found:
            mean, worst = geometric_mean(found), max(found)
            texts.append(f"{way} {mean:.2f} ({len(found)} models, worst {worst:.3g})")
    return "; ".join(texts) or "none yet"


def claim() -> str:
    """Return the headline of the TPU: ours, and JAX Privacy on the models that both have."""
    models = _models("tpu")
    ours = {name: ratio for name, ways in models.items() if (ratio := cost(ways, OURS))}
    theirs = {name: ratio for name in ours if (ratio := cost(models[name], "JAX Privacy"))}
    both = geometric_mean([ours[name] for name in theirs])
    wide = [name for name in ("BERT", "ViT", "GPT-2") if f"{name}, bfloat16" in ours]
    listed = ", ".join(f"{name} {ours[f'{name}, bfloat16']:.2f}" for name in wide)
    return (
        f"On one {_record('tpu')['device']} chip it takes **{geometric_mean(ours.values()):.2f} "
        f"times** the cycles, {_how(models)} (geometric mean of {len(ours)} models, from "
        f"{min(ours.values()):.2f} to {max(ours.values()):.2f}; transformers of width 768: "
        f"{listed}); on the {len(theirs)} models that are priced for both, JAX Privacy takes "
        f"{geometric_mean(theirs.values()):.1f} times and optax_lsdp {both:.2f} times."
    )


def tpu() -> str:
    """Return what a gradient costs on a TPU, by every engine and library."""
    models = _models("tpu")
    if not models:
        return NOT_RUN
    rows = []
    for name, ways in models.items():
        ordinary = ways[ORDINARY]
        rows.append(
            [
                name,
                f"{_time(ordinary):,.0f}",
                _cell(ways, OURS),
                *(_cell(ways, peer) for peer in PEERS),
                _pair(ways, "temp_bytes"),
                _pair(ways, "unpriced_bytes"),
                _shown(_compile_ratio(ways)),
            ]
        )
    built = {n: r for n, ways in models.items() if (r := _compile_ratio(ways)) is not None}
    worst, above = max(built, key=built.__getitem__), sum(r > 2 for r in built.values())
    head = ["model", "cycles, non-private", OURS, *PEERS, "memory", "not priced"]
    record = _record("tpu")
    return (
        f"{markdown([*head, 'compile / vmap'], rows)}\n\n{record['device']}, one chip, libtpu "
        f"{record['versions']['libtpu']}: {_how(models)}. Cycles as multiples of the non-private "
        "gradient's.\nMemory is temporary HBM. The compiler has no cycles for gathers, scatters "
        "and Cholesky factors:\n`not priced` are the bytes that they move. Both columns are "
        "non-private / bookkeeping.\nThe last column compares the processor's seconds of "
        "tracing and compiling, over all threads, because other\nwork on the machine changed the "
        f"time on the clock: geometric mean {geometric_mean(built.values()):.2f}, worst "
        f"{built[worst]:.2f} ({worst}), {above} of {len(built)} models above 2.\n"
        f"Geometric means of cycles: {_in_all(models)}."
    )


def gpu() -> str:
    """Return what a gradient moves on a GPU, by every engine and library."""
    models = _models("gpu")
    if not models:
        return NOT_RUN
    rows = [
        [
            name,
            f"{_time(ways[ORDINARY]) / 1e6:,.0f} MB",
            _cell(ways, OURS),
            *(_cell(ways, peer) for peer in PEERS),
            f"{ways[ORDINARY].get('kernels', 0):,}",
            _shown(_ratio(ways, "kernels")),
            _shown(_ratio(ways, "temp_bytes")),
        ]
        for name, ways in models.items()
    ]
    head = ["model", "bytes moved, non-private", OURS, *PEERS]
    record = _record("gpu")
    return (
        f"{markdown([*head, 'kernels, non-private', 'kernels', 'memory'], rows)}\n\n"
        f"{record['device']}, jax {record['versions']['jax']}: {_how(models)}. Bytes that kernels "
        "read and write, as multiples\nof the non-private gradient's. The last two columns are "
        f"bookkeeping's, as multiples too.\nGeometric means: {_in_all(models)}."
    )


def batches() -> str:
    """Return the largest batch that one chip accepts."""
    rows = []
    for name, ways in _record("tpu").get("largest_batch", {}).items():
        share = _share(*(ways.get(way, {}) for way in (ORDINARY, OURS)))
        rows.append([name, *(_batch(ways.get(way, {})) for way in _SEARCHED), share])
    head = ["largest batch on one v5e chip", *_SEARCHED, "bookkeeping / non-private"]
    return f"{markdown(head, rows)}\n\nWithout microbatches: priced by the compiler, not measured."


_SEARCHED = (ORDINARY, OURS, "vmap", "JAX Privacy")


def _batch(row: dict[str, Any]) -> str:
    """Return a batch size, or the bounds of a search that is not over."""
    low, high = row.get("largest"), row.get("refused")
    if low is None:
        return "–"
    if is_found(low, high):
        return f"{low:,}"
    return f"at least {low:,}" if high is None else f"{low:,} to {high - 1:,}"


def _share(ordinary: dict[str, Any], ours: dict[str, Any]) -> str:
    """Return the ratio of two largest batches, or its bounds while a search is not over."""
    limits = [(row.get("largest"), row.get("refused")) for row in (ordinary, ours)]
    if not all(low and high for low, high in limits):
        return "–"
    (low, high), (our_low, our_high) = limits
    if is_found(low, high) and is_found(our_low, our_high):
        return f"{our_low / low:.2f}"
    return f"{our_low / (high - 1):.2f} to {(our_high - 1) / low:.2f}"


def tpu_smoothing() -> str:
    """Return what smoothing costs on a TPU, as a multiple of what the noise costs."""
    record = load_record(RESULTS / "tpu_smoothing.json")
    if not record:
        return NOT_RUN
    leaves = record["leaves"]
    rows = []
    for leaf, ways in leaves.items():
        noise, copy = ways["noise"]["cycles"], ways["copy"]
        cells = [leaf, *(f"{ways[w]['cycles'] / 1e3:,.0f}" for w in ("copy", "noise", "auto"))]
        for way in ("auto", "recursive"):
            moves = ways[way]["unpriced_move_bytes"] * copy["cycles"] / (8 * copy["entries"])
            cells += [f"{ways[way]['cycles'] / noise:.2f}", f"{moves / noise:.2f}"]
        fft = ways.get("fft", {})
        is_large = "RESOURCE_EXHAUSTED" in fft.get("error", "")
        ratio = f"{fft['cycles'] / noise:,.0f}" if "cycles" in fft else "–"
        rows.append([*cells, "too large" if is_large else ratio])
    head = ["leaf", "copy", "noise", "smoothing", "smoothing / noise", "unpriced, at most"]
    head += ["`recursive` / noise", "unpriced, at most", "`fft` / noise"]
    where, version = record["priced_for"], record["circumstances"]["versions"]["jax"]
    return (
        f"{markdown(head, rows)}\n\nThousands of cycles on one {where} chip, σ = 1, jax {version}: "
        f"{_how(leaves)}.\nThe compiler prices neither changes of shape nor updates in place. The "
        'columns "unpriced" charge what these\nread and write like a copy, and come on top.'
    )


def smoothing_in_short() -> str:
    """Return in a sentence what smoothing costs on a TPU."""
    record = load_record(RESULTS / "tpu_smoothing.json")
    if not record:
        return NOT_RUN
    ratios: dict[str, list[float]] = {}
    for leaf, ways in record["leaves"].items():
        kind = {0: "vectors", 1: "matrices"}.get(leaf.count("×"), "convolution kernels")
        ratio = ways["auto"]["cycles"] / ways["noise"]["cycles"]
        ratios.setdefault(kind, []).append(ratio)
    listed = ", ".join(
        f"{min(found):.1f} to {max(found):.1f} for {kind}" for kind, found in ratios.items()
    )
    return (
        f"On one {record['priced_for']} chip, smoothing large leaves with σ = 1 takes these "
        f"multiples of the noise's cycles, {_how(record['leaves'])}:\n{listed}."
    )


def draw() -> None:
    """Draw the cost of clipping on a TPU and on a GPU, as their compilers see it."""
    figure = Figure(figsize=(12, 8.5), layout="constrained")
    looks = {OURS: ("o", "#c1121f"), "vmap": ("s", "#2a6f97")}
    looks |= {"JAX Privacy": ("D", "#8ecae6"), "Optax": ("^", "#9a8c98")}
    labels = {"tpu": "cycles on TPU v5e", "gpu": "bytes moved on an A100"}
    panels = figure.subplots(1, 2, sharey=True)
    names = list(dict.fromkeys(name for target in labels for name in _models(target)))
    for axes, (target, label) in zip(panels, labels.items(), strict=True):
        models = _models(target)
        for way, (marker, color) in looks.items():
            found = {name: cost(ways, way) for name, ways in models.items()}
            places = {names.index(name): ratio for name, ratio in found.items() if ratio}
            style = {"color": color, "label": way, "markersize": 6}
            axes.plot(list(places.values()), list(places), marker, **style)
        axes.axvline(1, color="black", lw=0.8)
        axes.set_xscale("log")
        axes.set_xticks([1, 2, 5, 10, 20, 50, 100, 200])
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(f"{label} / of the non-private gradient\n{_how(models)}")
        axes.grid(axis="x", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].set_ylim(len(names) - 0.5, -0.5)
    handles, legend = panels[0].get_legend_handles_labels()
    figure.legend(handles, legend, frameon=False, loc="outside lower center", ncols=len(looks))
    figure.savefig(RESULTS / "accelerators.png", dpi=150)


TABLES = {"tpu": tpu, "gpu": gpu, "largest batch": batches, "chips": _exchanged.chips}
TABLES["tpu smoothing"] = tpu_smoothing
