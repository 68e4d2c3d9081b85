"""Interoperability: a run goes in, an event of dp-accounting comes out."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optax_lsdp.accounting._mechanism import SampledGaussian


def to_dp_event(run: "SampledGaussian") -> Any:
    """Return the event of a run; see `SampledGaussian.to_dp_event`."""
    try:
        import dp_accounting as dp
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "to_dp_event needs dp-accounting; pip install dp-accounting."
        ) from error
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
        size = round(run.sampling_rate * run.dataset_size)
        event = dp.SampledWithoutReplacementDpEvent(run.dataset_size, size, event)
    return dp.SelfComposedDpEvent(event, run.steps)
