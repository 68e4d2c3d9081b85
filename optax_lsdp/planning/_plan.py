"""PrivacyPlan: the settings of a private training run, and the parts that are made from them."""

import hashlib
import itertools
import math
import warnings
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from functools import cached_property
from numbers import Integral
from typing import Any, Literal, Self, cast, get_args

import jax
import numpy as np
import optax

import optax_lsdp.planning._budget as budget
import optax_lsdp.planning._settings as settings
import optax_lsdp.sampling as samplers
from optax_lsdp._checks import check_at_most, check_choice, check_delta, check_whole, is_number
from optax_lsdp._keys import check_key, fold_in_text
from optax_lsdp._schemes import SCHEMES, Neighbouring, Sampling, Unit
from optax_lsdp._types import ClipNorm, PyTree
from optax_lsdp.accounting import Composition, Ledger, show_epsilon, statement
from optax_lsdp.clipping import PerExample, value_and_clipped_grad
from optax_lsdp.correlation import Correlation
from optax_lsdp.optimizers import Smoothing, privatize
from optax_lsdp.planning._budget import noise_and_epsilon, with_noise
from optax_lsdp.planning._guards import limit_steps, require_mask
from optax_lsdp.planning._settings import Piecewise
from optax_lsdp.sampling import Sampler, room_for_batch

_RESERVED = 0.01  # the share of δ that covers truncated Poisson batches


@dataclass(frozen=True)
class PrivacyPlan:
    """The settings of a private training run, with a matching sampler, gradient and optimizer.

    Pass `steps` or `epochs`. Pass `epsilon`, and the plan computes the smallest noise multiplier
    within this budget. Or pass `noise_multiplier`, and the plan computes ε. If you pass both, the
    planned steps may spend less than the budget. The rest pays for steps that a restarted run
    repeats.

    To change a setting, make a new plan. `dataclasses.replace` would keep the noise multiplier that
    was computed for the old setting.

    Attributes:
        dataset_size: n, the number of examples, which is public.
        expected_batch_size: b, the expected number of examples in a batch.
        delta: δ, which should be well below 1/n.
        epsilon: ε, the budget.
        steps: T, the number of steps. Each step releases one noisy sum.
        epochs: the number of passes over the data, which the plan converts to `steps`; see
            `accounting.steps_of_epochs`.
        noise_multiplier: z, the standard deviation of the noise on the clipped sum, divided by the
            sum's sensitivity.
        noise_schedule: a `Piecewise` of factors that multiply z. ε takes the schedule into account.
        clip_norm: C, as a number, an `AdaptiveClip`, a prefix tree of either, or a `Piecewise`; see
            `clip_per_example`.
        smoothing: σ of the Laplacian smoothing, as a number or a `Piecewise`, or "auto"; see
            `auto_smooth`.
        correlation: how noise is correlated between steps: a number of bands, such as 8, for which
            the plan calls `correlation.optimize_banded`, or a `Correlation` of at least T steps, or
            None for independent noise.
        sampling: the sampling scheme: "poisson", "without_replacement", "full" or "shuffled"; see
            `accounting.SampledGaussian`. With a correlation: "cyclic_poisson" or "fixed_order"; see
            `accounting.CorrelatedGaussian`. The default is "poisson", or "cyclic_poisson" with a
            correlation, or "fixed_order" if only the inverse of the correlation is banded.
        neighbouring: the neighbouring relation: "add_remove", "replace_one" or "zero_out"; see
            `accounting.SampledGaussian`. The default is "add_remove", if the scheme allows it.
        group_size: the largest number of examples that one person contributes or, with
            unit="user", of user ids that one person has.
        unit: the unit of privacy. With "user", `dataset_size` and batch sizes count users, and a
            user may have any number of examples; see `training.UserData`.
        max_batch_size: the size to which larger Poisson batches are truncated. None means `room`,
            which batches exceed so rarely that a hundredth of δ covers the truncation.

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
    epsilon: float = None  # type: ignore[assignment]  # __post_init__ replaces None
    steps: int = None  # type: ignore[assignment]  # __post_init__ replaces None
    epochs: float | None = None
    noise_multiplier: float = None  # type: ignore[assignment]  # __post_init__ replaces None
    noise_schedule: Piecewise | None = None
    clip_norm: ClipNorm = 1.0
    smoothing: float | Piecewise | Literal["auto"] = 0.0
    correlation: Correlation | int | None = None  # __post_init__ replaces a number of bands
    sampling: Sampling = None  # type: ignore[assignment]  # __post_init__ replaces None
    neighbouring: Neighbouring = None  # type: ignore[assignment]  # __post_init__ replaces None
    group_size: int = 1
    unit: Unit = "example"
    max_batch_size: int | None = None
    digest: str = field(init=False, repr=False, compare=False)  # a hash of all settings

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if getattr(value, "shape", None) == () and not isinstance(value, jax.core.Tracer):
                self._set(name, value.item())  # a NumPy or JAX scalar
        check_delta("delta", self.delta)
        check_choice("unit", self.unit, get_args(Unit))
        sizes = self.dataset_size, self.expected_batch_size
        if self.sampling is None:
            self._set("sampling", settings.default_sampling(self.correlation))
        settings.check_scheme(self.sampling, self.correlation)
        settings.check_sizes(self.sampling, *sizes, self.max_batch_size)
        settings.check_schedules(self.clip_norm, self.smoothing, self.noise_schedule)
        self._set("clip_norm", jax.tree.map(lambda norm: norm, self.clip_norm))  # a copy
        if self.delta * self.dataset_size >= 1:
            warnings.warn(
                f"`delta` should be far below 1/n = {1 / self.dataset_size:.2g}, got "
                f"{self.delta:g}; a mechanism that publishes one {self.unit} outright has δ = 1/n.",
                stacklevel=3,
            )
        self._set("steps", settings.number_of_steps(self.steps, self.epochs, self.sampling, *sizes))
        self._set("epochs", None)
        self._set("correlation", settings.make_correlation(self))
        for name, value in vars(self).items():  # convert subclasses of int and float
            if is_number(value):
                self._set(name, int(value) if isinstance(value, Integral) else float(value))
        self._set("neighbouring", self._unit.phases[0].neighbouring)
        known = {"epsilon": self.epsilon, "noise_multiplier": self.noise_multiplier}
        noise_multiplier, epsilon = noise_and_epsilon(self._unit, self.delta_of_noise, **known)
        self._set("noise_multiplier", noise_multiplier)
        self._set("epsilon", epsilon)
        settings.warn_of_long_search(self)
        self._set("digest", self._hash())  # raises if the settings cannot be saved as JSON

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @cached_property
    def _unit(self) -> Composition:
        """Return the planned steps for z = 1; see `planned_steps`."""
        return budget.planned_steps(self)

    @property
    def delta_of_noise(self) -> float:
        """Return the δ for the noise alone. The rest of δ covers truncated Poisson batches."""
        reserves = SCHEMES[self.sampling].random_size and self.max_batch_size is None
        return self.delta * (1 - _RESERVED) if reserves else self.delta

    @cached_property
    def room(self) -> int:
        """Return the size to which larger batches are truncated.

        If a step truncates its batch with probability P, the truncations in T steps cost at most
        (1 + e^ε)·T·P of δ. Here T is twice the number of planned steps, because restarts repeat
        steps.
        """
        if not SCHEMES[self.sampling].random_size:
            return self.expected_batch_size
        if self.max_batch_size is not None:
            return self.max_batch_size
        most_steps = budget.RECORDED_AT_MOST * self.steps
        log_rare = math.log(_RESERVED * self.delta / most_steps) - np.logaddexp(0, self.epsilon)
        if self.correlation is not None:  # `CyclicPoissonSampler` truncates batches twice
            log_rare -= math.log(2)
        rare = math.exp(max(log_rare, -690.0))  # at least about 1e-300, close to the smallest float
        return room_for_batch(
            self.dataset_size, self.expected_batch_size, rare, group_size=self.group_size
        )

    def sampler(self, key: jax.Array, *, multiple_of: int = 1) -> Sampler:
        """Return the sampler of the plan's sampling scheme; see `optax_lsdp.sampling`."""
        scheme, size = SCHEMES[self.sampling], self.dataset_size
        make: Callable[..., Sampler] = getattr(samplers, scheme.sampler)
        if scheme.whole_dataset:
            return make(size, multiple_of=multiple_of)
        key = self.derive_key(key, "sampling")
        options: dict[str, object] = {"multiple_of": multiple_of}
        if scheme.random_size:
            rate, options["max_batch_size"] = self.expected_batch_size / size, self.room
            if self.correlation is not None:
                options |= {
                    "cycle": cast(Correlation, self.correlation).bands,
                    "group_size": self.group_size,
                }
            return make(size, rate, key=key, **options)
        if self.correlation is not None:
            options["reshuffle"] = False
        return make(size, self.expected_batch_size, key, **options)

    def clipped_grad(
        self, loss_fn: Callable[..., PyTree], **options: Any
    ) -> Callable[..., optax.Updates]:
        """Return `optax_lsdp.clipped_grad(loss_fn, …)` with the plan's clip norm and `options`.

        Poisson batches are padded, so pass the mask of `sampler.batch(step)` to the returned
        function.
        """
        function = self.value_and_clipped_grad(loss_fn, **options)
        return lambda params, batch, mask=None, **step: function(params, batch, mask, **step)[1]

    def value_and_clipped_grad(
        self, loss_fn: Callable[..., PyTree], **options: Any
    ) -> Callable[..., tuple[PerExample, optax.Updates]]:
        """Return `optax_lsdp.value_and_clipped_grad(loss_fn, …)`; see `clipped_grad`."""
        if "clip_norm" in options:
            got = f"{options['clip_norm']!r}; pass it to PrivacyPlan instead"
            raise TypeError(f"`clip_norm` must be a setting of the plan only, got {got}.")
        settings.check_slack(self.correlation, options.get("slack"))
        self._check_unchanged()
        grad = value_and_clipped_grad(loss_fn, clip_norm=self.clip_norm, **options)
        return require_mask(grad, self.sampling, self.room)

    def optimizer(
        self,
        optimizer: optax.GradientTransformation,
        key: jax.Array,
        *,
        smoothing: Smoothing | None = None,
        shard_specs: PyTree = None,
        replicated_axes: str | Sequence[str] = (),
        watch: bool = False,
    ) -> optax.GradientTransformationExtraArgs:
        """Return `privatize(optimizer, …)` with the plan's noise, clip norm and batch size.

        The returned optimizer accepts only clipped sums that were computed with a mask. After the
        planned steps, `update` raises a ValueError. Inside `jit`, where it cannot raise, it returns
        zero updates and leaves its state unchanged.

        Args:
            optimizer: an ordinary Optax optimizer.
            key: one typed key. You can pass the same key to `sampler`, because both methods derive
                their own keys from it.
            smoothing: σ, "auto" or a `laplacian_smooth(...)` transform; replaces the plan's σ.
            shard_specs: see `privatize`.
            replicated_axes: see `privatize`.
            watch: whether to record a training curve for `training_curve(state)`; see `watch`. It
                costs no privacy, but memory for a copy of the parameters. It is refused with
                "shuffled" batches and with a correlation.
        """
        settings.check_watch(watch, self.sampling, self.clip_norm)
        noise: optax.ScalarOrSchedule = self.noise_multiplier
        if self.noise_schedule is not None:
            values = tuple(self.noise_multiplier * value for value in self.noise_schedule.values)
            noise = Piecewise(self.noise_schedule.starts, values)
        private = privatize(
            optimizer,
            clip_norm=self.clip_norm,
            noise_multiplier=noise,
            expected_batch_size=self.expected_batch_size,
            smoothing=self.smoothing if smoothing is None else smoothing,
            correlation=cast(Correlation | None, self.correlation),
            key=self.derive_key(key, "noise"),
            shard_specs=shard_specs,
            replicated_axes=replicated_axes,
            watch_steps=self.steps if watch else None,
            sampling_rate=budget.watched_rate(self),
        )
        return limit_steps(private, self.steps, self.sampling)

    def derive_key(self, key: jax.Array, label: str) -> jax.Array:
        """Return the key for one purpose. Different plans and labels give independent keys."""
        check_key("key", key)
        self._check_unchanged()
        return fold_in_text(fold_in_text(key, self.digest), label)

    @cached_property
    def mechanism(self) -> Composition:
        """Return all planned steps as one mechanism for the accountant."""
        return with_noise(self._unit, self.noise_multiplier)

    def event(self, step: int) -> budget.Phase:
        """Return the planned step with number `step`, for `Ledger.append`."""
        check_whole("step", step, least=0)
        check_at_most("step", step, self.steps - 1, "the last planned step")
        ends, events = self._events
        return events[bisect_right(ends, step)]

    @cached_property
    def _events(self) -> tuple[list[int], list[budget.Phase]]:
        """Return the number of the first step after each phase, and one step of each phase."""
        phases = self.mechanism.phases
        ends = list(itertools.accumulate(phase.steps for phase in phases))
        return ends, [replace(phase, steps=1) for phase in phases]

    def epsilon_after(self, steps: int) -> float:
        """Return an upper bound on ε after the first `steps` planned steps."""
        check_whole("steps", steps, least=0)
        check_at_most("steps", steps, self.steps, "the number of planned steps")
        return float(self._epsilons[steps - 1]) if steps else 0.0

    @cached_property
    def _epsilons(self) -> np.ndarray:
        """Return ε after each planned step of a run that repeats no step."""
        return np.minimum(Ledger(self.mechanism.phases).epsilons(self.delta_of_noise), self.epsilon)

    def spent(self, ledger: Ledger) -> float:
        """Return the ε of all steps in the ledger."""
        if budget.follows_plan(ledger, self.mechanism):
            return self.epsilon_after(ledger.steps)
        return ledger.epsilon(self.delta_of_noise)

    def allows(self, ledger: Ledger, step: int, *, continues: bool | None = None) -> bool:
        """Return whether the budget covers the steps in the ledger and the planned step `step`.

        `continues` says whether the step continues the noise and the order of the ledger's last
        step; see `Ledger.append`. None means True if the ledger has each planned step before `step`
        exactly once, and False otherwise.
        """
        if step >= self.steps:
            return False
        if budget.is_next(self, ledger, step, continues):
            return True
        if budget.steps_left(self, ledger, continues) <= 0:
            return False
        whole = budget.extended(ledger, [self.event(step)], continues)
        return whole.epsilon(self.delta_of_noise) <= self.epsilon

    def epsilons(self, ledger: Ledger, step: int, *, continues: bool | None = None) -> np.ndarray:
        """Return ε after each planned step from `step` on, if these follow the ledger's steps.

        For `continues`, see `allows`.
        """
        if budget.is_next(self, ledger, step, continues):
            return self._epsilons[step:]
        whole = budget.extended(ledger, budget.phases_from(self.mechanism, step), continues)
        return whole.epsilons(self.delta_of_noise)[ledger.steps :]

    def remaining_steps(
        self, ledger: Ledger, step: int | None = None, *, continues: bool | None = None
    ) -> int:
        """Return how many planned steps the budget still covers, starting at the next step.

        By default, the next step is `ledger.steps`, which is right for a run that has repeated no
        step. For `continues`, see `allows`.
        """
        budget.check_ledger(ledger)
        step = ledger.steps if step is None else step
        check_whole("step", step, least=0)
        is_next = budget.is_next(self, ledger, step, continues)
        most = min(self.steps - step, budget.steps_left(self, ledger, continues))
        if most <= 0 or is_next:
            return max(most, 0)
        return budget.affordable(self, ledger, step, continues, most)

    def statement(self) -> str:
        """Return in plain words what is protected, from whom, and under which assumptions.

        >>> plan = PrivacyPlan(
        ...     dataset_size=1000, expected_batch_size=50, steps=100, epsilon=1.0, delta=1e-4
        ... )
        >>> print(plan.statement().splitlines()[0])
        ε = 1.0000 at δ = 0.0001.
        """
        reserved = self.delta - self.delta_of_noise
        text = statement(self.mechanism, self.delta, reserved=reserved, unit=self.unit)
        text += settings.describe_adaptive(self.clip_norm)
        if self.epsilon > 1.001 * self.mechanism.epsilon(self.delta_of_noise):
            text += (
                f"\n\nThe budget is ε = {show_epsilon(self.epsilon)}. A run that restarts with "
                "other settings may have to\ncount some steps twice; all steps together stay "
                "within the budget."
            )
        if self.delta_of_noise < self.delta:
            text += (
                f"\n\nBatches have room for {self.room:,} {self.unit}s. Of a larger batch, a "
                "random subset of this\nsize is kept. "
                f"{_RESERVED:.0%} of δ is reserved for this case."
            )
        return text

    def _hash(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def _check_unchanged(self) -> None:
        """Raise if the tree of clip norms was changed after the plan was made."""
        if self._hash() != self.digest:
            raise ValueError(
                f"`clip_norm` must not change after the plan was made, got {self.clip_norm!r}; "
                "make a new plan with this clip norm."
            )

    def to_json(self) -> str:
        """Return the settings as JSON text, without random keys."""
        return settings.write_settings({name: getattr(self, name) for name in _setting_names()})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the plan that `to_json` wrote. Raise if the plan's steps exceed the plan's ε."""
        return cls(**settings.read_settings(text, set(_setting_names())))


def _setting_names() -> list[str]:
    return [field.name for field in fields(PrivacyPlan) if field.init]
