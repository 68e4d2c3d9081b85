"""Samplers, one for each sampling scheme. A sampler returns the batch of any step."""

from optax_lsdp.sampling._samplers import (
    Batch,
    FixedSizeSampler,
    FullBatchSampler,
    PoissonSampler,
    Sampler,
    ShuffledSampler,
    room_for_batch,
)

__all__ = [
    "Batch",
    "FixedSizeSampler",
    "FullBatchSampler",
    "PoissonSampler",
    "Sampler",
    "ShuffledSampler",
    "room_for_batch",
]
