"""Parse the command line and run one command."""

import argparse
import sys
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from pathlib import Path

import optax_lsdp
from optax_lsdp._checks import check_delta, check_positive, check_whole
from optax_lsdp.cli import _budget as budget
from optax_lsdp.cli._parser import Parser, number, picture, writable


def demo(args: argparse.Namespace) -> None:
    """Run the demo, or say what to install."""
    try:
        from optax_lsdp.cli.demo import Settings, run
    except ModuleNotFoundError as error:
        sys.exit(f"optax-lsdp demo needs {error.name}; pip install 'optax-lsdp[demo]'")
    settings = Settings(args.epsilon, args.delta, args.steps, args.seeds)
    run(settings, args.output, args.record)


def audit(args: argparse.Namespace) -> None:
    """Audit this installation; exit with 1 if anything is rejected."""
    import jax

    from optax_lsdp.auditing import audit_library

    def started(name: str) -> None:
        if sys.stderr.isatty():
            print(f"{name} …", file=sys.stderr, flush=True)

    rejected = []
    key = jax.random.key(args.seed, impl="threefry2x32")
    for name, report in audit_library(key, started):
        print(f"{name}\n{report}\n", flush=True)
        if not report:
            rejected.append(name)
    if rejected:
        sys.exit(f"Rejected: {', '.join(rejected)}.")


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
    budget.add_commands(commands)
    command = commands.add_parser(
        "audit",
        help="attack this installation: clipping, noise, samplers, plans and whole steps",
        description="Search for neighbouring batches that clipping does not hold together; compare "
        "the clipped sums of models that are hard to clip with gradients of single examples; test "
        "noise at steps that are far apart, samplers, plans, resumed runs and eight devices; and "
        "try to tell steps with a canary from steps without. What is good is rejected with a "
        "probability of 1e-5 at most by each test of noise, samplers and steps.",
    )
    whole = number("seed", lambda name, value: check_whole(name, value, 0), int)
    command.add_argument(
        "--seed", type=whole, default=0, metavar="N", help="of all audits (default: 0)"
    )
    command.set_defaults(run=audit)
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
