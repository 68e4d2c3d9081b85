"""Sampling: a dataset's size, a rate and a step go in, indices and a mask come out."""

from optax_lsdp.sampling._samplers import (
    FixedSizeSampler,
    FullBatch,
    PoissonSampler,
    Sampler,
    UnamplifiedShuffle,
    room_for_batch,
)
from optax_lsdp.sampling._subsets import Batch

__all__ = [
    "Batch",
    "FixedSizeSampler",
    "FullBatch",
    "PoissonSampler",
    "Sampler",
    "UnamplifiedShuffle",
    "room_for_batch",
]
