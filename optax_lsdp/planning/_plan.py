"""PrivacyPlan: sizes, noise and a budget go in; sampler, gradient, optimizer and ε come out."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import cached_property
from numbers import Integral
from typing import Any

import jax
import numpy as np
import optax

from optax_lsdp._checks import is_number
from optax_lsdp._keys import check_key, fold_in_text
from optax_lsdp.accounting import show_epsilon, statement
from optax_lsdp.clipping import value_and_clipped_grad
from optax_lsdp.optimizers import Smoothing, privatize
from optax_lsdp.planning._accounts import mechanism_of, noise_and_epsilon, steps_of
from optax_lsdp.planning._check import check_settings
from optax_lsdp.planning._guards import guarded, with_mask
from optax_lsdp.planning._json import read_plan, write_plan
from optax_lsdp.planning._piecewise import Piecewise
from optax_lsdp.planning._spending import COUNTED_AGAIN, Spending
from optax_lsdp.sampling import (
    FixedSizeSampler,
    FullBatch,
    PoissonSampler,
    Sampler,
    UnamplifiedShuffle,
    room_for_batch,
)

_RESERVED = 0.01  # of δ, for Poisson batches that are cut


@dataclass(frozen=True)
class PrivacyPlan(Spending):
    """One private training run, and all its parts, which agree because they come from here.

    Say how many `steps`, or `epochs`; and either the budget `epsilon`, for which the smallest
    sufficient noise is found, or the `noise_multiplier`, whose ε is computed; or both: what the
    budget has beyond that ε covers steps that an interrupted run counts twice. To change a setting,
    make another plan: `dataclasses.replace` would keep the noise that was found.

    Attributes:
        dataset_size: n, which is public.
        expected_batch_size: b.
        delta: δ, which should be well below 1/n.
        epsilon: ε, the budget.
        steps: how many noisy sums are released.
        epochs: n/b steps each, ⌊n/b⌋ if shuffled; they are turned into `steps`.
        noise_multiplier: z, the noise on the clipped sum in units of its sensitivity.
        noise_schedule: factors by which z is multiplied from some steps on; the accountant
            composes them.
        clip_norm: C, as in `clip_per_example`: a number, a prefix tree, or a `Piecewise`.
        smoothing: σ of the Laplacian smoothing, a number or a `Piecewise`.
        sampling: "poisson", "without_replacement", "full", or "shuffled", for which no
            amplification is claimed: as in `accounting.SampledGaussian`.
        neighbouring: what differs between datasets that are to be confused, as there.
        group_size: how many examples one person contributes.
        max_batch_size: a Poisson batch that would be larger is cut, and the accountant analyses
            that. By default there is so much `room` that a cut batch is covered by a hundredth
            of δ, which is set aside for it.

    >>> plan = PrivacyPlan(
    ...     dataset_size=60_000, expected_batch_size=256, epochs=15, epsilon=3.0, delta=1e-5
    ... )
    >>> plan.steps, round(plan.noise_multiplier, 3)
    (3516, 0.728)
    >>> PrivacyPlan.from_json(plan.to_json()) == plan
    True
    """

    _: KW_ONLY
    dataset_size: int
    expected_batch_size: int
    delta: float
    epsilon: float = None  # type: ignore[assignment]  # None is filled in below
    steps: int = None  # type: ignore[assignment]  # None is filled in below
    epochs: float | None = None
    noise_multiplier: float = None  # type: ignore[assignment]  # None is filled in below
    noise_schedule: Piecewise | None = None
    clip_norm: Any = 1.0
    smoothing: float | Piecewise = 0.0
    sampling: Any = "poisson"
    neighbouring: Any = None
    group_size: int = 1
    max_batch_size: int | None = None
    digest: str = field(init=False, repr=False, compare=False)  # a hash of all settings

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if getattr(value, "shape", None) == () and not isinstance(value, jax.core.Tracer):
                self._set(name, value.item())  # an array of one number, of NumPy or JAX
        check_settings(self)
        self._set("clip_norm", jax.tree.map(lambda norm: norm, self.clip_norm))  # not the caller's
        if self.delta * self.dataset_size >= 1:
            warnings.warn(
                f"`delta` should be far below 1/n = {1 / self.dataset_size:.2g}, got "
                f"{self.delta:g}: a mechanism that publishes one example outright has δ = 1/n.",
                stacklevel=3,
            )
        self._set("steps", steps_of(self))
        self._set("epochs", None)
        for name, value in vars(self).items():  # plain numbers, whatever kind they came as
            if is_number(value):
                self._set(name, int(value) if isinstance(value, Integral) else float(value))
        unit = mechanism_of(self, 1.0)  # raises if sampling and relation do not go together
        self._set("neighbouring", unit.phases[0].neighbouring)
        noise_multiplier, epsilon = noise_and_epsilon(self)
        self._set("noise_multiplier", noise_multiplier)
        self._set("epsilon", epsilon)
        self._set("digest", self._hash())  # raises if the plan cannot be written

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def delta_of_noise(self) -> float:
        """What the accountant is given of δ: all but the share that covers batches that are cut."""
        reserves = self.sampling == "poisson" and self.max_batch_size is None
        return self.delta * (1 - _RESERVED) if reserves else self.delta

    @cached_property
    def room(self) -> int:
        """How many examples a batch has room for.

        A mechanism that deviates with probability P in a step costs (1 + e^ε)·T·P of δ at most,
        where T is twice what is planned, as steps may have to be counted twice.
        """
        if self.sampling != "poisson":
            return self.dataset_size if self.sampling == "full" else self.expected_batch_size
        if self.max_batch_size is not None:
            return self.max_batch_size
        deviations = COUNTED_AGAIN * self.steps
        log_rare = math.log(_RESERVED * self.delta / deviations) - np.logaddexp(0, self.epsilon)
        rare = math.exp(max(log_rare, -690.0))
        return room_for_batch(
            self.dataset_size, self.expected_batch_size, rare, group_size=self.group_size
        )

    def sampler(self, key: jax.Array, *, multiple_of: int = 1) -> Sampler:
        """Return the sampler that the accountant counts on; see `optax_lsdp.sampling`."""
        size, batch = self.dataset_size, self.expected_batch_size
        if self.sampling == "full":
            return FullBatch(size, multiple_of=multiple_of)
        key = self.derive_key(key, "sampling")
        if self.sampling == "poisson":
            rate = batch / size
            return PoissonSampler(
                size, rate, key, max_batch_size=self.room, multiple_of=multiple_of
            )
        kind = UnamplifiedShuffle if self.sampling == "shuffled" else FixedSizeSampler
        return kind(size, batch, key, multiple_of=multiple_of)

    def clipped_grad(self, loss_fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Return `clipped_grad(loss_fn, clip_norm=…, **options)` with the plan's clip norm.

        Poisson batches are padded: the mask of `sampler.batch(step)` must be given with them.
        """
        value_and_grad = self.value_and_clipped_grad(loss_fn, **options)

        def grad(params: Any, batch: Any, mask: Any = None, **step: Any) -> Any:
            return value_and_grad(params, batch, mask, **step)[1]

        return grad

    def value_and_clipped_grad(
        self, loss_fn: Callable[..., Any], **options: Any
    ) -> Callable[..., Any]:
        """Return `value_and_clipped_grad(loss_fn, clip_norm=…, **options)`, likewise."""
        _check_options(options)
        self._check_unchanged()
        grad = value_and_clipped_grad(loss_fn, clip_norm=self.clip_norm, **options)
        return with_mask(grad, self.sampling, self.room)

    def optimizer(
        self,
        optimizer: optax.GradientTransformation,
        key: jax.Array,
        *,
        smoothing: Smoothing | None = None,
    ) -> optax.GradientTransformationExtraArgs:
        """Return `privatize(optimizer, …)` with the plan's noise; smoothing may be a transform.

        It takes the sums of the plan's gradients, or of others with a mask, but no stacked
        gradients, in which padding would count; and it takes the plan's `steps`: what follows
        raises, or moves no parameter inside of `jit`. The key may be the one that `sampler` has:
        each derives its own.
        """
        noise: Any = self.noise_multiplier
        if self.noise_schedule is not None:
            values = [self.noise_multiplier * value for value in self.noise_schedule.values]
            noise = Piecewise(self.noise_schedule.starts, tuple(values))
        private = privatize(
            optimizer,
            clip_norm=self.clip_norm,
            noise_multiplier=noise,
            expected_batch_size=self.expected_batch_size,
            smoothing=self.smoothing if smoothing is None else smoothing,
            key=self.derive_key(key, "noise"),
        )
        return guarded(private, self.steps)

    def derive_key(self, key: jax.Array, label: str) -> jax.Array:
        """Return a key for one purpose in one plan: no two plans or purposes share randomness."""
        check_key("key", key)
        self._check_unchanged()
        return fold_in_text(fold_in_text(key, self.digest), label)

    def statement(self) -> str:
        """Return in plain words what is protected, from whom, and what was assumed.

        >>> plan = PrivacyPlan(
        ...     dataset_size=1000,
        ...     expected_batch_size=1000,
        ...     steps=50,
        ...     epsilon=1.0,
        ...     delta=1e-4,
        ...     sampling="full",
        ... )
        >>> print(plan.statement().splitlines()[0])
        ε = 1.0000 at δ = 0.0001.
        """
        text = statement(self.mechanism, self.delta, reserved=self.delta - self.delta_of_noise)
        if self.epsilon > 1.001 * self.mechanism.epsilon(self.delta_of_noise):
            text += (
                f"\n\nThe budget is ε = {show_epsilon(self.epsilon)}: a run that is interrupted "
                "and goes on with\nanything changed may have to count steps twice, up to that."
            )
        if self.delta_of_noise < self.delta:
            text += (
                f"\n\nBatches have room for {self.room:,} examples. Of a larger one that many are "
                f"kept\nat random, for which {_RESERVED:.0%} of δ is set aside."
            )
        return text

    def _hash(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def _check_unchanged(self) -> None:
        """Raise if someone has written into a dict of clip norms: ε is that of the first ones."""
        if self._hash() != self.digest:
            raise ValueError(
                f"`clip_norm` must be as it was when the plan was made, got {self.clip_norm!r}; "
                "make another plan."
            )

    def to_json(self) -> str:
        """Return the plan as text; it holds no key."""
        return write_plan({name: getattr(self, name) for name in _settings()})

    @classmethod
    def from_json(cls, text: str) -> PrivacyPlan:
        """Return the plan that `to_json` wrote; its ε is computed again, and not believed."""
        return cls(**read_plan(text, set(_settings())))


def _settings() -> list[str]:
    """Return the names of what is given to a plan."""
    return [field.name for field in fields(PrivacyPlan) if field.init]


def _check_options(options: dict[str, Any]) -> None:
    if "clip_norm" in options:
        raise TypeError(
            f"`clip_norm` must be left to the plan, which has it, got {options['clip_norm']!r}; "
            "give it to PrivacyPlan."
        )
