"""What smoothing costs on a TPU beside noise: priced by the compiler, not measured.

`python -m benchmarks.tpu_smoothing` compiles both transforms for TPU v5e, for leaves as models have
them. Each price is written at once, and a run that was interrupted goes on. `--leaves` names what
to price anew. The compiler prices no change of shape and no update in place. So a row also has the
bytes that such instructions move.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import optax
from tqdm import tqdm

import optax_lsdp as lsdp
from benchmarks import _compilers, _hlo, _timing
from benchmarks._processes import in_process
from benchmarks._results import RESULTS

LEAVES = {
    "78,125 × 128": (78_125, 128),
    "2,500 × 4,000": (2_500, 4_000),
    "4,000 × 2,500": (4_000, 2_500),
    "3,072 × 3,072": (3_072, 3_072),
    "3 × 3 × 1,000 × 1,112": (3, 3, 1_000, 1_112),
    "3 × 3 × 1,024 × 1,024": (3, 3, 1_024, 1_024),
    "vector of 10⁷": (10**7,),
    "vector of 10⁶": (10**6,),
}
WAYS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "copy": lambda: optax.scale(1.5),
    "noise": lambda: lsdp.add_gaussian_noise(1.0, key=jax.random.key(0)),
    "auto": lambda: lsdp.laplacian_smooth(1.0),
    "recursive": lambda: lsdp.laplacian_smooth(1.0, method="recursive"),
    "fft": lambda: lsdp.laplacian_smooth(1.0, method="fft"),
}


def row(leaf: str, way: str) -> dict[str, Any]:
    """Return what the compiler says of one transform of one leaf."""
    start = time.perf_counter()
    compiled = _compilers.build_update(_compilers.TARGETS["tpu"], WAYS[way](), LEAVES[leaf])
    seconds = time.perf_counter() - start
    text = compiled.as_text()
    first = _hlo.dearest(text, 2)
    return {
        "how": _compilers.PRICED,
        "entries": math.prod(LEAVES[leaf]),
        "cycles": _hlo.cycles(text),
        **_hlo.unpriced(text),
        "unpriced_move_bytes": _hlo.unpriced_moves(text),
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "compile_seconds": round(seconds, 2),
        "dearest": [[price.cycles, price.times, price.name, price.shape[:80]] for price in first],
    }


def main() -> None:
    """Price everything that has no record yet; `--leaves` names what to price anew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=RESULTS / "tpu_smoothing.json")
    parser.add_argument("--leaves", nargs="*", choices=list(LEAVES), help="to be priced anew")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    _compilers.TARGETS["tpu"].prepare()
    if args.one:
        try:
            found = row(*args.one)
        except Exception as error:  # what does not fit is a result too
            found = {"error": _compilers.in_short(error)}
        sys.stdout.write(json.dumps(found) + "\n")
        return
    for leaf, way in tqdm([(leaf, way) for leaf in args.leaves or LEAVES for way in WAYS]):
        record = _timing.load_record(args.output)
        rows = record.setdefault("leaves", {}).setdefault(leaf, {})
        is_vector = len(LEAVES[leaf]) == 1
        if (way in rows and args.leaves is None) or (way == "fft" and not is_vector):
            continue
        rows[way] = in_process("benchmarks.tpu_smoothing", ["--one", leaf, way])
        record.pop("circumstances", None)
        _timing.write(args.output, record | {"priced_for": _compilers.TARGETS["tpu"].device})


if __name__ == "__main__":
    main()
