"""What clipping costs: the zoo by every engine and library, in interleaved runs.

Every model's result is written as soon as it is there; a run that was interrupted goes on.
`--models` names those to measure anew, and `--ways` the ways to compute their gradients. The record
keeps the rows of other ways, which are then of an earlier run. Peers are used where they are
installed (`pip install jax-privacy opacus`); what fails is recorded with its message.

Large models are compared with ordinary training only. Those that consist of shapes are compiled for
their memory, and not run. `--compile-only` does the same to all large models.
"""

import argparse
import json
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import optax
from tqdm import tqdm

import optax_lsdp as lsdp
from benchmarks import _peers, _timing
from benchmarks._results import RESULTS
from benchmarks.larger import gpt2_small
from benchmarks.zoo import WIDTHS, ZOO, Model, mlp

SLOW = 2.0  # seconds per call above which a peer is timed only once
OURS = ("non-private", "bookkeeping")
LARGE: dict[str, Callable[[], Model]] = {
    "softmax regression, full batch": lambda: mlp((10,), 50_000),
    "GPT-2 small": gpt2_small,
}


def compiled(function: Callable[..., Any], model: Model) -> tuple[Any, dict[str, float]]:
    """Return the compiled function and its compile time."""
    jax.clear_caches()
    start = time.perf_counter()
    run = jax.jit(function).lower(model.params, model.batch).compile()
    seconds = time.perf_counter() - start
    memory = run.memory_analysis()
    return partial(run, model.params, model.batch), {
        "compile_seconds": seconds,
        "temp_megabytes": memory.temp_size_in_bytes / 1e6 if memory else float("nan"),
    }


def measure(model: Model, chosen: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Compile every function, then time all of them in turn for about `seconds`."""
    runs, rows = {}, {}
    for name, make in chosen.items():
        try:
            runs[name], rows[name] = compiled(make(), model)
            start = time.perf_counter()
            jax.block_until_ready(runs[name]())
            rows[name]["first_seconds"] = time.perf_counter() - start
        except Exception as error:  # if a peer fails, that is its result
            rows[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
            runs.pop(name, None)
    for name, milliseconds in time_in_turn(runs, rows, seconds).items():
        rows[name]["milliseconds"] = milliseconds
    return rows


def time_in_turn(runs: dict[str, Any], rows: dict[str, Any], seconds: float) -> dict[str, float]:
    """Return medians; for slow peers, the time of the first call."""
    slow = {n for n in runs if n not in OURS and rows[n]["first_seconds"] > SLOW}
    quick = {name: run for name, run in runs.items() if name not in slow}
    total = sum(rows[name]["first_seconds"] for name in quick)
    rounds = int(min(100, max(9, seconds / max(total, 1e-3))))
    once = {name: 1e3 * rows[name]["first_seconds"] for name in slow}
    return once | _timing.medians(quick, rounds)


def whole_steps(name: str, model: Model, seconds: float) -> dict[str, float]:
    """Return the median time of a whole step, private and not private."""

    def step(grad: Callable[..., Any], tx: optax.GradientTransformation) -> Callable[[], Any]:
        @jax.jit
        def run(params: Any, state: Any, batch: Any) -> Any:
            updates, state = tx.update(grad(params, batch), state, params)
            return optax.apply_updates(params, updates), state

        return partial(run, model.params, tx.init(model.params), model.batch)

    size = len(jax.tree.leaves(model.batch)[0])
    private = lsdp.dp_sgd(
        0.1, clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=size, key=jax.random.key(0)
    )
    steps = {
        "JAX": step(_peers.mean_gradient(model), optax.sgd(0.1)),
        "optax_lsdp": step(lsdp.clipped_grad(model.loss, clip_norm=1.0), private),
    }
    try:
        steps |= _peers.opacus_steps(name.partition(",")[0], model)
    except ImportError:
        warnings.warn("Opacus is not installed: its rows are left out.", stacklevel=1)
    start = time.perf_counter()
    for run in steps.values():
        jax.block_until_ready(run())
    rounds = int(min(100, max(7, seconds / (time.perf_counter() - start))))
    return _timing.medians(steps, rounds)


def growth(sizes: list[int], widths: list[int], seconds: float) -> list[dict[str, Any]]:
    """Return time and memory of the MLP for each batch size and width."""
    rows = []
    for width, size in [(1024, n) for n in sizes] + [(w, 64) for w in widths]:
        model = mlp((width, width, 10), size)
        floats = size * sum(leaf.size for leaf in jax.tree.leaves(model.params))
        names = [*OURS, *(["vmap"] if floats < 3e8 else [])]
        chosen = {name: way for name, way in _peers.ways(model).items() if name in names}
        rows.append({"batch": size, "width": width, "ways": measure(model, chosen, seconds)})
    return rows


def microbatches(name: str, sizes: list[int], seconds: float) -> dict[str, Any]:
    """Return time and memory of a model for several microbatch sizes."""
    model = ZOO[name](None)
    chosen = {
        f"microbatches of {size}": partial(
            lsdp.clipped_grad, model.loss, clip_norm=1.0, microbatch_size=size
        )
        for size in sizes
    }
    whole = {way: make for way, make in _peers.ways(model).items() if way in OURS}
    return {"model": name, "ways": measure(model, whole | chosen, seconds)}


def large(model: Model, seconds: float, compile_only: bool) -> dict[str, Any]:
    """Return the memory of the ordinary gradient and of ours, and the time if they run."""
    chosen = {name: way for name, way in _peers.ways(model).items() if name in OURS}
    leaves = jax.tree.leaves((model.params, model.batch))
    if not compile_only and all(isinstance(leaf, jax.Array) for leaf in leaves):
        return measure(model, chosen, seconds)
    built = {name: compiled(make(), model)[1] for name, make in chosen.items()}
    return {name: {"temp_megabytes": row["temp_megabytes"]} for name, row in built.items()}


def main() -> None:
    """Measure everything that has no record yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=RESULTS / "clipping.json")
    every = [*ZOO, *LARGE]
    parser.add_argument("--models", nargs="*", choices=every, help="to be measured anew")
    ways = list(_peers.WAYS)
    parser.add_argument("--ways", nargs="*", choices=ways, default=ways, help="for the zoo")
    parser.add_argument("--compile-only", action="store_true", help="do not time large models")
    parser.add_argument("--smoke", action="store_true", help="a model or two, in seconds")
    args = parser.parse_args()
    seconds = 0.2 if args.smoke else 5.0
    known = json.loads(args.output.read_text()) if args.output.exists() else {}
    parts = ("models", "large", "steps", "growth", "microbatches")
    record = {key: known.get(key, {}) for key in parts}
    names = every[:1] if args.smoke else every
    done = {*record["models"], *record["large"]}
    again = args.models if args.models is not None else [n for n in names if n not in done]
    for name in tqdm([n for n in again if n in ZOO], desc="models"):
        model = ZOO[name](None)
        size = len(jax.tree.leaves(model.batch)[0])
        chosen = {way: make for way, make in _peers.ways(model).items() if way in args.ways}
        old = record["models"].get(name, {}).get("ways", {})
        record["models"][name] = {"batch": size, "ways": old | measure(model, chosen, seconds)}
        _timing.write(args.output, record)
    for name in tqdm([n for n in again if n in LARGE], desc="large models"):
        model = LARGE[name]()
        size = len(jax.tree.leaves(model.batch)[0])
        rows = large(model, seconds, args.compile_only)
        record["large"][name] = {"batch": size, "ways": rows}
        _timing.write(args.output, record)
    whole = (
        []
        if args.smoke
        else [n for n in ("MLP", "MNIST CNN", "MNIST CNN, slices") if n not in record["steps"]]
    )
    for name in tqdm(whole, desc="whole steps"):
        record["steps"][name] = whole_steps(name, ZOO[name](None), seconds)
        _timing.write(args.output, record)
    if not record["growth"]:
        record["growth"] = (
            growth([8], [8], seconds) if args.smoke else growth([32, 128, 512], WIDTHS, seconds)
        )
    if not record["microbatches"] and not args.smoke:
        record["microbatches"] = microbatches("encoder", [16, 8, 5], seconds)
    _timing.write(args.output, record)


if __name__ == "__main__":
    main()
