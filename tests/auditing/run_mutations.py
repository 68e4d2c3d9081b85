"""Run the audit command on every mutation; `make mutations` writes the results to last.txt.

The audits are those of `optax-lsdp audit` with eight devices. They run in this process, so that a
patch reaches all of them, and stop at the first rejection. Mutations in last.txt are skipped.
"""

import sys
from contextlib import nullcontext
from pathlib import Path

import jax

from optax_lsdp.auditing import audit_library
from tests.auditing.mutations import MUTATIONS, planted

RESULTS = Path(__file__).with_name("last.txt")
NOTHING = "nothing planted"


def first_rejection(seed=0):
    """Return the name of the first audit that rejects, or None."""
    reports = audit_library(jax.random.key(seed, impl="threefry2x32"))
    return next((name for name, report in reports if not report), None)


def main(share, shares):
    """Run every `shares`-th mutation, starting with number `share`, and write each result."""
    names = [NOTHING, *MUTATIONS][share::shares]
    for number, name in enumerate(names, 1):
        if RESULTS.exists() and f"{name}: " in RESULTS.read_text():
            continue
        print(f"{number} of {len(names)}: {name}", file=sys.stderr)
        with nullcontext() if name == NOTHING else planted(name):
            found = first_rejection()
        with RESULTS.open("a") as file:
            file.write(f"{name}: {'rejected by ' + found if found else 'passed'}\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:] or ("0", "1")))
