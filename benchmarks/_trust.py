"""Generate the tables, figure and text on audits, clip norms, fuzzing and the long run."""

import math
from collections.abc import Sequence

from matplotlib.figure import Figure

from benchmarks._results import RESULTS, ROOT, load, markdown
from benchmarks._timing import load_record

NOT_RUN = "*Not run yet.*"
ROUNDED_TO = {"cpu": "float32", "cuda": "TF32", "tpu": "bfloat16"}
FUZZED = ROOT / "tests" / "fuzz" / "last.txt"


def is_run(name: str) -> bool:
    """Return whether a record exists and is complete."""
    return bool(load_record(RESULTS / f"{name}.json").get("is_whole"))


def audits() -> str:
    """Return the verdicts on planted and sound pipelines, and the proved share of ε."""
    if not is_run("auditing"):
        return NOT_RUN
    record = load("auditing")
    rows = []
    for part, verdict in (("planted", "rejected"), ("sound", "passed")):
        for name, row in record[part].items():
            right = row["passed"] if part == "sound" else row["seeds"] - row["passed"]
            rows.append([name, row["by"], f"{verdict} {right} of {row['seeds']} times"])
    count = sum(row["seeds"] for row in record["sound"].values())
    levels = record["levels"].values()
    seen = min(row["gaussian"] / row["claimed"] for row in levels)
    most = max(max(row["gaussian"], row["any_mechanism"]) / row["claimed"] for row in levels)
    return (
        f"{markdown(['what', 'audit', 'verdict'], rows)}\n\nEach audit rejects what is sound with "
        f"a probability of 1e-5 at most, so that all {count} audits of sound pipelines\ntogether "
        f"have had a chance of {count * 1e-5:.2g} to reject one. One step of DP-LSSGD with the "
        f"worst canary, {len(record['levels'])} claims from ε = 0.1 to 10:\nwhat is proved, "
        f"given that noise is Gaussian, is {seen:.2f} to {most:.2f} times the claim."
    )


def in_short() -> str:
    """Return the attempts to break the guarantee, and their results."""
    rows = [["", NOT_RUN]]
    if is_run("auditing"):
        record = load("auditing")
        planted, sound = record["planted"].values(), record["sound"].values()
        caught = sum(row["seeds"] - row["passed"] for row in planted)
        passed = sum(row["passed"] for row in sound)
        levels = record["levels"].values()
        shares = [row["gaussian"] / row["claimed"] for row in levels]
        rows = [
            [
                f"{len(planted)} bugs planted in our own pipeline, 20 seeds each",
                f"{caught} of {sum(row['seeds'] for row in planted)} audits rejected them",
            ],
            [
                f"{len(sound)} sound pipelines, 20 seeds each",
                f"{passed} of {sum(row['seeds'] for row in sound)} audits accepted them",
            ],
            [
                f"attacks on {len(record['levels'])} claims, ε = 0.1 to 10",
                f"lower bounds of {min(shares):.2f} to {max(shares):.2f} times the claimed ε, "
                "assuming Gaussian noise",
            ],
        ]
    fuzzed = FUZZED.read_text(encoding="utf-8").splitlines() if FUZZED.exists() else []
    rows += [[f"{line}: ".split(": ")[0], line.split(": ")[-1]] for line in fuzzed]
    if is_run("soak"):
        killed = load("soak")["killed"]
        kills = len(killed["killed_after_seconds"])
        rows.append(
            [
                f"{load('soak')['steps']:,} steps, killed {kills} times",
                f"the ledger counted {killed['counted_steps']:,} steps",
            ]
        )
    return markdown(["what was tried", "how it ended"], rows)


def rounding() -> str:
    """Return how far the order of summation moved a sum, beside the worst case."""
    n, found = 1024, _fuzzed("and of 1,024 examples")
    worst = 2 * n**2 / 2**24
    return (
        f"For {n:,} examples the worst case is {worst:.3g}·C. The largest effect of the order of "
        f"summation that `make fuzz` found\non {n:,} random examples is {found:.2g}·C, which is "
        f"{100 * found / worst:.1g} % of it."
    )


def effective_clip_norms() -> str:
    """Return the effective clip norms of every model of the zoo, as each platform rounds."""
    return _effective_clip_norms("model", "")


def longer_texts() -> str:
    """Return the effective clip norms of two decoders for texts of several lengths."""
    return _effective_clip_norms("decoder", ", decoders")


def _effective_clip_norms(title: str, part: str) -> str:
    """Return the table of one part of the record, with a pair of columns for each platform."""
    if not is_run("effective_clip_norm"):
        return NOT_RUN
    record, fields = load("effective_clip_norm"), ("smallest", "median")
    head, columns = [title, "examples"], []
    for platform, rounded_to in ROUNDED_TO.items():
        for field in fields:
            head.append(f"{platform}, {rounded_to}: {field}")
            columns.append((f"{platform}{part}", field))
    rows = [
        [name, f"{row['examples']}", *(_share(record[of][name][field]) for of, field in columns)]
        for name, row in record[f"cpu{part}"].items()
    ]
    return markdown(head, rows)


def least_effective_clip_norms() -> str:
    """Return the smallest effective clip norms of the zoo."""
    if not is_run("effective_clip_norm"):
        return NOT_RUN
    record = load("effective_clip_norm")
    every = {platform: record[platform].values() for platform in ROUNDED_TO}
    lines = [
        [
            platform,
            rounded_to,
            f"{_share(min(row['smallest'] for row in every[platform]))}·C",
            f"{_share(min(row['median'] for row in every[platform]))}·C",
        ]
        for platform, rounded_to in ROUNDED_TO.items()
    ]
    count = sum(row["examples"] for row in every["cpu"])
    head = ["platform", "operands", f"smallest of {count:,} examples"]
    table = markdown([*head, f"smallest median of {len(every['cpu'])} models"], lines)
    found = []
    for platform in ROUNDED_TO:
        name, row = min(record[f"{platform}, decoders"].items(), key=lambda x: x[1]["median"])
        found.append(f"{_share(row['median'])}·C on {platform} ({name})")
    return (
        f"{table}\n\nThe more rows a Gram matrix has, the smaller is the effective clip norm. "
        f"The smallest medians of\ntwo transformers, of width 256 and 768 with texts of up to 512 "
        f"tokens, are\n{', '.join(found)}."
    )


def watched_mnist() -> str:
    """Return the true work and the curves of full batches of MNIST, for each ε."""
    if not is_run("watching"):
        return NOT_RUN
    rows = []
    for name, row in load("watching")["full batches of MNIST"].items():
        truths, curves, errors = zip(*row["ends"], strict=True)
        rows.append([name, _numbers(truths), _numbers(curves), f"{errors[0]:.2g}"])
    head = ["", "true change of the clipped loss", "end of the curve", "standard error"]
    return (
        f"{markdown(head, rows)}\n\nSoftmax regression on MNIST, 60 full batches, SGD with step "
        "size 1 and clip norm 1, δ = 1e-5, three seeds."
    )


def watching() -> str:
    """Return how often the true work lies within two standard errors of the curve."""
    if not is_run("watching"):
        return NOT_RUN
    rows = []
    for name, row in load("watching")["coverage"].items():
        ends = list(zip(*row["ends"], strict=True))
        truth, curve, error = (sum(values) / len(values) for values in ends)
        means = (f"{truth:.3f}", f"{curve:.3f}", f"{error:.3f}")
        rows.append([name, f"{row['covered']:.1%}", *(text.replace("-", "−") for text in means)])
    head = ["data, optimizer, batches", "covered", "true change", "curve", "standard error"]
    return markdown(head, rows)


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values).replace("-", "−")


def _share(number: float) -> str:
    """Return a share with four digits, rounded down."""
    return f"{math.floor(1e4 * number) / 1e4:.4f}"


def _fuzzed(name: str) -> float:
    """Return one number of the last long fuzz run."""
    lines = FUZZED.read_text(encoding="utf-8").splitlines()
    return float(next(line.split(": ")[1] for line in lines if line.startswith(f"{name}: ")))


def draw_auditing() -> None:
    """Draw the ε that an attack proves against the claimed ε."""
    if not is_run("auditing"):
        return
    rows = list(load("auditing")["levels"].values())
    claimed = [row["claimed"] for row in rows]
    figure = Figure(figsize=(6, 4.4), layout="constrained")
    axes = figure.subplots()
    axes.plot(claimed, claimed, "k-", lw=0.8, label="claimed")
    axes.plot(claimed, [epsilon / 2 for epsilon in claimed], "k:", lw=0.8, label="half of it")
    looks = {"gaussian": ("o-", "#c1121f", "proved, if the mechanism is Gaussian")}
    looks["any_mechanism"] = ("s-", "#2a6f97", "proved, whatever the mechanism")
    for name, (style, color, label) in looks.items():
        points = [(row["claimed"], row[name]) for row in rows if row[name] > 0]
        axes.loglog(*zip(*points, strict=True), style, color=color, label=label, markersize=4)
    trials = " or ".join(f"{n / 1e6:g}" for n in sorted({row["trials"] for row in rows}))
    axes.set_xlabel(f"ε claimed for one step of DP-LSSGD (δ = 1e-5, {trials} million steps each)")
    axes.set_ylabel("lower bound on ε, confidence 1 − 1e-5")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(RESULTS / "auditing.png", dpi=150)


def fuzz() -> str:
    """Return the results of the last long fuzz run."""
    if not FUZZED.exists():
        return NOT_RUN
    title, *lines = FUZZED.read_text(encoding="utf-8").splitlines()
    rows = [line.rsplit(": ", 1) for line in lines]
    return f"{markdown([title, ''], rows)}"


def soak() -> str:
    """Return the results of the long run."""
    if not is_run("soak"):
        return NOT_RUN
    record = load("soak")
    alone, killed = record["alone"], record["killed"]
    same = killed["parameters"] == alone["parameters"]
    return (
        f"{record['steps']:,} steps of a small model, a checkpoint every {record['steps'] // 100:,}"
        f": throughput of the last tenth {alone['throughput_ratio']:.3f} times that of the second, "
        f"memory {alone['memory_ratio']:.3f} times;\nthe ledger has counted "
        f"{alone['counted_steps']:,} steps. Killed {len(killed['killed_after_seconds'])} times at "
        f"random, the same run counts {killed['counted_steps']:,} and ends with "
        f"{'the same bits' if same else 'OTHER PARAMETERS'}."
    )
