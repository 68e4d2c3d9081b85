"""The command `epsilon`: print what a training run guarantees."""

import argparse
import json
import sys
import textwrap
from dataclasses import asdict, replace
from pathlib import Path

from optax_lsdp._schemes import INDEPENDENT, RELATIONS, SCHEMES
from optax_lsdp.accounting import (
    CorrelatedGaussian,
    Ledger,
    SampledGaussian,
    calibrate_noise_multiplier,
    show_epsilon,
    statement,
    steps_of_epochs,
)
from optax_lsdp.correlation import independent, optimize_banded

Run = SampledGaussian | CorrelatedGaussian
Alternative = tuple[SampledGaussian, float]  # the run under another scheme or relation, and its ε

_LARGEST = 1e5  # above this ε, do not compare noises: z could be too small for the calibration


def run(args: argparse.Namespace) -> None:
    """Print the guarantee of the training run that the options describe."""
    unit, delta = read_run(args)
    answer(args, replace(unit, noise_multiplier=args.noise_multiplier), delta)


def read_run(args: argparse.Namespace) -> tuple[Run, float]:
    """Return the run that the options describe, and δ. Callers replace the noise multiplier, 1."""
    size, batch = args.dataset_size, args.batch_size
    if batch > size:
        args.parser.error(f"--batch-size {batch} must be at most --dataset-size {size}")
    delta = args.delta if args.delta is not None else 10.0 ** -max(5, len(str(10 * size - 1)))
    if delta * size >= 1:
        print(f"--delta should be far below 1/n = {1 / size:.2g}, got {delta:g}", file=sys.stderr)
    if args.bands:
        _check_bands(args)
    if SCHEMES[args.sampling].whole_dataset and batch != size:
        needed = f"{size}, the whole dataset, with --sampling {args.sampling}"
        args.parser.error(f"--batch-size must be {needed}")
    names = ("sampling", "neighbouring", "max_batch_size", "dataset_size")
    settings = {name: getattr(args, name) for name in names}
    unit: Run
    try:
        steps = args.steps or steps_of_epochs(
            args.epochs, dataset_size=size, batch_size=batch, sampling=args.sampling
        )
        if args.bands:
            correlation, relation = optimize_banded(steps, args.bands), args.neighbouring
            how = {"neighbouring": relation} if relation else {}
            unit = CorrelatedGaussian(1.0, correlation, sampling_rate=batch / size, **how)
        else:
            unit = SampledGaussian(1.0, batch / size, steps, **settings)
    except ValueError as error:
        args.parser.refuse(error)
    return unit, delta


def _check_bands(args: argparse.Namespace) -> None:
    """Refuse options that do not fit correlated noise."""
    if args.sampling != "poisson" or args.max_batch_size:
        wrong = "--max-batch-size" if args.max_batch_size else f"--sampling {args.sampling}"
        args.parser.error(f"{wrong} does not go with --bands, which needs cyclic Poisson batches")
    most = args.dataset_size // args.bands
    if args.batch_size > most:
        part = f"{most}, because --bands splits the data into {args.bands} parts of this size"
        args.parser.error(f"--batch-size must be at most {part}, got {args.batch_size}")


def answer(args: argparse.Namespace, mechanism: Run, delta: float) -> None:
    """Print what a run guarantees. With `--plot`, also draw ε."""
    if args.plot:
        _plot(mechanism, delta, args.plot)
    if isinstance(mechanism, CorrelatedGaussian):
        record, words = _correlated(mechanism, delta)
    else:
        others = _alternatives(mechanism, delta)
        record, words = _record(mechanism, delta, others), _words(mechanism, delta, others)
    print(json.dumps({"batch_size": args.batch_size, **record}, indent=1) if args.json else words)


def _correlated(mechanism: CorrelatedGaussian, delta: float) -> tuple[dict[str, object], str]:
    """Return what correlated noise guarantees, with a comparison, as a record and in words."""
    lower, upper = mechanism.epsilon_bounds(delta)
    z, ratio = _against_independent(mechanism, upper, delta)
    words = statement(mechanism, delta)
    if z is not None and ratio is not None:
        sentences = (
            f"Independent noise with Poisson batches has the same ε at z = {show_epsilon(z)}.",
            f"It leaves {1 / ratio:.3g} times as much noise in the parameters (SGD with a constant",
            "learning rate, a root mean square over all steps).",
        )
        words += f"\n\n{textwrap.fill(' '.join(sentences), 88)}"
    record: dict[str, object] = {
        "epsilon": upper,
        "epsilon_lower_bound": lower,
        "delta": delta,
        "bands": mechanism.correlation.bands,
        "noise_multiplier": mechanism.noise_multiplier,
        "sampling_rate": mechanism.sampling_rate or 0.0,
        "steps": mechanism.steps,
        "sampling": mechanism.sampling,
        "neighbouring": mechanism.neighbouring,
        "independent_noise_multiplier": z,
        "noise_in_parameters_against_independent": ratio,
    }
    return record, words


def _against_independent(
    mechanism: CorrelatedGaussian, epsilon: float, delta: float
) -> tuple[float | None, float | None]:
    """Return the z at which independent noise has the same ε, and a ratio of two noises.

    The ratio is the noise that correlated noise leaves in the parameters, divided by the noise that
    independent noise leaves. Both numbers are None if ε is 0, if ε is so large that it promises
    nothing, or if no z has this ε.
    """
    steps = mechanism.steps
    if not 0 < epsilon <= _LARGEST:
        return None, None
    try:
        z = calibrate_noise_multiplier(
            epsilon=epsilon,
            delta=delta,
            sampling_rate=mechanism.sampling_rate or 0.0,
            steps=steps,
            neighbouring=mechanism.neighbouring,
        )
    except ValueError:
        return None, None
    errors, others = (c.squared_errors() for c in (mechanism.correlation, independent(steps)))
    return z, mechanism.noise_multiplier / z * (errors.mean() / others.mean()) ** 0.5


def _alternatives(mechanism: SampledGaussian, delta: float) -> list[Alternative]:
    """Return the run under all sampling schemes and neighbouring relations, each with its ε.

    Schemes that need the whole dataset are left out. Of several relations with the same
    sensitivity, only the first is used. If every batch is the whole dataset, the list is empty.
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
    mechanism: SampledGaussian, delta: float, others: list[Alternative]
) -> dict[str, object]:
    lower, upper = mechanism.epsilon_bounds(delta)
    settings = asdict(mechanism)
    del settings["group_size"]  # the command line has no groups
    return {
        "epsilon": upper,
        "epsilon_lower_bound": lower,
        "delta": delta,
        **settings,
        "otherwise": [
            {"sampling": one.sampling, "neighbouring": one.neighbouring, "epsilon": epsilon}
            for one, epsilon in others
        ],
    }


def _plot(mechanism: Run, delta: float, path: Path) -> None:
    """Draw ε after every step."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        clone = "run pip install '.[demo]' in a clone of the repository"
        sys.exit(f"--plot needs {error.name}; {clone}")
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
