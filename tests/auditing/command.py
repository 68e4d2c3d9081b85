"""Try the audit command on every planted bug: `make mutations` writes last.txt beside this file.

The command runs as `optax-lsdp audit` does with eight devices, in this process, so that a patch
reaches all of it. It ends at the first audit that rejects. What last.txt has is not tried again.
"""

import sys
from contextlib import nullcontext
from pathlib import Path

import jax

from optax_lsdp.auditing import audit_library
from tests.auditing.mutations import MUTATIONS

RESULTS = Path(__file__).with_name("last.txt")
NOTHING = "nothing planted"


def first_rejection(seed=0):
    """Return the name of the first audit of the command that rejects, or None."""
    reports = audit_library(jax.random.key(seed, impl="threefry2x32"))
    return next((name for name, report in reports if not report), None)


def main(share, shares):
    """Try one of several shares of the bugs, and write each result as soon as it is there."""
    names = [NOTHING, *MUTATIONS][share::shares]
    for number, name in enumerate(names, 1):
        tried = RESULTS.read_text() if RESULTS.exists() else ""
        if f"{name}: " in tried:
            continue
        print(f"{number} of {len(names)}: {name}", file=sys.stderr)
        with nullcontext() if name == NOTHING else MUTATIONS[name].planted():
            found = first_rejection()
        with RESULTS.open("a") as file:
            file.write(f"{name}: {'rejected by ' + found if found else 'passed'}\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:] or ("0", "1")))
