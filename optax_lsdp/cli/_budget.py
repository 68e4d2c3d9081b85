"""The commands `epsilon` and `calibrate`: settings go in, a statement in plain words comes out."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from optax_lsdp._checks import check_delta, check_positive, check_whole
from optax_lsdp.accounting import (
    Ledger,
    SampledGaussian,
    calibrate_noise_multiplier,
    statement,
    steps_of_epochs,
)
from optax_lsdp.accounting import show_epsilon as show
from optax_lsdp.cli._parser import in_options, number, picture

_KINDS: tuple[tuple[str, Any, Any], ...] = (
    ("Poisson, one example added or removed", "poisson", "add_remove"),
    ("Poisson, one example replaced", "poisson", "replace_one"),
    ("fixed size without replacement, one example replaced", "without_replacement", "replace_one"),
    ("shuffled, one example blanked out", "shuffled", "zero_out"),
    ("shuffled, one example replaced", "shuffled", "replace_one"),
)
_EPILOG = """\
How to read it. A training run is (ε, δ)-differentially private if nothing that its output could
tell becomes more than e^ε times as probable through one example, but for a probability of δ. The
noise multiplier z is the standard deviation of the noise that is added to the *sum* of clipped
gradients, divided by the clip norm. δ should be well below one over the number of examples.

How batches are drawn matters as much as the noise. Poisson sampling puts every example into every
batch by its own coin; "without_replacement" draws a fresh subset of fixed size; a shuffled data
loader does neither, and no tight analysis of it is known: the ε shown for it holds for any order.

Examples:
  optax-lsdp epsilon --dataset-size 60000 --batch-size 256 --epochs 60 --noise-multiplier 1.1
  optax-lsdp calibrate --dataset-size 60000 --batch-size 256 --steps 14100 --epsilon 2 --plot e.png
"""


def add_commands(commands: Any) -> None:
    """Add both commands to a parser's."""
    for name, text, target in (
        ("epsilon", "tell what a training run guarantees", "noise_multiplier"),
        ("calibrate", "tell how much noise a privacy budget takes", "epsilon"),
    ):
        command = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ", in plain words, with every assumption.",
            epilog=_EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for option, meaning in (
            ("dataset_size", "how many examples there are"),
            ("batch_size", "how many of them a batch has, or is expected to have"),
        ):
            command.add_argument(
                f"--{option.replace('_', '-')}",
                type=number(option, check_whole, int),
                metavar="N",
                required=True,
                help=meaning,
            )
        length = command.add_mutually_exclusive_group(required=True)
        length.add_argument(
            "--steps", type=number("steps", check_whole, int), metavar="N", help="steps in all"
        )
        length.add_argument(
            "--epochs",
            type=number("epochs", check_positive),
            metavar="X",
            help="passes over the data, of dataset size/batch size steps each (shuffled: "
            "rounded down)",
        )
        meanings = {
            "noise_multiplier": "z: the noise's standard deviation on the clipped sum, over C",
            "epsilon": "the budget: the ε that may be spent",
        }
        command.add_argument(
            f"--{target.replace('_', '-')}",
            type=number(target, check_positive),
            metavar="X",
            required=True,
            help=meanings[target],
        )
        command.add_argument(
            "--delta",
            type=number("delta", check_delta),
            metavar="X",
            help="probability with which ε may fail (default: a power of ten, 1e-5 or "
            "less, and at most a tenth of 1/dataset size)",
        )
        command.add_argument(
            "--sampling",
            choices=("poisson", "without_replacement", "full", "shuffled"),
            default="poisson",
            help="how batches are drawn (default: poisson)",
        )
        command.add_argument(
            "--neighbouring",
            choices=("add_remove", "replace_one", "zero_out"),
            help="what may differ: one example added or removed, replaced, or blanked out "
            "(default: add_remove; without_replacement and shuffled need another)",
        )
        command.add_argument(
            "--max-batch-size",
            type=number("max_batch_size", check_whole, int),
            metavar="N",
            help="Poisson batches are cut to N examples at random",
        )
        command.add_argument("--json", action="store_true", help="print JSON instead of words")
        command.add_argument(
            "--plot", type=picture, metavar="PNG", help="draw ε against the number of steps"
        )
        command.set_defaults(run=_answer, command=command)


def _answer(args: argparse.Namespace) -> None:
    """Answer either command."""
    size, batch = args.dataset_size, args.batch_size
    if batch > size:
        args.command.error(f"--batch-size {batch} must be at most --dataset-size {size}")
    delta = args.delta if args.delta is not None else 10.0 ** -max(5, len(str(10 * size - 1)))
    steps = args.steps or steps_of_epochs(
        args.epochs, dataset_size=size, batch_size=batch, sampling=args.sampling
    )
    if delta * size >= 1:
        print(
            f"--delta should be far below 1/n = {1 / size:.2g}: {delta:g} is not", file=sys.stderr
        )
    settings = {
        "sampling_rate": batch / size,
        "steps": steps,
        "sampling": args.sampling,
        "neighbouring": args.neighbouring,
        "max_batch_size": args.max_batch_size,
        "dataset_size": size,
    }
    if args.sampling == "full" and batch != size:
        args.command.error(f"--batch-size must be {size}, the whole dataset, with --sampling full")
    try:
        if hasattr(args, "epsilon"):
            noise = calibrate_noise_multiplier(epsilon=args.epsilon, delta=delta, **settings)
        else:
            noise = args.noise_multiplier
        run = SampledGaussian(noise, **settings)
    except ValueError as error:
        args.command.error(in_options(str(error)))
    if args.plot:
        _plot(run, delta, args.plot)
    others = _others(run, batch, size, delta)
    if args.json:
        print(json.dumps(_record(run, batch, delta, others), indent=1))
    else:
        print(_words(run, delta, others, calibrated=hasattr(args, "epsilon")))


def _others(
    run: SampledGaussian, batch: int, size: int, delta: float
) -> list[tuple[str, str, str, float]]:
    """Return ε at the same noise for every way to draw batches of this size."""
    kinds = _KINDS if run.sampling != "full" and batch < size else ()
    return [
        (
            words,
            sampling,
            relation,
            SampledGaussian(
                run.noise_multiplier,
                batch / size,
                run.steps,
                sampling=sampling,
                neighbouring=relation,
            ).epsilon(delta),
        )
        for words, sampling, relation in kinds
    ]


def _words(
    run: SampledGaussian, delta: float, others: list[tuple[str, str, str, float]], calibrated: bool
) -> str:
    noise = show(run.noise_multiplier, 6)  # rounded up, as less would not do
    lines = [f"Noise multiplier z = {noise}.", ""] if calibrated else []
    lines.append(statement(run, delta))
    if others:
        lines += ["", "The same noise and batch size, if batches are drawn and compared otherwise:"]
        for words, _, _, epsilon in others:
            bound = "at most, in any order" if words.startswith("shuffled") else ""
            lines.append(f"  {words:<54} ε = {show(epsilon):>8}  {bound}".rstrip())
    return "\n".join(lines)


def _record(
    run: SampledGaussian, batch: int, delta: float, others: list[tuple[str, str, str, float]]
) -> dict[str, Any]:
    lower, upper = run.epsilon_bounds(delta)
    return {
        "epsilon": upper,
        "epsilon_lower_bound": lower,
        "delta": delta,
        "noise_multiplier": run.noise_multiplier,
        "sampling_rate": run.sampling_rate,
        "batch_size": batch,
        "dataset_size": run.dataset_size,
        "steps": run.steps,
        "sampling": run.sampling,
        "neighbouring": run.neighbouring,
        "max_batch_size": run.max_batch_size,
        "otherwise": [
            {"sampling": sampling, "neighbouring": relation, "epsilon": epsilon}
            for _, sampling, relation, epsilon in others
        ],
    }


def _plot(run: SampledGaussian, delta: float, path: Path) -> None:
    """Draw ε after every step."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        sys.exit(f"--plot needs {error.name}; pip install 'optax-lsdp[demo]'")
    epsilons = Ledger([run]).epsilons(delta)
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, run.steps + 1), epsilons, color="#2a6f97")
    axes.annotate(
        f"ε = {show(float(epsilons[-1]))}",
        (run.steps, epsilons[-1]),
        xytext=(-4, 5),
        textcoords="offset points",
        ha="right",
    )
    axes.set(xlabel="steps", ylabel=f"ε at δ = {delta:g}")
    axes.set_xlim(0, 1.02 * run.steps)
    axes.set_ylim(0, 1.12 * float(epsilons[-1]) or 1)
    kind = {"poisson": "Poisson"}.get(run.sampling, run.sampling.replace("_", " "))
    axes.set_title(f"Privacy spent, {kind} batches, z = {run.noise_multiplier:.4g}", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    print(f"wrote {path}", file=sys.stderr)
