"""Write all figures, tables and the summary from the records: `python -m benchmarks.report`.

In README.md, in the manual and in the READMEs of the benchmarks, this script owns the text between
`<!-- NAME -->` and `<!-- /NAME -->`.
"""

import json
import math
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import _advice, _correlated, _exchanged, _figures, _front, _priced, _trust
from benchmarks._results import (
    ACCOUNTANTS,
    PEERS,
    RESULTS,
    ROOT,
    geometric_mean,
    load,
    markdown,
    ratios,
    smoothed_vectors,
    times,
)
from benchmarks.paper import _report, _stacked_tables

Tables = dict[str, Callable[[], str]]


def demo() -> str:
    """Return the demo's accuracies."""
    record = load("demo")
    rows = [
        [
            row["problem"],
            row["optimizer"],
            str(row["smoothing"]).removesuffix(".0"),
            f"{row['step_size']:g}",
            f"{row['mean']:.1f} ± {row['deviation']:.1f} %",
        ]
        for row in record["results"]
    ]
    return markdown(["problem", "optimizer", "σ", "step size", "test accuracy"], rows)


def duration(milliseconds: float) -> str:
    """Return a time with three digits."""
    number = f"{milliseconds:.3g}" if milliseconds < 999 else f"{milliseconds:,.0f}"
    return f"{number} ms"


def steps() -> str:
    """Return what smoothing adds to whole training steps."""
    ways = ("SGD", "DP-SGD", "DP-LSSGD")
    rows = []
    for name, row in load("smoothing")["steps"].items():
        times = [row["ways"][way]["milliseconds"] for way in ways]
        rows.append(
            [
                name,
                str(row["batch"]),
                *map(duration, times),
                f"{times[1] / times[0]:.2f}",
                f"{times[2] / times[1]:.2f}",
            ]
        )
    return markdown(["model", "batch", *ways, "DP-SGD / SGD", "DP-LSSGD / DP-SGD"], rows)


def smoothing() -> str:
    """Return what smoothing a vector costs, beside Fourier's transform and noise."""
    every = sorted(smoothed_vectors())
    found = [row for row in every if row.smoothing == 1 and row.size >= 10**4]
    rows = [
        [
            f"{row.size:,}",
            *(duration(row.times[way]) for way in ("auto", "fft", "noise")),
            f"{row.times['fft'] / row.times['auto']:.3g}",
            f"{row.times['auto'] / row.times['noise']:.2f}",
            f"{row.copies['auto']:.2f}",
        ]
        for row in found
    ]
    best = max(row.times["auto"] / min(row.smoothers.values()) for row in every)
    fourier = max(row.times["auto"] / row.times["fft"] for row in every if row.size >= 10**4)
    noise = max(
        row.times["auto"] / row.times["noise"]
        for row in every
        if row.size >= 10**5 and row.smoothing <= 10
    )
    head = ["entries", "smoothing", "fft", "noise", "times faster than fft", "share of noise"]
    leaves = load("smoothing")["trees"]["1000000"]
    where = load("smoothing")["circumstances"]
    return (
        f"{markdown([*head, 'memory'], rows)}\n\nσ = 1, on {where['device']}, jax "
        f"{where['versions']['jax']}; what is smoothed is given away, as in a step; memory is "
        "XLA's\ntemporary buffers, in copies of the vector. "
        f"Over all sizes\nand σ from 0.1 to 1,000 `auto` takes at most {best:.2f} times what the "
        f"best method takes, at most {fourier:.2f} of `fft`\nfrom 10⁴ entries on, and at most "
        f"{noise:.2f} of the noise from 10⁵ on with σ ≤ 10. `privatize` over 10⁶ entries\nin 10 "
        f"leaves takes {leaves['10']['milliseconds'] / leaves['1']['milliseconds']:.2f} times what "
        f"it takes in one, in 100 leaves "
        f"{leaves['100']['milliseconds'] / leaves['1']['milliseconds']:.2f} times."
    )


def noises() -> str:
    """Return what it takes to draw normal numbers, by every way and generator."""
    record = load("smoothing")["noises"]["10000000"]
    names = list(dict.fromkeys(name.rpartition(", ")[0] for name in record))
    impls = ("threefry2x32", "rbg")
    rows = [
        [name, *(f"{record[f'{name}, {impl}']['milliseconds']:.0f} ms" for impl in impls)]
        for name in names
    ]
    return markdown(["10⁷ normal numbers", *impls], rows)


def accounting() -> str:
    """Return ε by several accountants, and what they take."""
    record = load("accounting")
    rows = []
    for name, row in record["rows"].items():
        low, high = row["bounds"]
        answers = [row["epsilon"][way] for way in ACCOUNTANTS]
        shown = [f"{answer['value']:.5g}" for answer in answers]
        low_by = [f"{answer['value']:.5g}" for answer in answers if answer["value"] < low]
        rows.append(
            [
                name,
                f"{low:.5g} to {high:.5g}",
                *(f"**{text}**" if text in low_by else text for text in shown),
                *(f"{answers[i]['milliseconds']:.0f} ms" for i in (0, 1)),
            ]
        )
    head = ["setting", "certified", *ACCOUNTANTS, "time", "time, PLD 1e-4"]
    cold, faster = record["cold_start_seconds"], record["times_faster"]
    return (
        f"{markdown(head, rows)}\n\nBold is too low: less than the certified lower bound. Over the "
        f"first eight settings ε takes 1/{faster['epsilon']:.0f} of the time\nof dp-accounting's "
        f"PLD, calibration 1/{faster['calibration']:.0f} (geometric means, one interleaved run), "
        f"and a new process answers its\nfirst question after {cold['optax_lsdp']:.2f} s, against "
        f"{cold['dp-accounting']:.2f} s."
    )


def clipping() -> str:
    """Return what clipping costs on the zoo, by every engine and library."""
    record = load("clipping")
    time, memory = times("bookkeeping"), ratios("bookkeeping", "temp_megabytes")
    build = ratios("bookkeeping", "compile_seconds", "vmap")
    peers = [times(peer) for peer in PEERS]
    rows = []
    for name, row in record["models"].items():
        rows.append(
            [
                name,
                str(row["batch"]),
                f"{row['ways']['non-private']['milliseconds']:.3g} ms",
                f"**{time[name]:.2f}**",
                *(f"{found[name]:.3g}" if name in found else "fails" for found in peers),
                f"{memory[name]:.2f}",
                f"{build[name]:.2f}",
            ]
        )
    head = ["model", "batch", "non-private", "bookkeeping", *PEERS, "memory", "compile / vmap"]
    where = record["circumstances"]
    return (
        f"{markdown(head, rows)}\n\nTimes as multiples of the non-private gradient's, medians of "
        f"interleaved rounds on {where['device']},\njax {where['versions']['jax']}; JAX Privacy in "
        "the better of two settings; a peer that takes over two\nseconds a call is timed by its "
        "first. Memory is XLA's temporary buffers, as a multiple too.\n"
        f"Bookkeeping: geometric mean **{geometric_mean(time.values()):.2f}**, worst "
        f"{max(time.values()):.2f}."
    )


def large() -> str:
    """Return what clipping costs on large models, in time if it was measured, and in memory."""
    rows = []
    for name, row in load("clipping")["large"].items():
        base, ours = (row["ways"][way] for way in ("non-private", "bookkeeping"))
        pair = [x["milliseconds"] for x in (base, ours) if "milliseconds" in x]
        shown = [duration(pair[0]), f"{pair[1] / pair[0]:.2f}"] if pair else ["not timed"] * 2
        memory = base["temp_megabytes"], ours["temp_megabytes"]
        shown += [f"{memory[0]:,.0f} MB", f"{memory[1] / memory[0]:.2f}"]
        rows.append([name, f"{row['batch']:,}", *shown])
    head = ["large model", "batch", "non-private", "bookkeeping", "memory", "memory, bookkeeping"]
    return markdown(head, rows)


def whole_steps() -> str:
    """Return the time of whole steps, beside PyTorch and Opacus."""
    steps = load("clipping")["steps"]
    ways = ["JAX", "optax_lsdp", "PyTorch", "Opacus", "Opacus, ghost"]
    rows = [[name, *(f"{row[way]:,.0f} ms" for way in ways)] for name, row in steps.items()]
    head = ["whole step", "JAX, not private", "optax_lsdp", "PyTorch, not private", *ways[3:]]
    return markdown(head, rows)


def microbatches() -> str:
    """Return time and memory by microbatches."""
    record = load("clipping")["microbatches"]
    base = record["ways"]["non-private"]
    rows = [
        [
            way,
            f"{row['milliseconds'] / base['milliseconds']:.2f}",
            f"{row['temp_megabytes'] / base['temp_megabytes']:.2f}",
        ]
        for way, row in record["ways"].items()
    ]
    return markdown([f"{record['model']}, batch of 32", "time", "memory"], rows)


def scaling() -> str:
    """Return how a step of the MNIST CNN grows with its batch, and what `fit` adds to it."""
    record = load("scaling")
    rows = [
        [f"{int(size):,}", duration(row["milliseconds"]), f"{row['peak_bytes'] / 1e6:,.0f} MB"]
        for size, row in record["batches"].items()
    ]
    cost = record["overhead"]["MNIST CNN"]
    chosen = [row["milliseconds"] for row in record["datasets"].values()]
    return (
        f"{markdown(['logical batch', 'a step', 'memory at most'], rows)}\n\n"
        f"The paper's CNN on {record['circumstances']['device']}, 256 examples at a time; what the "
        "process takes beyond\nthe dataset, compiled programs included. `fit` "
        f"takes {cost['fit'] / cost['bare']:.2f} times\nwhat its compiled steps take alone. "
        f"Choosing 256 examples takes {min(chosen):.2f} to {max(chosen):.2f} ms, of 10⁴ as of 10⁸."
    )


def users() -> str:
    """Return the accuracies of user level and of group privacy, and what users cost."""
    record = load("users")
    parts = {name: part for name, part in record.items() if "ε = " in name}

    def best(row: dict[str, Any]) -> list[float]:
        return max(row["accuracies"].values(), key=statistics.fmean)

    def show(row: dict[str, Any]) -> str:
        return f"{statistics.fmean(best(row)):.1f} ± {statistics.stdev(best(row)):.1f}"

    means = {
        name: {m: statistics.fmean(best(row)) for m, row in part.items()}
        for name, part in parts.items()
    }
    users, groups = (
        {name.removesuffix(level): found for name, found in means.items() if name.endswith(level)}
        for level in (", user level", ", group privacy")
    )
    gains = [
        f"{max(users[name].values()) - max(groups[name].values()):.1f} points ({name})"
        for name in users
    ]
    missed = max(max(found.values()) - found["16"] for found in users.values())
    rows = [[name, *map(show, part.values())] for name, part in parts.items()]
    head = ["percent right", *(f"m = {m}" for m in next(iter(parts.values())))]
    flops = {name: row["users"] / row["examples"] for name, row in record["operations"].items()}
    text = (
        f"{markdown(head, rows)}\n\nTest accuracy of softmax regression with full batches and "
        "δ = 1e-5: mean and standard deviation of five seeds, with\nthe best of six step sizes. "
        "Nothing accounts for the choice of the step size.\n\n"
        f"With the best m for each, user level is ahead by {', '.join(gains)}.\nUser level "
        f"with m = 16 is at most {math.ceil(10 * missed) / 10:.1f} points below its best m.\n\n"
        f"With m = 16, a clipped gradient takes {min(flops.values()):.2f} to "
        f"{max(flops.values()):.2f} times the floating-point operations of the same number of\n"
        f"examples without users, as XLA counts them for {len(flops)} models."
    )
    if "milliseconds" in record:
        ratios = [row["users"] / row["examples"] for row in record["milliseconds"].values()]
        text += f" It takes {min(ratios):.2f} to {max(ratios):.2f} times as long."
    return text


MEASURED: Tables = {
    "demo": demo,
    "smoothing": smoothing,
    "noises": noises,
    "steps": steps,
    **_correlated.TABLES,
    "accounting": accounting,
    "clipping": clipping,
    "large models": large,
    "whole steps": whole_steps,
    "microbatches": microbatches,
    "effective clip norms": _trust.effective_clip_norms,
    "longer texts": _trust.longer_texts,
    "watching": _trust.watching,
    "estimates": _advice.estimates,
    "auto smoothing": _advice.auto_smoothing_costs,
    "scaling": scaling,
    **_stacked_tables.CORRELATED,
    **_priced.TABLES,
    "audits": _trust.audits,
    "fuzz": _trust.fuzz,
    "soak": _trust.soak,
}


def texts() -> dict[Path, Tables]:
    """Return which text holds which tables."""
    return {
        ROOT / "README.md": _front.README,
        ROOT / "docs" / "choosing.md": _advice.TABLES,
        ROOT / "docs" / "devices.md": {"chips": _exchanged.in_short},
        ROOT / "docs" / "smoothing.md": {
            "paper": _front.paper,
            "tpu smoothing": _priced.smoothing_in_short,
        },
        ROOT / "docs" / "users.md": {"users": users},
        ROOT / "docs" / "guarantees.md": {
            "effective clip norms": _trust.least_effective_clip_norms,
            "rounding": _trust.rounding,
            "trust": _trust.in_short,
        },
        ROOT / "docs" / "watching.md": {"watched mnist": _trust.watched_mnist},
        ROOT / "benchmarks" / "README.md": MEASURED,
        ROOT / "benchmarks" / "paper" / "README.md": _report.parts(),
    }


def fill(text: str, tables: Tables) -> str:
    """Return the text with every table filled in."""
    for name, table in tables.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        text, count = pattern.subn(lambda match, t=table: f"{match[1]}{t()}\n{match[2]}", text)
        if count != 1:
            raise ValueError(f"A text must hold its table {name!r} once, got {count} times.")
    return text


def main() -> None:
    """Draw all figures, fill in all tables, and write the summary."""
    for draw in (
        *_figures.FIGURES,
        _advice.draw,
        _advice.draw_clip_norms,
        _front.draw,
        _priced.draw,
        _trust.draw_auditing,
        _report.draw,
    ):
        draw()
    for path, tables in texts().items():
        path.write_text(fill(path.read_text(encoding="utf-8"), tables), encoding="utf-8")
    numbers = json.dumps(_report.numbers(), indent=1)
    (RESULTS / "summary.json").write_text(numbers + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
