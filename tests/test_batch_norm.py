"""Batch normalisation of any library is reported with a remedy; frozen statistics are accepted."""

import functools
import warnings

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import optax_lsdp as lsdp
from optax_lsdp import training

X = jax.random.normal(jax.random.key(0), (6, 3, 4))
PLAN = lsdp.PrivacyPlan(
    dataset_size=6, expected_batch_size=2, steps=1, noise_multiplier=1.0, delta=1e-2
)


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # which the libraries need
        yield


class Net(nnx.Module):
    """A linear layer and batch normalisation, in NNX."""

    def __init__(self, frozen):
        self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(4, use_running_average=frozen, rngs=nnx.Rngs(0))

    def __call__(self, x):
        """Apply both layers."""
        return self.norm(self.linear(x))


@functools.cache
def nnx_model(frozen, copy=True):
    graph, params, rest = nnx.split(Net(frozen), nnx.Param, ...)

    def loss(params, x):
        return (nnx.merge(graph, params, rest, copy=copy)(x) ** 3).mean()

    return loss, params


class LinenNet(nn.Module):
    """A linear layer and batch normalisation, in Linen."""

    frozen: bool

    @nn.compact
    def __call__(self, x):
        """Apply both layers."""
        return nn.BatchNorm(use_running_average=self.frozen)(nn.Dense(4)(x))


@functools.cache
def linen_variables():
    return jax.jit(LinenNet(True).init)(jax.random.key(1), X[0])


def linen_model(frozen, mutable=("batch_stats",)):
    model = LinenNet(frozen)
    variables = dict(linen_variables())
    params = variables.pop("params")

    def loss(params, x):
        found = model.apply({"params": params, **variables}, x, mutable=mutable)
        return ((found[0] if mutable else found) ** 3).mean()

    return loss, params


@functools.cache
def haiku_model(frozen):
    def forward(x, trains):
        return hk.BatchNorm(True, True, 0.9)(hk.Linear(4)(x), is_training=trains)

    init, apply = hk.transform_with_state(forward)
    params, state = jax.jit(init, static_argnums=2)(jax.random.key(1), X[0], True)
    return lambda p, x: (apply(p, state, None, x, not frozen)[0] ** 3).mean(), params


@functools.cache
def equinox_model(frozen):
    model, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, "batch", mode="batch")
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, x):
        layer = eqx.nn.inference_mode(eqx.combine(params, static), frozen)
        return (layer(x[0], state)[0] ** 3).mean()

    return loss, params


class BatchNorm:
    """A layer that belongs to no library."""

    def __init__(self, frozen):
        self.frozen = frozen

    def __call__(self, w, x):
        """Normalise x."""
        mean, variance = (0.0, 1.0) if self.frozen else (x.mean(axis=0), x.var(axis=0))
        return w * (x - mean) / jnp.sqrt(variance + 1e-5)


def own_model(frozen):
    layer = jax.jit(BatchNorm(frozen))
    return lambda w, x: (layer(w, x) ** 3).mean(), jnp.ones(4)


MODELS = {
    "nnx": nnx_model,
    "linen": linen_model,
    "haiku": haiku_model,
    "equinox": equinox_model,
    "own": own_model,
}
USES = {
    "check_model": lambda loss, params: lsdp.check_model(loss, params, X),
    "fit": lambda loss, params: training.fit(
        PLAN, loss, params, X, optimizer=optax.sgd(0.1), progress=False
    ),
    "clipped_grad": lambda loss, params: jax.eval_shape(
        lsdp.clipped_grad(loss, clip_norm=1.0), params, X
    ),
    "vmap": lambda loss, params: jax.eval_shape(
        lsdp.clipped_grad(loss, clip_norm=1.0, engine="vmap"), params, X
    ),
    "explain_clipping": lambda loss, params: lsdp.explain_clipping(loss, params, X[0]),
}
WORDS = (
    "not use batch normalisation, which needs the statistics of a batch, got BatchNorm",
    "replace it by GroupNorm or LayerNorm",
)


PLACES = {"linen": "BatchNorm (LinenNet/BatchNorm_0)", "nnx": "BatchNorm (test_batch_norm.py:"}


def message_of(use, loss, params):
    """Return the report, the error or the warnings of a use, as text."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = use(loss, params)
        except ValueError as error:
            return str(error)
    warned = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
    return "\n".join(
        [*warned, str(found) if isinstance(found, lsdp.model_check.ModelReport) else ""]
    )


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("model", MODELS)
def test_batch_normalisation_is_reported_with_its_place_and_remedy(model, use):
    message = message_of(USES[use], *MODELS[model](False))
    assert all(words in message for words in WORDS), message
    assert PLACES.get(model, "BatchNorm") in message


@pytest.mark.parametrize("model", MODELS)
def test_frozen_statistics_are_accepted(model):
    loss, params = MODELS[model](True)
    report = lsdp.check_model(loss, params, X)
    assert report and not report.notes, str(report)
    assert message_of(USES["clipped_grad"], loss, params) == ""


@pytest.mark.parametrize(
    "model", [lambda: nnx_model(False, copy=False), lambda: linen_model(False, mutable=())]
)
def test_a_layer_whose_statistics_cannot_be_written_is_reported(model):
    """Flax itself raises an error if statistics cannot be written."""
    message = message_of(USES["check_model"], *model())
    assert all(words in message for words in WORDS), message


def test_a_cached_trace_is_not_attributed_to_another_layer():
    """JAX traces a jitted function once, so its equations record the first caller only."""

    @jax.jit
    def mean(x):
        return x.mean(axis=0)

    class BatchNorm:
        def __call__(self, x):
            return x - mean(x)

    layer = BatchNorm()
    jax.make_jaxpr(layer)(X[0])
    assert lsdp.check_model(lambda w, x: (w * (x - mean(x)) ** 2).mean(), jnp.ones(4), X)
    assert not lsdp.check_model(lambda w, x: (w * layer(x) ** 2).mean(), jnp.ones(4), X)


def nnx_state(model):
    return nnx.split(model, ...)[1]


STATEFUL = {
    "an NNX module": (lambda: Net(False), "got BatchStat at 'norm/mean'.*nnx.split"),
    "an NNX state": (lambda: nnx_state(Net(False)), "got BatchStat at 'norm/mean'.*nnx.split"),
    "Linen variables": (
        linen_variables,
        r"got 'batch_stats'.*variables\['params'\]",
    ),
    "variables of several models": (
        lambda: {"first": linen_variables()},
        r"got 'batch_stats'.*variables\['params'\]",
    ),
    "an Equinox state": (
        lambda: eqx.filter(eqx.nn.BatchNorm(4, "batch", mode="ema"), eqx.is_inexact_array),
        "got StateIndex at .*make_with_state",
    ),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_running_statistics_among_the_parameters_are_refused(name):
    """Running statistics have no gradient, and would receive noise."""
    make, message = STATEFUL[name]
    params = make()
    for use in ("fit", "clipped_grad", "explain_clipping"):
        with pytest.raises(ValueError, match=message):
            USES[use](lambda params, x: 0.0, params)
    with pytest.raises(ValueError, match=message):
        raise ValueError(str(USES["check_model"](lambda params, x: 0.0, params)))


def test_other_errors_in_a_layer_are_not_blamed_on_its_statistics():
    with pytest.raises((TypeError, ValueError), match="shapes") as caught:
        lsdp.clipped_grad(lambda w, x: BatchNorm(True)(w, x).sum(), clip_norm=1.0)(jnp.ones(3), X)
    assert "batch normalisation" not in str(caught.value)
