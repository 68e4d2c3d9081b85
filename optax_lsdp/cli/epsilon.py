"""The command `epsilon`: print what a training run guarantees."""

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

from optax_lsdp._schemes import INDEPENDENT, RELATIONS, SCHEMES
from optax_lsdp.accounting import Ledger, SampledGaussian, show_epsilon, statement, steps_of_epochs

Alternative = tuple[SampledGaussian, float]  # the run under another scheme or relation, and its ε


def run(args: argparse.Namespace) -> None:
    """Print the guarantee of the training run that the options describe."""
    unit, delta = read_run(args)
    answer(args, replace(unit, noise_multiplier=args.noise_multiplier), delta)


def read_run(args: argparse.Namespace) -> tuple[SampledGaussian, float]:
    """Return the run that the options describe, with noise multiplier 1 for now, and its δ."""
    size, batch = args.dataset_size, args.batch_size
    if batch > size:
        args.parser.error(f"--batch-size {batch} must be at most --dataset-size {size}")
    delta = args.delta if args.delta is not None else 10.0 ** -max(5, len(str(10 * size - 1)))
    if delta * size >= 1:
        print(f"--delta should be far below 1/n = {1 / size:.2g}, got {delta:g}", file=sys.stderr)
    if SCHEMES[args.sampling].whole_dataset and batch != size:
        needed = f"{size}, the whole dataset, with --sampling {args.sampling}"
        args.parser.error(f"--batch-size must be {needed}")
    names = ("sampling", "neighbouring", "max_batch_size", "dataset_size")
    settings = {name: getattr(args, name) for name in names}
    try:
        steps = args.steps or steps_of_epochs(
            args.epochs, dataset_size=size, batch_size=batch, sampling=args.sampling
        )
        unit = SampledGaussian(1.0, batch / size, steps, **settings)
    except ValueError as error:
        args.parser.refuse(error)
    return unit, delta


def answer(args: argparse.Namespace, mechanism: SampledGaussian, delta: float) -> None:
    """Print what a run guarantees. With `--plot`, also draw ε."""
    if args.plot:
        _plot(mechanism, delta, args.plot)
    others = _alternatives(mechanism, delta)
    if args.json:
        print(json.dumps(_record(mechanism, args.batch_size, delta, others), indent=1))
    else:
        print(_words(mechanism, delta, others))


def _alternatives(mechanism: SampledGaussian, delta: float) -> list[Alternative]:
    """Return the run under all sampling schemes and neighbouring relations, each with its ε.

    Schemes that need the whole dataset are left out. So are relations with the same sensitivity as
    an earlier relation.
    """
    if mechanism.sampling_rate == 1:
        return []
    found, untruncated = [], replace(mechanism, max_batch_size=None)
    for sampling, scheme in INDEPENDENT.items():
        first = {RELATIONS[name].sensitivity: name for name in reversed(scheme.neighbouring)}
        for neighbouring in scheme.neighbouring:
            if neighbouring in first.values() and not scheme.whole_dataset:
                other = replace(untruncated, sampling=sampling, neighbouring=neighbouring)
                found.append((other, other.epsilon(delta)))
    return found


def _words(mechanism: SampledGaussian, delta: float, others: list[Alternative]) -> str:
    lines = [statement(mechanism, delta)]
    if others:
        lines += [
            "",
            "The same noise and batch size under other schemes and neighbouring relations:",
        ]
    for other, epsilon in others:
        scheme = SCHEMES[other.sampling]
        title = f"{scheme.title}, {RELATIONS[other.neighbouring].change}"
        lines.append(f"  {title:<54} ε = {show_epsilon(epsilon):>8}  {scheme.remark}".rstrip())
    return "\n".join(lines)


def _record(
    mechanism: SampledGaussian, batch_size: int, delta: float, others: list[Alternative]
) -> dict[str, object]:
    lower, upper = mechanism.epsilon_bounds(delta)
    settings = asdict(mechanism)
    del settings["group_size"]  # the command line has no groups
    return {
        "epsilon": upper,
        "epsilon_lower_bound": lower,
        "delta": delta,
        "batch_size": batch_size,
        **settings,
        "otherwise": [
            {"sampling": one.sampling, "neighbouring": one.neighbouring, "epsilon": epsilon}
            for one, epsilon in others
        ],
    }


def _plot(mechanism: SampledGaussian, delta: float, path: Path) -> None:
    """Draw ε after every step."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        sys.exit(f"--plot needs {error.name}; pip install 'optax-lsdp[demo]'")
    epsilons = Ledger([mechanism]).epsilons(delta)
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, mechanism.steps + 1), epsilons, color="#2a6f97")
    last = float(epsilons[-1])
    label, end = f"ε = {show_epsilon(last)}", (mechanism.steps, last)
    axes.annotate(label, end, xytext=(-4, 5), textcoords="offset points", ha="right")
    axes.set(xlabel="steps", ylabel=f"ε at δ = {delta:g}")
    axes.set(xlim=(0, 1.02 * mechanism.steps), ylim=(0, 1.12 * last or 1))
    title = f"{SCHEMES[mechanism.sampling].title} batches, z = {mechanism.noise_multiplier:.4g}"
    axes.set_title(f"Privacy spent, {title}", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    print(f"wrote {path}", file=sys.stderr)
