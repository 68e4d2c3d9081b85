"""What a step of correlated noise costs on a TPU and on a GPU, by their compilers.

`python -m benchmarks.correlated_prices tpu` (or `gpu`) compiles one step of every way of adding
noise, ours and JAX Privacy's, for two large leaves: priced by the compiler, not measured. Each
price is written at once, and a run that was interrupted goes on. `--ways` names what to price anew.
On a machine with such a device, `python -m benchmarks.correlated_noise` measures.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import _compilers, _timing
from benchmarks._processes import in_process
from benchmarks._results import RESULTS
from benchmarks.correlated_noise import BANDS, STEPS, past_bytes, transforms

LEAVES = {"vector of 10⁷": (10**7,), "2,500 × 4,000": (2_500, 4_000)}


def row(target: _compilers.Target, leaf: str, way: str) -> dict[str, Any]:
    """Return what the compiler says of one step; gradients and state are given away."""
    tx = transforms(STEPS, BANDS)[way]()
    start = time.perf_counter()
    compiled = _compilers.build_update(target, tx, LEAVES[leaf], donated=(0, 1))
    seconds = time.perf_counter() - start
    return {
        "how": _compilers.PRICED,
        **target.price(compiled.as_text()),
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "past_bytes": past_bytes(tx, LEAVES[leaf]),
        "compile_seconds": round(seconds, 2),
    }


def main() -> None:
    """Price everything that has no record yet, or what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=list(_compilers.TARGETS))
    parser.add_argument("--output", type=Path, default=RESULTS / "correlated_prices.json")
    parser.add_argument("--ways", nargs="*", help="to be priced anew")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    target = _compilers.TARGETS[args.target]
    target.prepare()
    if args.one:
        try:
            found = row(target, *args.one)
        except Exception as error:  # what does not fit is a result too
            found = {"error": _compilers.in_short(error)}
        sys.stdout.write(json.dumps(found) + "\n")
        return
    ways = list(transforms(STEPS, BANDS))
    for leaf, way in tqdm([(leaf, way) for leaf in LEAVES for way in args.ways or ways]):
        record = _timing.load_record(args.output)
        known = record.setdefault(args.target, {"device": target.device, "leaves": {}})
        rows = known["leaves"].setdefault(leaf, {})
        if way in rows and args.ways is None:
            continue
        rows[way] = in_process("benchmarks.correlated_prices", [args.target, "--one", leaf, way])
        record.pop("circumstances", None)
        _timing.write(args.output, record)


if __name__ == "__main__":
    main()
