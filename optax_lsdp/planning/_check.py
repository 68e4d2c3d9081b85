"""Checks of a plan's settings: they go in, silence or one sentence comes out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optax_lsdp._checks import check_delta, check_depth, check_non_negative, check_whole
from optax_lsdp.clipping import sensitivity
from optax_lsdp.planning._piecewise import Piecewise

if TYPE_CHECKING:
    from optax_lsdp.planning._plan import PrivacyPlan


def check_settings(plan: PrivacyPlan) -> None:
    """Raise unless each setting makes sense by itself."""
    check_delta("delta", plan.delta)
    check_whole("dataset_size", plan.dataset_size)
    for name in ("expected_batch_size", "max_batch_size"):
        value = getattr(plan, name)
        if value is None and name == "max_batch_size":
            continue
        check_whole(name, value)
        if value > plan.dataset_size:
            raise ValueError(
                f"`{name}` must be at most the dataset's size, {plan.dataset_size}, got {value}."
            )
    if plan.max_batch_size is not None and plan.max_batch_size < plan.expected_batch_size:
        raise ValueError(
            f"`max_batch_size` must be at least the expected batch size, "
            f"{plan.expected_batch_size}, got {plan.max_batch_size}: most batches would be cut."
        )
    if plan.sampling == "full" and plan.expected_batch_size != plan.dataset_size:
        raise ValueError(
            "`expected_batch_size` must be the dataset's size with sampling='full', "
            f"{plan.dataset_size}, got {plan.expected_batch_size}."
        )
    for name in ("clip_norm", "smoothing", "noise_schedule"):
        value = getattr(plan, name)
        is_needed = name == "noise_schedule" and value is not None
        if (callable(value) or is_needed) and not isinstance(value, Piecewise):
            raise TypeError(
                f"`{name}` must be {'' if is_needed else 'a number or '}a Piecewise, got "
                f"{value!r}; Piecewise.sample(schedule, steps) makes one of any schedule."
            )
    try:
        check_depth(plan.clip_norm)
    except ValueError as error:
        raise ValueError(
            "`clip_norm` must be a number or a tree that is not so deep, got a "
            f"{type(plan.clip_norm).__name__}: {error}."
        ) from None
    sensitivity(plan.clip_norm)
    check_non_negative("smoothing", plan.smoothing, schedule=True)
