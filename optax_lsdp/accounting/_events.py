"""Interoperability: runs go in, an event of dp-accounting comes out."""

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optax_lsdp.accounting._mechanism import SampledGaussian


def to_dp_event(runs: "tuple[SampledGaussian, ...]") -> Any:
    """Return the event of runs that follow each other; see `SampledGaussian.to_dp_event`."""
    try:
        import dp_accounting as dp
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "to_dp_event needs dp-accounting; pip install dp-accounting."
        ) from error
    events = [dp.SelfComposedDpEvent(_step(run, dp), run.steps) for run in runs]
    return events[0] if len(events) == 1 else dp.ComposedDpEvent(events)


def _step(run: "SampledGaussian", dp: Any) -> Any:
    """Return the event of one step."""
    if run.sampling == "shuffled":
        raise ValueError(
            "`sampling` must not be 'shuffled' for to_dp_event: dp-accounting has no such event."
        )
    if run.group_size != 1:
        raise ValueError(
            f"`group_size` must be 1 for to_dp_event, got {run.group_size!r}: an event is about "
            "one example."
        )
    event: Any = dp.GaussianDpEvent(run.noise_multiplier)
    if run.max_batch_size is not None:
        event = dp.dp_event.TruncatedSubsampledGaussianDpEvent(
            dataset_size=run.dataset_size,
            sampling_probability=run.sampling_rate,
            truncated_batch_size=run.max_batch_size,
            noise_multiplier=run.noise_multiplier,
        )
    elif run.sampling == "poisson":
        event = dp.PoissonSampledDpEvent(run.sampling_rate, event)
    elif run.sampling == "without_replacement":
        if run.dataset_size is None:
            raise ValueError(
                "`dataset_size` must be given for to_dp_event without replacement, got None."
            )
        size = math.ceil(run.sampling_rate * run.dataset_size * (1 - 1e-12))
        event = dp.SampledWithoutReplacementDpEvent(run.dataset_size, size, event)
    return event
