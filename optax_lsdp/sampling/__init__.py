"""Sampling: one sampler per sampling scheme, each a function from a step to a batch."""

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
