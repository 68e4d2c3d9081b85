"""Agreement between the processes of a run, and the placement of arrays on their devices.

All processes of a run must make the same decisions. So the functions here exchange values.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from optax_lsdp._keys import fresh_key, is_key


class Placement:
    """Where the arrays of a run are placed: on one device, or on all devices of a mesh."""

    def __init__(self, mesh: Mesh | None) -> None:
        self.mesh = mesh
        self.devices = 1 if mesh is None else mesh.size
        # `split` shards batches over the mesh. `replicated` is for arrays that all devices hold.
        self.split = None if mesh is None else NamedSharding(mesh, jax.P(mesh.axis_names))
        self.replicated = None if mesh is None else NamedSharding(mesh, jax.P())

    def replicate(self, x: jax.Array) -> jax.Array:
        """Put an array on all devices, including those of other processes."""
        if self.replicated is None:
            return x
        if is_key(x):
            data = self.replicate(jax.random.key_data(x))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        values = np.asarray(x)
        return jax.make_array_from_callback(values.shape, self.replicated, values.__getitem__)

    def keep_or_replicate(self, x: jax.Array) -> jax.Array:
        """Return an array that is already on the mesh unchanged. Replicate any other array."""
        return x if getattr(x.sharding, "mesh", None) == self.mesh else self.replicate(x)


def broadcast_text(text: str) -> str:
    """Return the first process's `text` in all processes."""
    sent = np.frombuffer(text.encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(sent))))
    buffer = sent if jax.process_index() == 0 else np.zeros(size, np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(buffer))).decode()


def gather_text(text: str) -> str:
    """Join the texts of all processes. All texts must have the same length."""
    sent = np.frombuffer(text.encode(), np.uint8)
    return bytes(np.asarray(multihost_utils.process_allgather(sent)).ravel()).decode()


def broadcast_fresh_key() -> jax.Array:
    """Return a fresh key, the same in every process."""
    data = multihost_utils.broadcast_one_to_all(np.asarray(jax.random.key_data(fresh_key())))
    return jax.random.wrap_key_data(jnp.asarray(np.asarray(data)))


def any_process(flag: bool) -> bool:
    """Return whether `flag` is true in any process."""
    return bool(np.any(multihost_utils.process_allgather(np.array(flag))))


@contextmanager
def raise_everywhere() -> Iterator[None]:
    """Raise in all processes if the body of the `with` statement raises in one process."""
    error = None
    try:
        yield
    except Exception as found:
        error = found
    if any_process(error is not None):
        raise error or RuntimeError(
            "another process has failed; read the error in the output of that process."
        )
