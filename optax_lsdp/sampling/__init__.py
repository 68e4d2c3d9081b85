"""Sampling: a dataset's size, a rate and a step go in, indices and a mask come out."""

from optax_lsdp.sampling._samplers import (
    FixedSizeSampler,
    FullBatchSampler,
    PoissonSampler,
    Sampler,
    ShuffledSampler,
    room_for_batch,
)
from optax_lsdp.sampling._subsets import Batch

__all__ = [
    "Batch",
    "FixedSizeSampler",
    "FullBatchSampler",
    "PoissonSampler",
    "Sampler",
    "ShuffledSampler",
    "room_for_batch",
]
