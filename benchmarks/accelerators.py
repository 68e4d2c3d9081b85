"""What accelerators make of clipping, by their compilers: priced by the compiler, not measured.

`python -m benchmarks.accelerators tpu` (or `gpu`) compiles every model's gradient in every way.
Each compilation runs in its own process, and its result is written at once. A run that was
interrupted goes on. `--models` and `--ways` name what to price anew. On a machine with such a
device the same command measures, and its record says so.

For TPU v5e the compiler writes its price of every instruction into the program: cycles, with loops
by their trip counts. It also says how much memory the program takes, and refuses what does not fit.
For an A100 it prices nothing; the record has the bytes that kernels read and write, the number of
kernels, and memory.
"""

import argparse
import json
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import _compilers, _hlo, _timing
from benchmarks._batches import Trial, bounds, next_size
from benchmarks._compilers import MODELS, TARGETS, Target
from benchmarks._peers import WAYS
from benchmarks._processes import in_process
from benchmarks._results import RESULTS

PARTS = ("models", "largest_batch")
SEARCHED = ("GPT-2, bfloat16", "BERT, bfloat16", "ViT, bfloat16", "WRN-16-4, bfloat16")
SEARCHED_WAYS = ("non-private", "bookkeeping", "vmap", "JAX Privacy")
CHIP_BYTES = int(15.75 * 2**30)  # what a program may use of a v5e chip's memory
PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda12-pjrt", "flax", "optax", "jax-privacy")


def price(target_name: str, model: str, way: str, batch_size: int | None = None) -> dict[str, Any]:
    """Return the row of one compilation, or its error."""
    words = [target_name, "--one", model, way, *([str(batch_size)] if batch_size else [])]
    return in_process("benchmarks.accelerators", words)


def print_one(target: Target, model: str, way: str, batch_size: int | None) -> None:
    """Print the row of one compilation."""
    try:
        row = _compilers.row(target, model, way, batch_size)
    except Exception as error:  # what does not fit, or is not supported, is a result too
        row = {"error": _compilers.in_short(error)}
    sys.stdout.write(json.dumps(row) + "\n")


def print_detail(target: Target, model: str, way: str) -> None:
    """Print the dearest instructions of a gradient."""
    text = _compilers.build(target, model, way).compiled.as_text()
    total = _hlo.cycles(text)
    sys.stdout.write(f"{model}, {way}: {total:,} cycles, {_compilers.PRICED}\n")
    for price in _hlo.dearest(text):
        share = price.cycles / max(total, 1)
        sys.stdout.write(
            f"{price.cycles:>12,} {share:6.1%} ×{price.times:<5} {price.name:<40} "
            f"{price.shape[:60]:<60} {price.op_name}\n"
        )


class Record:
    """The record of one target; every change is written at once."""

    def __init__(self, path: Path, target_name: str) -> None:
        self.path, self.name = path, target_name

    def read(self) -> dict[str, Any]:
        """Return what is known of the target."""
        target = TARGETS[self.name]
        known = _timing.load_record(self.path).get(self.name, {})
        empty: dict[str, Any] = {part: {} for part in PARTS}
        return empty | known | {"device": target.device, "versions": _versions()}

    def write(self, part: str, model: str, way: str, row: dict[str, Any]) -> None:
        """Add one row, keeping what other processes wrote meanwhile."""
        record, known = _timing.load_record(self.path), self.read()
        known[part].setdefault(model, {})[way] = row
        order = {name: place for place, name in enumerate(MODELS)}
        known[part] = dict(sorted(known[part].items(), key=lambda pair: order.get(pair[0], -1)))
        record.pop("circumstances", None)
        _timing.write(self.path, record | {self.name: known})


def _versions() -> dict[str, str]:
    """Return the versions of the installed packages that matter."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def run(
    record: Record, models: list[str], ways: list[str], *, parts: list[str], only_missing: bool
) -> None:
    """Price the models in these ways, and search the largest batches that one TPU chip accepts."""
    todo: list[tuple[str, str, str]] = []
    if "models" in parts:
        todo += [("models", model, way) for way in ways for model in models]
    if "largest_batch" in parts and record.name == "tpu":
        pairs = [(m, w) for m in SEARCHED for w in SEARCHED_WAYS if m in models and w in ways]
        todo += [("largest_batch", model, way) for model, way in pairs]
    for part, model, way in tqdm(todo, desc=record.name):
        if part == "largest_batch":
            search_batch(record, model, way, anew=not only_missing)
        elif not (only_missing and way in record.read()[part].get(model, {})):
            record.write(part, model, way, price(record.name, model, way))


def search_batch(record: Record, model: str, way: str, *, anew: bool) -> None:
    """Search the largest batch of a model that one chip accepts; write every trial at once.

    The search starts from the price of the usual batch, and goes on from the trials in the record
    unless `anew` is true.
    """
    known = record.read()
    found = {} if anew else known["largest_batch"].get(model, {}).get(way, {})
    trials = {int(size): Trial(*trial) for size, trial in found.get("trials", {}).items()}
    usual = known["models"].get(model, {}).get(way)
    if usual and not trials and (trial := read_trial(usual)):
        trials[_compilers.batch_size_of(model)] = trial
    while size := next_size(trials, _compilers.batch_size_of(model), CHIP_BYTES):
        row = price(record.name, model, way, size)
        trial = read_trial(row)
        outcome: dict[str, Any] = {"how": _compilers.PRICED}
        if trial is None:  # such as a timeout, which says nothing about memory
            outcome["error"] = f"batch of {size}: {row['error']}"
        else:
            trials[size] = trial
        low, high = bounds(trials)
        outcome |= {"largest": low, "refused": high, "trials": dict(sorted(trials.items()))}
        record.write("largest_batch", model, way, outcome)
        if trial is None:
            return


def read_trial(row: dict[str, Any]) -> Trial | None:
    """Return what a row says about memory, or None if something else went wrong."""
    if "error" not in row:
        needed = sum(row[kind] for kind in ("temp_bytes", "argument_bytes", "output_bytes"))
        return Trial(needed <= CHIP_BYTES, needed)  # the compiler accepts some that need more
    if "RESOURCE_EXHAUSTED" not in row["error"]:
        return None
    told = re.search(r"(?:temporaries \(|Used )([\d.]+)G", row["error"])
    return Trial(False, int(float(told[1]) * 2**30) if told else None)


def main() -> None:
    """Price everything that has no record yet, or what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=list(TARGETS))
    parser.add_argument("--output", type=Path, default=RESULTS / "accelerators.json")
    parser.add_argument("--models", nargs="*", choices=MODELS, help="to be priced anew")
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), help="to be priced anew")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--missing", action="store_true", help="of these, only what is missing")
    parser.add_argument("--detail", choices=MODELS, help="print a model's dearest instructions")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    target = TARGETS[args.target]
    target.prepare()
    if args.one:
        model, way, *size = args.one
        print_one(target, model, way, int(size[0]) if size else None)
    elif args.detail:
        print_detail(target, args.detail, (args.ways or ["bookkeeping"])[0])
    else:
        is_missing_only = args.missing or (args.models is None and args.ways is None)
        record = Record(args.output, args.target)
        run(
            record,
            args.models or MODELS,
            args.ways or list(WAYS),
            parts=args.parts,
            only_missing=is_missing_only,
        )


if __name__ == "__main__":
    main()
