"""What many TPU chips exchange in one step: read from compiled programs, which nobody ran.

The step is that of `training.fit`: clip, add noise, smooth, update. It is compiled for the
GPT-2-like model and 1, 4, 16 and 64 chips of TPU v5e. All chips together take the same batch. There
are three layouts. "Data-parallel" replicates the parameters and splits the batch. "Fully sharded"
splits both and gathers the parameters before they are used. In "fully sharded by XLA" nothing is
gathered explicitly: XLA chooses, as it does in `fit` if parameters are split and the model has no
sharding constraints. The record has every kind of collective with its bytes, and the memory of each
chip: priced by the compiler, not measured.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

import optax_lsdp as lsdp
from benchmarks import _compilers, _hlo, _timing
from benchmarks._processes import in_process
from benchmarks._results import RESULTS
from benchmarks.larger import LARGER, LargerModel

MODEL, EXAMPLES = "GPT-2, bfloat16", 64
GRIDS = {1: "2x2", 4: "2x2", 16: "4x4", 64: "8x8"}  # one chip is the first of four
LAYOUTS = ("data-parallel", "fully sharded", "fully sharded by XLA")
WAYS = ("non-private", "bookkeeping")


def make_step(
    model: LargerModel, way: str, used: NamedSharding | None
) -> tuple[Any, optax.GradientTransformation]:
    """Return `step(params, state, batch, mask)` and its optimizer.

    The step returns the new parameters, the new state and the mean loss, as that of `fit` does.
    `used` is the sharding of parameters where the model uses them, or None if XLA chooses.
    """
    loss = model.with_frozen(model.frozen).loss
    if way == "non-private":
        tx = optax.sgd(0.1)

        def gradient(params: Any, batch: Any, mask: jax.Array) -> Any:
            del mask
            return jax.value_and_grad(lambda p: jax.vmap(loss, (None, 0))(p, batch).mean())(params)
    else:
        plan = lsdp.PrivacyPlan(
            dataset_size=10**6,
            expected_batch_size=EXAMPLES,
            steps=1_000,
            epsilon=8.0,
            delta=1e-7,
            smoothing=1.0,
        )
        tx = plan.optimizer(optax.sgd(0.1), key=jax.random.key(0))
        clipped = plan.value_and_clipped_grad(loss)

        def gradient(params: Any, batch: Any, mask: jax.Array) -> Any:
            per_example, total = clipped(params, batch, mask)
            return per_example.values.sum() / EXAMPLES, total

    def step(params: Any, state: Any, batch: Any, mask: jax.Array) -> Any:
        gathered = jax.lax.with_sharding_constraint(params, used) if used else params
        value, total = gradient(gathered, batch, mask)
        updates, state = tx.update(total, state, params)
        return optax.apply_updates(params, updates), state, value

    return step, tx


def split(shape: tuple[int, ...], chips: int) -> PartitionSpec:
    """Return how a parameter is fully sharded: by its longest axis that all chips divide.

    >>> split((50_257, 768), 4)
    PartitionSpec(None, 'chips')
    """
    axes = [axis for axis, length in enumerate(shape) if length % chips == 0]
    if not axes:
        return PartitionSpec()
    longest = max(axes, key=lambda axis: shape[axis])
    return PartitionSpec(*[None] * longest, "chips")


def row(chips: int, layout: str, way: str) -> dict[str, Any]:
    """Return the collectives and the memory of one compiled step.

    The process has as many devices as the mesh, and `fit` sets the mesh: both decide what the
    library does.
    """
    jax.config.update("jax_num_cpu_devices", chips)
    devices = _compilers.tpu_topology(GRIDS[chips]).devices[:chips]
    mesh = Mesh(np.array(devices), ("chips",))
    model = LARGER[MODEL](EXAMPLES)
    replicated = NamedSharding(mesh, PartitionSpec())
    used = None if layout == "fully sharded by XLA" else replicated
    step, tx = make_step(model, way, used)

    def place(x: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    def place_parameter(x: Any) -> jax.ShapeDtypeStruct:
        is_split = layout != "data-parallel"
        return place(x, split(x.shape, chips) if is_split else PartitionSpec())

    params = jax.tree.map(place_parameter, model.params)
    state = jax.eval_shape(tx.init, model.params)
    state = jax.tree.map(lambda x: place(x, PartitionSpec()), state)
    mask = jax.ShapeDtypeStruct((EXAMPLES,), bool)
    batch, mask = jax.tree.map(lambda x: place(x, PartitionSpec("chips")), (model.batch, mask))
    outputs = *jax.tree.map(lambda x: x.sharding, (params, state)), replicated
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=outputs)
    with jax.set_mesh(mesh):
        compiled = jitted.lower(params, state, batch, mask).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    found = {kind: part._asdict() for kind, part in _hlo.collectives(text).items()}
    return {
        "how": _compilers.PRICED,
        "collectives": found,
        "largest_bytes": max((part["largest"] for part in found.values()), default=0),
        "parameter_bytes": 4 * sum(math.prod(x.shape) for x in jax.tree.leaves(model.params)),
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "cycles": _hlo.cycles(text),
    }


def main() -> None:
    """Compile every step that has no record yet; `--ways` names those to compile anew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=RESULTS / "chips.json")
    parser.add_argument("--ways", nargs="*", choices=WAYS, help="to be compiled anew")
    parser.add_argument("--chips", nargs="*", type=int, choices=list(GRIDS), default=list(GRIDS))
    parser.add_argument("--missing", action="store_true", help="of these, only what is missing")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    _compilers.TARGETS["tpu"].prepare()
    if args.one:
        chips, layout, way = args.one
        try:
            found = row(int(chips), layout, way)
        except Exception as error:  # what does not fit is a result too
            found = {"error": _compilers.in_short(error)}
        sys.stdout.write(json.dumps(found) + "\n")
        return
    only_missing = args.missing or args.ways is None
    cases = [
        (way, layout, chips)
        for way in args.ways or WAYS
        for chips in args.chips
        for layout in (LAYOUTS if chips > 1 else LAYOUTS[:1])
    ]
    for way, layout, chips in tqdm(cases, desc="chips"):
        record = _timing.load_record(args.output)
        rows = record.setdefault("steps", {}).setdefault(way, {}).setdefault(layout, {})
        if only_missing and str(chips) in rows:
            continue
        words = ["--one", str(chips), layout, way]
        rows[str(chips)] = in_process("benchmarks.chips", words)
        record.pop("circumstances", None)
        _timing.write(args.output, record | {"model": MODEL, "examples": EXAMPLES})


if __name__ == "__main__":
    main()
