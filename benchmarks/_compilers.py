"""Compile a model's gradient for an accelerator that is not there, and read what the compiler says.

libtpu and XLA:GPU compile for a device from its description. They need no device. Where the machine
has one, the same function measures instead.
"""

import os
import re
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from jax.stages import Compiled

from benchmarks import _hlo
from benchmarks._peers import WAYS
from benchmarks.larger import LARGER, LargerModel
from benchmarks.zoo import ZOO

PRICED = "priced by the compiler, not measured"
MEASURED = "measured on the device"
MODELS = [*ZOO, *LARGER]

# What XLA:GPU asks a device for: NVIDIA's data sheet, in XLA's words.
A100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 167936 threads_per_core_limit: 2048 core_count: 108 fpus_per_core: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 1555000000000 l2_cache_size: 41943040 clock_rate_ghz: 1.41
  device_memory_size: 42331013120 shared_memory_per_block_optin: 166912
  cuda_compute_capability { major: 8 } registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 1 }
device_description_str: "NVIDIA A100-SXM4-40GB"
"""


class Target(NamedTuple):
    """A kind of accelerator.

    Attributes:
        device: its name.
        files: patterns of the files that exist where the machine has such a device.
        environment: variables that a process needs to compile without the device.
        describe: returns the description of devices that are not there.
        price: a compiled program's text → what the compiler says about time.
    """

    device: str
    files: tuple[str, ...]
    environment: Mapping[str, str]
    describe: Callable[[], Any]
    price: Callable[[str], dict[str, int]]

    @property
    def is_here(self) -> bool:
        """Return whether the machine has such a device."""
        return any(any(Path("/dev").glob(pattern)) for pattern in self.files)

    def prepare(self) -> None:
        """Let this process and its children compile without the device, if there is none."""
        if not self.is_here:
            os.environ.update(self.environment)
            jax.config.update("jax_platforms", "cpu")  # JAX has read the variable already


def tpu_topology(shape: str = "2x2") -> Any:
    """Return the description of v5e chips in a grid."""
    return topologies.get_topology_desc(topology_name=f"v5e:{shape}", platform="tpu")


def _a100() -> Any:
    return topologies.get_topology_desc("A100", "cuda", target_config=A100, topology="1x1x1")


def _gpu_price(text: str) -> dict[str, int]:
    moved = _hlo.traffic(text)
    return {"bytes_moved": moved.bytes, "kernels": moved.kernels, **_hlo.loops(text)}


TARGETS = {
    "tpu": Target(
        "TPU v5e",
        ("accel[0-9]*", "vfio/[0-9]*"),
        {
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "JAX_PLATFORMS": "cpu",
            "TPU_ACCELERATOR_TYPE": "v5litepod-4",
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_WORKER_ID": "0",
        },
        tpu_topology,
        lambda text: {"cycles": _hlo.cycles(text)} | _hlo.loops(text) | _hlo.unpriced(text),
    ),
    "gpu": Target(
        "NVIDIA A100",
        ("nvidia[0-9]*",),
        {
            "JAX_PLATFORMS": "cpu",
            # Without a device nothing can be tuned; without tuning some Triton products fail.
            "XLA_FLAGS": "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false",
        },
        _a100,
        _gpu_price,
    ),
}


def larger_model(name: str, batch_size: int | None) -> LargerModel:
    """Return a model of either collection; those of the zoo have nothing frozen."""
    if name in LARGER:
        return LARGER[name](batch_size)
    model = ZOO[name](batch_size)
    return LargerModel(lambda p, frozen, x: model.loss(p, x), model.params, {}, model.batch)


def batch_size_of(name: str) -> int:
    """Return a model's usual batch size."""
    return int(jax.tree.leaves(larger_model(name, None).batch)[0].shape[0])


class Outcome(NamedTuple):
    """A compiled gradient, its arguments, and the seconds that it took.

    The processor's seconds are those of tracing and compiling, over all threads. Other work on the
    machine changes them less than it changes the others.
    """

    compiled: Compiled
    arguments: Any
    trace_seconds: float
    compile_seconds: float
    processor_seconds: float


def build(target: Target, model_name: str, way: str, batch_size: int | None = None) -> Outcome:
    """Compile the gradient of a model, by one way, for the target's device."""
    model = larger_model(model_name, batch_size)

    def gradient(params: Any, frozen: Any, batch: Any) -> Any:
        return WAYS[way](model.with_frozen(frozen))(params, batch)

    device = jax.devices()[0] if target.is_here else target.describe().devices[0]
    sharding = SingleDeviceSharding(device)
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tuple(model[1:])
    )
    start = time.perf_counter(), time.process_time()
    lowered = jax.jit(gradient).lower(*arguments)
    middle = time.perf_counter()
    compiled = lowered.compile()
    end = time.perf_counter(), time.process_time()
    return Outcome(compiled, arguments, middle - start[0], end[0] - middle, end[1] - start[1])


def build_update(
    target: Target,
    tx: optax.GradientTransformation,
    shape: tuple[int, ...],
    donated: tuple[int, ...] = (),
) -> Compiled:
    """Compile an update for the target's device. Its arguments are a float32 leaf and the state."""
    sharding = SingleDeviceSharding(target.describe().devices[0])
    leaf = jax.ShapeDtypeStruct(shape, jnp.float32)
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        (leaf, jax.eval_shape(tx.init, leaf)),
    )
    return jax.jit(tx.update, donate_argnums=donated).lower(*arguments).compile()


def row(target: Target, model_name: str, way: str, batch_size: int | None = None) -> dict[str, Any]:
    """Return what the compiler says of a gradient, or measurements where there is a device."""
    outcome = build(target, model_name, way, batch_size)
    memory = outcome.compiled.memory_analysis()
    found: dict[str, Any] = {
        "how": MEASURED if target.is_here else PRICED,
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "trace_seconds": round(outcome.trace_seconds, 2),
        "compile_seconds": round(outcome.compile_seconds, 2),
        "processor_seconds": round(outcome.processor_seconds, 2),
    }
    if target.is_here:
        return found | {"milliseconds": _median(outcome)}
    return found | target.price(outcome.compiled.as_text())


def _median(outcome: Outcome, rounds: int = 20) -> float:
    """Return the median time of a call in milliseconds."""
    key = jax.random.key(0)

    def fill(x: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(x.dtype, jnp.floating):
            return 0.02 * jax.random.normal(key, x.shape, x.dtype)
        return jnp.zeros(x.shape, x.dtype)

    arguments = jax.tree.map(fill, outcome.arguments)
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        jax.block_until_ready(outcome.compiled(*arguments))
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def in_short(error: BaseException, length: int = 300) -> str:
    """Return the type and the beginning of a message, without paths of this machine."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {re.sub(r'/[^ ]*/', '', text)}"[:length]
