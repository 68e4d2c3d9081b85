"""Batches: a step goes in, its examples come out, in chunks and on the devices that need them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lsdp._checks import check_whole
from optax_lsdp._keys import is_key
from optax_lsdp.planning import PrivacyPlan
from optax_lsdp.training._data import Examples, update_digest
from optax_lsdp.training._step import Chunk


class Read(NamedTuple):
    """A chunk of a batch, whether it is the last one, and a hash of what this process has read."""

    chunk: Chunk
    is_last: bool
    digest: str


class Batches:
    """What the sampler of a plan chooses, read by each process for its own devices."""

    def __init__(
        self,
        plan: PrivacyPlan,
        examples: Examples,
        key: jax.Array,
        microbatch_size: int | None,
        mesh: jax.sharding.Mesh | None,
        hashed: bool = False,
    ) -> None:
        self.hashed = hashed
        devices = 1 if mesh is None else mesh.size
        if microbatch_size is None:
            microbatch_size = -(-plan.room // devices) * devices
        check_whole("microbatch_size", microbatch_size)
        if microbatch_size % devices:
            raise ValueError(
                f"`microbatch_size` must be a multiple of the {devices} devices, got "
                f"{microbatch_size}."
            )
        self.sampler = plan.sampler(key, multiple_of=microbatch_size)
        self.key = plan.derive_key(key, "examples")
        self.examples, self.size, self.steps = examples, microbatch_size, plan.steps
        self.count = self.sampler.size // microbatch_size
        self.rows: Any = None
        self.everywhere: Any = None
        if mesh is not None:
            self.rows = jax.sharding.NamedSharding(mesh, jax.P(mesh.axis_names))
            self.everywhere = jax.sharding.NamedSharding(mesh, jax.P())

    def stream(self, start: int) -> Iterator[Read]:
        """Read one chunk after the other, from the batch of a step to that of the last one."""
        for step in range(start, self.steps):
            indices, mask = self.sampler.batch(step)
            digest = hashlib.blake2b(digest_size=16) if self.hashed else None
            last = self._last_place(mask)
            for place in range(last + 1):
                part = slice(place * self.size, (place + 1) * self.size)
                chunk = self._chunk(step, place, indices[part], mask[part], digest)
                yield Read(chunk, place == last, digest.hexdigest() if digest else "")

    def _last_place(self, mask: np.ndarray) -> int:
        """Return the last chunk with an example in it, of two at least if there are several."""
        filled = -(-int(mask.sum()) // self.size)  # examples come first, padding after them
        return max(filled, min(2, self.count)) - 1  # the step expects sums of others then

    def _chunk(self, step: int, place: int, indices: Any, mask: Any, digest: Any) -> Chunk:
        key = jax.random.fold_in(jax.random.fold_in(self.key, step), place)
        number = np.int32(step)
        if self.rows is None:
            found = self.examples.take(indices, mask)
            if digest:
                update_digest(digest, (indices, mask, found))
            return Chunk(jax.tree.map(jnp.asarray, found), jnp.asarray(mask), key, number)
        parts = {}
        for where in self.rows.addressable_devices_indices_map((self.size,)).values():
            start, stop, _ = where[0].indices(self.size)
            if start not in parts:
                parts[start] = self.examples.take(indices[start:stop], mask[start:stop])
                if digest:
                    update_digest(digest, (indices[start:stop], mask[start:stop], parts[start]))

        def spread(select: Any, like: np.ndarray) -> jax.Array:
            held = jax.dtypes.canonicalize_dtype(like.dtype)  # without a word, as jnp.asarray does

            def shard(where: Any) -> np.ndarray:
                return select(where[0].indices(self.size)[0]).astype(held, copy=False)

            return jax.make_array_from_callback(
                (self.size, *like.shape), self.rows, shard, dtype=held
            )

        leaves, structure = jax.tree.flatten(self.examples.first)
        arrays = [
            spread(lambda start, i=i: jax.tree.leaves(parts[start])[i], leaf)
            for i, leaf in enumerate(leaves)
        ]
        each = self.size // math.prod(self.rows.mesh.shape.values())
        masks = spread(lambda start: mask[start : start + each], np.zeros((), bool))
        key = replicate(key, self.everywhere)
        return Chunk(jax.tree.unflatten(structure, arrays), masks, key, number)

    def like(self) -> Chunk:
        """Return a chunk's shapes, with a key and a number in their places."""

        def row(x: np.ndarray) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(
                (self.size, *x.shape), jnp.asarray(x).dtype, sharding=self.rows
            )

        key = replicate(self.key, self.everywhere)
        first = jax.tree.map(row, self.examples.first)
        return Chunk(first, row(np.zeros((), bool)), key, np.int32(0))


def replicate(x: jax.Array, everywhere: Any) -> jax.Array:
    """Put the same array on all devices, those of other processes included."""
    if everywhere is None:
        return x
    if is_key(x):
        data = replicate(jax.random.key_data(x), everywhere)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    known = np.asarray(x)
    return jax.make_array_from_callback(known.shape, everywhere, lambda where: known[where])


def abstract(tree: Any, on_mesh: bool) -> Any:
    """Return shapes without numbers, and where they lie if that is on a mesh."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=getattr(x, "sharding", None) if on_mesh else None
        ),
        tree,
    )
