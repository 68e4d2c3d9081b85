"""The command line: `optax-lsdp`, or `python -m optax_lsdp`."""

import argparse
import sys
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn

import optax_lsdp
from optax_lsdp._checks import check_delta, check_positive, check_whole


class Parser(argparse.ArgumentParser):
    """A parser that answers a mistake with one line."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and where help is."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def number(name: str, check: Callable[[str, float], None], kind: type = float) -> Callable:
    """Return a converter from text to a number that `check` admits."""

    def convert(text: str) -> float:
        try:
            value = kind(text)
            check(name, value)
        except ValueError as error:
            wanted = "a whole number" if kind is int else "a number"
            reason = str(error).rstrip(".") if "must" in str(error) else f"{text!r} is not {wanted}"
            raise argparse.ArgumentTypeError(reason) from error
        return value

    return convert


def picture(text: str) -> Path:
    """Return the path of a PNG that can be made."""
    path = Path(text)
    if path.suffix.lower() != ".png":
        raise argparse.ArgumentTypeError(f"must end in .png, got {text!r}")
    return writable(text)


def writable(text: str) -> Path:
    """Return the path of a file that can be made."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"is a folder: {text!r}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"no such folder: {str(path.parent)!r}")
    return path


def demo(args: argparse.Namespace) -> None:
    """Run the demo, or say what to install."""
    try:
        from optax_lsdp.demo import Settings, run
    except ModuleNotFoundError as error:
        sys.exit(f"optax-lsdp demo needs {error.name}; pip install 'optax-lsdp[demo]'")
    settings = Settings(args.epsilon, args.delta, args.steps, args.seeds)
    run(settings, args.output, args.record)


def parser() -> Parser:
    """Return the parser of all commands."""
    top = Parser(prog="optax-lsdp", description="Private training with Laplacian smoothing.")
    top.add_argument("--version", action="version", version=optax_lsdp.__version__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    command = commands.add_parser(
        "demo",
        help="train on scikit-learn's digits, privately, with and without smoothing",
        description="Train softmax regression and a small CNN on scikit-learn's digits under one "
        "privacy budget, with DP-SGD and with DP-LSSGD at several smoothing values; print who is "
        "protected and how much, and the test accuracies. About a minute on two cores; no network.",
    )
    options: list[tuple[str, Callable, object, str, str]] = [
        ("epsilon", number("epsilon", check_positive), 0.5, "X", "budget of each training"),
        ("delta", number("delta", check_delta), 1e-5, "X", "probability with which ε may fail"),
        ("steps", number("steps", check_whole, int), 40, "N", "steps of each training"),
        ("seeds", number("seeds", check_whole, int), 5, "N", "trainings to average over"),
        ("output", picture, Path("demo.png"), "PNG", "where the figure goes"),
        ("record", writable, None, "JSON", "where the numbers go, if anywhere"),
    ]
    for name, kind, default, metavar, text in options:
        shown = text if default is None else f"{text} (default: {default})"
        command.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=shown)
    command.set_defaults(run=demo)
    return top


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without ε still gets its answer
    args = parser().parse_args(arguments)
    try:
        args.run(args)
    except KeyboardInterrupt:
        sys.exit("\noptax-lsdp: interrupted; nothing was written")


if __name__ == "__main__":
    main()
