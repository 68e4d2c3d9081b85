"""The command `audit`: run all audits of this installation."""

import argparse
import sys

import jax

from optax_lsdp.auditing import audit_library


def run(args: argparse.Namespace) -> None:
    """Print the report of every audit. If an audit rejects the installation, exit with status 1."""

    def show_start(name: str) -> None:
        if sys.stderr.isatty():
            print(f"{name} …", file=sys.stderr, flush=True)

    rejected = []
    key = jax.random.key(args.seed, impl="threefry2x32")
    for name, report in audit_library(key, show_start):
        print(f"{name}\n{report}\n", flush=True)
        if not report:
            rejected.append(name)
    if rejected:
        sys.exit(f"Rejected: {', '.join(rejected)}.")
