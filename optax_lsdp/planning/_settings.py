"""Settings of a plan: `Piecewise` schedules, checks, and conversion to and from JSON."""

import itertools
import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lsdp._checks as checks
from optax_lsdp._schemes import CORRELATED, SCHEMES, Sampling
from optax_lsdp._types import ClipNorm, PyTree
from optax_lsdp.accounting import steps_of_epochs
from optax_lsdp.clipping import AdaptiveClip, sensitivity
from optax_lsdp.correlation import Correlation, optimize_banded

if TYPE_CHECKING:
    from optax_lsdp.planning._plan import PrivacyPlan

_VERSION = 1  # of the JSON format
_OMITTED = {
    "unit": "example",
    "correlation": None,
}  # settings that JSON omits if they have these values, because older texts lack these settings
_ADAPTIVE = {field.name for field in fields(AdaptiveClip)}
_CORRELATION = {field.name for field in fields(Correlation)}


@dataclass(frozen=True)
class Piecewise:
    """A schedule of constant pieces: `values[i]` from step `starts[i]` until the next start.

    Values are positive.

    >>> halved = Piecewise(starts=(0, 100), values=(1.0, 0.5))
    >>> float(halved(99)), float(halved(100))
    (1.0, 0.5)
    """

    starts: tuple[int, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        starts, values = tuple(self.starts), tuple(self.values)
        for start, value in itertools.zip_longest(starts, values, fillvalue=1):
            checks.check_whole("starts", start, least=0)
            checks.check_positive("values", value)
        values = tuple(map(float, values))
        if len(starts) != len(values) or starts[:1] != (0,) or list(starts) != sorted(set(starts)):
            raise ValueError(
                "`starts` must begin at 0, increase, and have as many entries as `values`, got "
                f"starts={str(starts)[:200]} and values={str(values)[:200]}."
            )
        object.__setattr__(self, "starts", tuple(map(int, starts)))
        object.__setattr__(self, "values", values)

    @classmethod
    def sample(cls, schedule: optax.Schedule, steps: int, pieces: int = 16) -> Self:
        """Approximate another schedule, such as an Optax schedule, by equally long pieces.

        Each piece has the value of `schedule` at its first step. There are at most `steps` pieces.
        """
        checks.check_whole("steps", steps)
        starts = np.unique(np.linspace(0, steps, pieces, endpoint=False).astype(int))
        return cls(tuple(starts.tolist()), tuple(float(schedule(int(s))) for s in starts))

    def __call__(self, step: jax.typing.ArrayLike) -> jax.Array:
        """Return the value at a step. The step may be traced."""
        piece = jnp.searchsorted(jnp.asarray(self.starts), step, side="right") - 1
        return jnp.asarray(self.values, jnp.float32)[piece]


def check_sizes(
    sampling: Sampling, dataset_size: int, expected_batch_size: int, max_batch_size: int | None
) -> None:
    """Raise unless the sizes are whole numbers that agree with the sampling scheme."""
    checks.check_whole("dataset_size", dataset_size)
    most = expected_batch_size if max_batch_size is None else max_batch_size
    for name, size in (("expected_batch_size", expected_batch_size), ("max_batch_size", most)):
        checks.check_whole(name, size)
        checks.check_at_most(name, size, dataset_size, "the dataset's size")
    if most < expected_batch_size:
        demand = f"at least the expected batch size, {expected_batch_size}"
        remedy = "pass a larger size, or most batches would be truncated"
        raise checks.refusal("max_batch_size", demand, max_batch_size, remedy)
    if SCHEMES[sampling].whole_dataset and expected_batch_size != dataset_size:
        demand = f"the dataset's size, {dataset_size}, with sampling={sampling!r}"
        raise checks.refusal("expected_batch_size", demand, expected_batch_size)


def number_of_steps(
    steps: int | None, epochs: float | None, sampling: Sampling, dataset_size: int, batch_size: int
) -> int:
    """Return the number of steps. Raise unless exactly one of `steps` and `epochs` is None."""
    if epochs is not None and steps is None:
        return steps_of_epochs(
            epochs, dataset_size=dataset_size, batch_size=batch_size, sampling=sampling
        )
    if epochs is not None or steps is None:
        got = f"steps={steps!r} and epochs={epochs!r}"
        raise ValueError(
            f"`steps` or `epochs` must be given, but not both, got {got}; leave out one."
        )
    checks.check_whole("steps", steps)
    checks.check_at_most("steps", steps, checks.MOST_STEPS)
    return steps


def check_schedules(clip_norm: ClipNorm, smoothing: object, noise_schedule: object) -> None:
    """Raise unless the settings are valid. Refuse schedules other than `Piecewise`.

    JSON can save no other schedules.
    """
    remedy = "convert other schedules with Piecewise.sample(schedule, steps)"
    for name, value in (("clip_norm", clip_norm), ("smoothing", smoothing)):
        if callable(value) and not isinstance(value, Piecewise):
            raise TypeError(f"`{name}` must be a number or a Piecewise, got {value!r}; {remedy}.")
    if not isinstance(noise_schedule, Piecewise | None):
        raise TypeError(f"`noise_schedule` must be a Piecewise, got {noise_schedule!r}; {remedy}.")
    try:
        checks.check_depth(clip_norm)
    except ValueError as error:
        got = f"a {type(clip_norm).__name__}: {error}"
        raise ValueError(f"`clip_norm` must be a number or a shallow tree, got {got}.") from None
    sensitivity(clip_norm)
    if isinstance(smoothing, str):
        checks.check_choice("smoothing", smoothing, ("auto",))
    else:
        checks.check_non_negative("smoothing", smoothing, schedule=True)


def check_scheme(sampling: Sampling, correlation: object) -> None:
    """Raise unless `sampling` is a scheme, and one for correlated noise if there is any."""
    checks.check_choice("sampling", sampling, SCHEMES)
    if correlation is not None and not SCHEMES[sampling].correlated:
        demand = f"{' or '.join(map(repr, CORRELATED))} with a correlation"
        remedy = "leave it out: correlated noise has no analysis with other schemes"
        raise checks.refusal("sampling", demand, sampling, remedy)


def default_sampling(correlation: object) -> Sampling:
    """Return the sampling scheme of a plan whose `sampling` is None."""
    if isinstance(correlation, Correlation) and correlation.bands > len(correlation.coefficients):
        return "fixed_order"  # with as many bands as steps, no analysis of amplification applies
    return "poisson" if correlation is None else "cyclic_poisson"


def make_correlation(plan: "PrivacyPlan") -> Correlation | None:
    """Return a plan's correlation. For a number of bands, call `optimize_banded`.

    Raise if the correlation has fewer steps than the plan, or if there is no analysis of correlated
    noise with the plan's other settings.
    """
    wanted, scheme = plan.correlation, SCHEMES[plan.sampling]
    if wanted is None:
        if scheme.correlated:
            demand = f"given with sampling={plan.sampling!r}, which is for correlated noise"
            raise checks.refusal("correlation", demand, None, "pass a number of bands, such as 8")
        return None
    _check_constant(plan)
    if not isinstance(wanted, Correlation):
        if not checks.is_number(wanted):
            demand = "a number of bands, or a Correlation of optax_lsdp.correlation"
            got = f"{type(wanted).__name__}; pass a number such as 8, or call optimize_banded"
            raise TypeError(f"`correlation` must be {demand}, got {got}.")
        checks.check_whole("correlation", wanted)
        checks.check_at_most("correlation", wanted, plan.steps, "the number of steps")
    is_inverse = isinstance(wanted, Correlation) and wanted.is_inverse
    bands = wanted.bands if isinstance(wanted, Correlation) else int(wanted)
    most = plan.dataset_size // plan.expected_batch_size
    if not scheme.once_per_epoch and bands > most:
        demand = (
            f"of at most {most} bands, because the data are divided into one part per band, and "
            "each part must hold a batch"
        )
        remedy = "take smaller batches or fewer bands"
        if is_inverse:
            remedy = "pass sampling='fixed_order' for a banded inverse, which has a band per step"
        raise checks.refusal("correlation", demand, bands, remedy)
    if not isinstance(wanted, Correlation):
        return optimize_banded(plan.steps, bands)
    if wanted.steps < plan.steps:
        demand = f"for at least {plan.steps} steps, the steps of the plan"
        raise checks.refusal("correlation", demand, wanted.steps, "make it for all steps")
    return wanted


def _check_constant(plan: "PrivacyPlan") -> None:
    """Raise if a setting of a plan cannot be combined with correlated noise."""
    remedy = "leave it out, or train with independent noise"
    if plan.smoothing == "auto":
        demand = "a number with a correlation, because 'auto' assumes independent noise"
        raise checks.refusal("smoothing", demand, plan.smoothing)
    for name in ("noise_schedule", "max_batch_size"):
        if (value := getattr(plan, name)) is not None:
            demand = "None with a correlation, because there is no analysis of both together"
            raise checks.refusal(name, demand, value, remedy)
    if not all(map(checks.is_number, jax.tree.leaves(plan.clip_norm))):
        demand = "constant with a correlation, because the noise is proportional to it"
        raise checks.refusal("clip_norm", demand, plan.clip_norm, "pass a number")


def check_slack(correlation: object, slack: int | None) -> None:
    """Raise if a caller passes `slack`, because the plan's optimizer would not expect it."""
    if slack is not None and correlation is not None:
        demand = "None with a correlation, because estimates of norms assume independent noise"
        raise checks.refusal("slack", demand, slack, "leave it out")
    if slack is not None:
        remedy = f"pass clip_norm=AdaptiveClip(1.0, method='fixed', slack={slack}) to the plan"
        raise checks.refusal("slack", "a setting of the plan's clip norm only", slack, remedy)


def warn_of_long_search(plan: "PrivacyPlan") -> None:
    """Warn if an `AdaptiveClip` needs a large share of a plan's steps for its first estimate."""
    norms = [x for x in jax.tree.leaves(plan.clip_norm) if isinstance(x, AdaptiveClip)]
    waits = [
        _steps_to_estimate(plan, norm, len(norms))
        for norm in norms
        if norm.method == "slack" and norm.least < norm.most
    ]
    if waits and 4 * max(waits) > plan.steps:
        warnings.warn(
            f"`clip_norm` needs about {math.ceil(max(waits))} steps for its first estimate, during "
            f"which no parameter changes, got a plan of {plan.steps} steps; take larger batches or "
            "a larger `target`, or fix the clip norm.",
            stacklevel=4,
        )


def _steps_to_estimate(plan: "PrivacyPlan", norm: AdaptiveClip, groups: int) -> float:
    """Return about how many steps a clip norm takes until its first estimate.

    For G groups of parameters, noise multiplier z, expected batch size b and K slack coordinates,
    the estimate of one step has the variance G·(z/b)²·(K/(K − 1))² + 1/b. `AdaptiveClip` averages
    estimates until the standard error is a quarter of the target. If z follows a schedule, this
    function uses the z of the last of these steps.
    """
    batch, factors = plan.expected_batch_size, plan.noise_schedule or Piecewise((0,), (1.0,))
    unit = math.sqrt(groups) * plan.noise_multiplier / batch * norm.slack / (norm.slack - 1)

    def wait(factor: float) -> float:
        error = math.hypot(factor * unit, batch**-0.5) * 4 / norm.target
        return min(error, 1e9) ** 2

    ends = [*factors.starts[1:], math.inf]
    pieces = zip(factors.starts, ends, map(wait, factors.values), strict=True)
    return next(max(steps, start) for start, end, steps in pieces if steps <= end)


def describe_adaptive(clip_norm: ClipNorm) -> str:
    """Return the sentences of a statement about adaptive clip norms, or "" if none is adaptive."""
    norms = [x for x in jax.tree.leaves(clip_norm) if isinstance(x, AdaptiveClip)]
    if not norms:
        return ""
    text = (
        "\n\nThe clip norm C of a step is computed from the noisy sums of earlier steps, so it may "
        "be\nreleased as well."
    )
    if len(norms) > 1:
        text += f" Each of {len(norms)} groups of parameters has its own C, and noise of\n"
        text += f"√{len(norms)} times the stated standard deviation."
    if norms[0].method == "quantile":
        factor = math.sqrt(1 + norms[0].indicator_weight ** 2 / 4)
        text += (
            "\nA noisy count of the clipped gradients is released beside each sum. The noise is "
        )
        text += f"therefore\n{factor:.6g} times as large as stated, at the same ε."
    return text


def check_watch(watch: bool, sampling: Sampling, clip_norm: ClipNorm) -> None:
    """Raise unless `watch` is False, or True for a run whose curve can be estimated."""
    checks.check_bool("watch", watch)
    if not watch:
        return
    norms = jax.tree.leaves(clip_norm)
    if len(norms) > 1 and any(isinstance(norm, AdaptiveClip) for norm in norms):
        raise ValueError(
            "`watch` must be False with an AdaptiveClip for each of several groups, whose noise "
            "differs, got True; use one AdaptiveClip for all leaves."
        )
    if SCHEMES[sampling].correlated:
        raise ValueError(
            "`watch` must be False with correlated noise, got True: the training curve assumes "
            "that the noise of a step is independent of earlier steps."
        )
    if SCHEMES[sampling].once_per_epoch:
        raise ValueError(
            f"`watch` must be False with sampling={sampling!r}, got True: the batches of an epoch "
            "depend on each other, which would bias the training curve."
        )


def write_settings(settings: Mapping[str, object]) -> str:
    """Return settings as JSON text."""
    written = {
        name: _to_json(name, value)
        for name, value in settings.items()
        if name not in _OMITTED or value != _OMITTED[name]
    }
    return json.dumps({"optax_lsdp_plan": _VERSION, **written}, indent=1)


def read_settings(text: str, names: set[str]) -> dict[str, PyTree]:
    """Return the settings that `write_settings` wrote. Raise unless they have these `names`."""
    try:
        found = checks.read_json(text)
        version = found.pop("optax_lsdp_plan")
        found = _OMITTED | found
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        got = f"{str(text)[:40]!r} ({error})"
        raise ValueError(f"`text` must be what to_json returned, got {got}.") from error
    if version != _VERSION or set(found) != names:
        raise ValueError(
            f"`text` must be a plan of version {_VERSION} with the keys {sorted(names)}, got "
            f"version {str(version)[:40]} with {str(sorted(found))[:400]}."
        )
    return {name: _from_json(name, value) for name, value in found.items()}


def _to_json(name: str, value: object) -> object:
    """Return a value for JSON. Types that JSON lacks get a tag, such as {"$tuple": [...]}."""
    if isinstance(value, Piecewise):
        return {"$piecewise": [list(value.starts), list(value.values)]}
    if isinstance(value, Correlation):
        return {"$correlation": asdict(value)}
    if isinstance(value, AdaptiveClip):
        return {"$adaptive": asdict(value)}
    if isinstance(value, tuple):
        return {"$tuple": [_to_json(name, part) for part in value]}
    if isinstance(value, list):
        return [_to_json(name, part) for part in value]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str) or key.startswith("$"):
                raise TypeError(
                    f"`{name}` must have keys that are strings and do not start with $, got "
                    f"{key!r}; rename this key, because plans are saved as JSON."
                )
        return {key: _to_json(name, part) for key, part in value.items()}
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise TypeError(
        f"`{name}` must consist of numbers, dicts, lists and tuples, got {value!r}; convert it to "
        "one of these types, because plans are saved as JSON."
    )


def _read_adaptive(options: dict[str, PyTree]) -> AdaptiveClip:
    return AdaptiveClip(**options)


def _read_correlation(options: dict[str, PyTree]) -> Correlation:
    return Correlation(**options)


def _from_json(name: str, value: PyTree) -> PyTree:
    """Invert `_to_json`."""
    match value:
        case {"$piecewise": [list(starts), list(values)], **rest} if not rest:
            return Piecewise(tuple(starts), tuple(values))
        case {"$adaptive": dict(options), **rest} if not rest and set(options) == _ADAPTIVE:
            return _read_adaptive(options)
        case {"$correlation": dict(options), **rest} if not rest and set(options) == _CORRELATION:
            return _read_correlation(options)
        case {"$tuple": list(parts), **rest} if not rest:
            return tuple(_from_json(name, part) for part in parts)
        case {"$piecewise": _} | {"$tuple": _} | {"$adaptive": _} | {"$correlation": _}:
            raise ValueError(f"`{name}` must be what to_json returned, got {str(value)[:200]}.")
        case dict():
            return {key: _from_json(name, part) for key, part in value.items()}
        case list():
            return [_from_json(name, part) for part in value]
    return value
