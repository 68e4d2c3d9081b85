"""The options of all commands, and `main`, which runs one command.

A command is a row of `COMMANDS`, and a module of the same name with a function `run(args)`. `main`
imports only the module of one command, so `epsilon` and `calibrate` do not load JAX.
"""

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn

import optax_lsdp
from optax_lsdp._checks import check_delta, check_positive, check_whole
from optax_lsdp._schemes import INDEPENDENT, RELATIONS

Check = Callable[[str, float], None]  # raises if the number is not valid
_EPILOG = """\
How to read the answer. A training run is (ε, δ)-differentially private if one example makes no
conclusion from the output more than e^ε times as probable, except with probability δ. The noise
multiplier z is the standard deviation of the noise on the *sum* of clipped gradients, divided by
the clip norm. δ should be well below one over the number of examples.

How batches are drawn matters as much as the noise (q = batch size/dataset size):
{schemes}

Examples:
  optax-lsdp epsilon --dataset-size 60000 --batch-size 256 --epochs 60 --noise-multiplier 1.1
  optax-lsdp calibrate --dataset-size 60000 --batch-size 256 --steps 14100 --epsilon 2 --plot e.png
"""


class Parser(argparse.ArgumentParser):
    """A parser that reports a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        """Print the mistake and how to get help, and exit."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def refuse(self, error: ValueError) -> NoReturn:
        """Print an error, reworded by `in_options`, and exit."""
        self.error(in_options(str(error)))


def in_options(sentence: str) -> str:
    """Return a sentence with names of arguments replaced by names of options.

    >>> in_options("`max_batch_size` must come with sampling='poisson', got None.")
    '--max-batch-size must come with --sampling poisson, got none'
    """
    sentence = re.sub(r"`(\w+)`", lambda match: _option(match[1]), sentence)
    sentence = re.sub(r"\b(\w+)='(\w+)'", r"--\1 \2", sentence)
    return sentence.replace("got None", "got none").rstrip(".")


def picture(text: str) -> Path:
    """Return the path of a PNG file. Raise if it cannot be written."""
    path = writable(text)
    if path.suffix.lower() != ".png":
        raise argparse.ArgumentTypeError(f"must end in .png, got {text!r}")
    return path


def writable(text: str) -> Path:
    """Return the path of a file. Raise if it cannot be written."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file, got the folder {text!r}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"no such folder: {str(path.parent)!r}; create it first")
    return path


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _add_number(
    command: argparse._ActionsContainer, name: str, check: Check, help: str, **settings: Any
) -> None:
    """Add an option whose value is a number that passes `check`."""
    is_whole = getattr(check, "func", check) is check_whole  # or a partial of it

    def convert(text: str) -> float:
        try:
            value = int(text) if is_whole else float(text)
            check(name, value)
        except ValueError as error:
            reason = f"{text!r} is not a {'whole ' if is_whole else ''}number"
            if "must" in str(error):  # argparse names the option in front of the reason
                reason = str(error).removeprefix(f"`{name}` ").rstrip(".")
            raise argparse.ArgumentTypeError(reason) from error
        return value

    metavar = "N" if is_whole else "X"
    command.add_argument(_option(name), type=convert, metavar=metavar, help=help, **settings)


def _add_demo_options(command: Parser) -> None:
    for name, check, default, text in (
        ("epsilon", check_positive, 0.5, "budget of each training run"),
        ("delta", check_delta, 1e-5, "probability with which ε may fail"),
        ("steps", check_whole, 40, "steps of each training run"),
        ("seeds", check_whole, 5, "number of training runs to average over"),
    ):
        _add_number(command, name, check, f"{text} (default: {default})", default=default)
    text = "file for the figure (default: demo.png)"
    command.add_argument("--output", type=picture, default="demo.png", metavar="PNG", help=text)
    text = "file for the numbers (default: none)"
    command.add_argument("--record", type=writable, metavar="JSON", help=text)


def _add_run_options(command: Parser, target: str, meaning: str) -> None:
    """Add the options that describe a run. `target` is "noise_multiplier" or "epsilon"."""
    schemes = (
        textwrap.fill(f"{name}: {scheme.describe()}.", 96, subsequent_indent="    ")
        for name, scheme in INDEPENDENT.items()
    )
    command.epilog = _EPILOG.format(schemes=textwrap.indent("\n".join(schemes), "  "))
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    needed = [name for name, scheme in INDEPENDENT.items() if scheme.default_neighbouring is None]
    changes = "; ".join(f"{name}: {relation.change}" for name, relation in RELATIONS.items())
    add = partial(_add_number, command)
    add("dataset_size", check_whole, "number of examples in the dataset", required=True)
    text = "fixed or expected number of examples in a batch"
    add("batch_size", check_whole, text, required=True)
    length = command.add_mutually_exclusive_group(required=True)
    _add_number(length, "steps", check_whole, "number of steps")
    text = "number of epochs; each has dataset size/batch size steps (rounded down if shuffled)"
    _add_number(length, "epochs", check_positive, text)
    add(target, check_positive, meaning, required=True)
    text = (
        "probability with which ε may fail (default: 1e-5 or, for more than 10,000 examples, the "
        "largest power of ten up to 0.1/dataset size)"
    )
    add("delta", check_delta, text)
    text = "the sampling scheme: how batches are drawn (default: poisson)"
    command.add_argument("--sampling", choices=INDEPENDENT, default="poisson", help=text)
    text = (
        f"how neighbouring datasets differ ({changes}; default: add_remove; required with "
        f"{' and '.join(needed)})"
    )
    command.add_argument("--neighbouring", choices=RELATIONS, help=text)
    text = "truncate larger Poisson batches to a random subset of N examples"
    add("max_batch_size", check_whole, text)
    text = "correlate the noise of N successive steps, with cyclic Poisson batches (see the manual)"
    add("bands", check_whole, text)
    command.add_argument("--json", action="store_true", help="print JSON instead of words")
    text = "draw ε against the number of steps"
    command.add_argument("--plot", type=picture, metavar="PNG", help=text)


def _add_audit_options(command: Parser) -> None:
    check_seed = partial(check_whole, least=0)
    _add_number(command, "seed", check_seed, "random seed (default: 0)", default=0)


# The name of each command, a line for the list of commands, a description, and its options.
COMMANDS: dict[str, tuple[str, str, Callable[[Parser], None]]] = {
    "demo": (
        "train on spectra and digits, privately, with and without smoothing",
        "Train softmax regression on spectra, where smoothing helps, and on scikit-learn's digits, "
        "where it does not, under one privacy budget: with DP-SGD, and with DP-LSSGD at several "
        "smoothing values and with σ chosen automatically. Print who is protected and how much, "
        "and the test accuracies. This takes about a minute on two cores. It needs no network.",
        _add_demo_options,
    ),
    "epsilon": (
        "print what a training run guarantees",
        "Print what a training run guarantees, in plain words, with every assumption.",
        partial(
            _add_run_options,
            target="noise_multiplier",
            meaning="z: the standard deviation of the noise on the clipped sum, divided by C",
        ),
    ),
    "calibrate": (
        "print how much noise a privacy budget needs",
        "Print how much noise a privacy budget needs, in plain words, with every assumption.",
        partial(_add_run_options, target="epsilon", meaning="the budget: the ε that may be spent"),
    ),
    "audit": (
        "attack this installation: clipping, noise, samplers, plans and whole steps",
        "Search for neighbouring batches whose clipped sums are too far apart. For models that are "
        "hard to clip, compare clipped sums with sums of clipped per-example gradients. Test noise "
        "at distant steps, samplers, plans, resumed runs and eight devices. Try to distinguish "
        "steps with a canary from steps without one. Each statistical test rejects a correct "
        "installation with a probability of at most 1e-5.",
        _add_audit_options,
    ),
}


def make_parser() -> Parser:
    """Return the parser of all commands."""
    top = Parser(prog="optax-lsdp", description="Private training with Laplacian smoothing.")
    top.add_argument("--version", action="version", version=optax_lsdp.__version__)
    parsers = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (help_line, description, add_options) in COMMANDS.items():
        parser = parsers.add_parser(name, help=help_line, description=description)
        add_options(parser)
        parser.set_defaults(parser=parser)
    return top


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for terminals that cannot print ε
    args = make_parser().parse_args(arguments)
    try:
        command = import_module(f"optax_lsdp.cli.{args.command}")
    except ModuleNotFoundError as error:
        clone = "run pip install '.[demo]' in a clone of the repository"
        sys.exit(f"optax-lsdp {args.command} needs {error.name}; {clone}")
    try:
        command.run(args)
    except KeyboardInterrupt:
        sys.exit("\noptax-lsdp: interrupted; nothing was written")
