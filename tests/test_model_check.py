"""check_model: layers that mix examples are named, and whatever is well passes."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import optax_lsdp as lsdp

BATCH = jax.random.normal(jax.random.key(0), (6, 5)), jnp.arange(6) % 3


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # which Flax needs
        yield


class Linen(nn.Module):
    """Two layers with some normalisation between them."""

    norm: type[nn.Module] | None

    @nn.compact
    def __call__(self, x):
        """Return the logits of a batch."""
        x = nn.Dense(8)(x)
        if self.norm is nn.BatchNorm:
            x = nn.BatchNorm(use_running_average=False)(x)
        elif self.norm is not None:
            x = self.norm()(x)
        return nn.Dense(3)(nn.relu(x))


def linen(norm, reduce=jnp.mean):
    model = Linen(norm)
    variables = model.init(jax.random.key(1), BATCH[0])
    params = variables.pop("params")

    def loss(params, batch):
        x, y = batch
        logits, _ = model.apply({"params": params, **variables}, x, mutable=["batch_stats"])
        return reduce(optax.softmax_cross_entropy_with_integer_labels(logits, y))

    return loss, params


@pytest.mark.parametrize("reduce", [jnp.mean, jnp.sum, lambda losses: losses])
def test_batch_normalisation_is_named(reduce):
    report = lsdp.check_model(*linen(nn.BatchNorm, reduce), BATCH, batched=True)
    assert not report and "in Linen/BatchNorm_0; replace batch normalisation" in str(report)


@pytest.mark.parametrize(
    ("norm", "reduce"),
    [(None, jnp.sum), (nn.LayerNorm, jnp.mean), (nn.GroupNorm, lambda losses: losses)],
    ids=["none", "layer", "group"],
)
def test_what_normalises_within_an_example_passes(norm, reduce):
    if norm is nn.GroupNorm:
        norm = functools.partial(nn.GroupNorm, num_groups=2)
    report = lsdp.check_model(*linen(norm, reduce), BATCH, batched=True)
    assert report, str(report)


def test_an_nnx_layer_is_named_by_its_class():
    model = nnx.BatchNorm(5, rngs=nnx.Rngs(0))
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, batch):
        merged = nnx.merge(graph, params, jax.tree.map(jnp.array, rest))
        return (merged(batch) ** 3).mean()

    report = lsdp.check_model(jax.jit(loss), params, BATCH[0], batched=True)
    assert not report and "in BatchNorm (normalization.py:" in str(report)


@pytest.mark.parametrize("weight", [1.0, 1e-5])
def test_an_auxiliary_loss_over_the_batch_is_found(weight):
    def balance(x, w):
        return (jax.nn.softmax(x @ w).mean(axis=0) ** 2).sum()

    def loss(w, x):
        return ((x @ w) ** 2).mean() + weight * balance(x, w)

    w = jax.random.normal(jax.random.key(3), (5, 4))
    report = lsdp.check_model(loss, w, BATCH[0], batched=True)
    assert not report and "depends on other examples, in balance" in str(report).replace(
        "test_an_auxiliary_loss_over_the_batch_is_found.<locals>.", ""
    )
    assert lsdp.check_model(lambda w, x: ((x @ w) ** 2).mean(), w, BATCH[0], batched=True)


def test_tokens_and_functions_of_their_own_derivative_are_compared_by_differences():
    @jax.custom_vjp
    def identity(x):
        return x

    identity.defvjp(lambda x: (x, None), lambda _, g: (g,))
    table = jax.random.normal(jax.random.key(4), (7, 3))
    tokens = jnp.arange(12).reshape(4, 3) % 7

    def loss(table, tokens):
        embedded = identity(table[tokens].mean(axis=1))
        return ((embedded - embedded.mean(axis=0)) ** 2).mean()

    assert not lsdp.check_model(loss, table, tokens, batched=True)
    assert not lsdp.check_model(
        lambda w, x: identity(x @ w - (x @ w).mean()).std(), jnp.ones(5), BATCH[0], batched=True
    )
    assert lsdp.check_model(lambda t, k: (identity(t[k]) ** 2).mean(), table, tokens, batched=True)


def test_a_penalty_of_the_parameters_is_no_mixing():
    def loss(w, x):
        return ((x @ w) ** 2).mean() + 10 * (w**2).sum()

    assert lsdp.check_model(loss, jnp.ones(5), BATCH[0], batched=True)


def test_the_loss_of_one_example_is_checked_as_the_engine_does():
    def loss(w, x):
        jax.debug.print("{}", x)
        return jnp.vdot(w, x)

    report = lsdp.check_model(loss, jnp.ones(5), BATCH[0])
    assert not report and "remove jax.debug.print" in str(report)
    report = lsdp.check_model(lambda w, x: w * x, jnp.ones(5), BATCH[0])
    assert not report and "The loss must have shape (), got (5,)" in str(report)


def test_what_is_not_finite_is_told():
    report = lsdp.check_model(lambda w, x: jnp.log(jnp.vdot(w, 0 * x)), jnp.ones(5), BATCH[0])
    assert not report and "The loss is not finite for 6 of 6" in str(report)

    def steep(params, x):
        return jnp.sqrt(jnp.vdot(params["w"], 0 * x)) + params["b"]

    report = lsdp.check_model(steep, {"w": jnp.ones(5), "b": jnp.ones(())}, BATCH[0])
    assert not report and "The gradient of 'w' is not finite" in str(report)


def test_parameters_without_a_gradient_are_told():
    def loss(params, x):
        return jnp.vdot(params["used"], x) + jax.lax.stop_gradient(params["held"]).sum()

    report = lsdp.check_model(loss, {"used": jnp.ones(5), "held": jnp.ones(2)}, BATCH[0])
    assert report and str(report).startswith("fit for private training, but:\n- ")
    assert "held gets no gradient from these examples" in str(report)
    report = lsdp.check_model(lambda w, x: jnp.round(jnp.vdot(w, x)), jnp.ones(5), BATCH[0])
    assert not report and "No parameter gets a gradient" in str(report)


@pytest.mark.parametrize(
    "mixing",
    [
        lambda w, x: (((0.5 * x + 0.5 * x[::-1]) @ w) ** 2).mean(),
        lambda w, x: ((x[:3] @ w) * (x[3:] @ w)).mean(),
        lambda w, x: ((x / jnp.abs(x).max() @ w) ** 2).mean(),
        lambda w, x: (x / jnp.abs(x).max() @ w) ** 2,
        lambda w, x: jax.lax.top_k((x @ w) ** 2, 2)[0].mean(),
    ],
    ids=["mixup", "contrast", "largest entry", "largest entry, all losses", "hard examples"],
)
def test_mixing_is_found_wherever_it_is(mixing):
    report = lsdp.check_model(mixing, jnp.arange(1.0, 6.0), BATCH[0], batched=True)
    assert not report and "depends on other examples" in str(report)


def test_attention_with_biases_is_no_mixing():
    """The gradient of the keys' bias is zero but for rounding, which is that of the others."""

    class Attention(nn.Module):
        """A layer of attention, and a linear one."""

        @nn.compact
        def __call__(self, x):
            """Return the logits of a batch."""
            return nn.Dense(3)(nn.MultiHeadDotProductAttention(num_heads=2)(x).mean(axis=1))

    x = jax.random.normal(jax.random.key(5), (6, 4, 8))
    params = Attention().init(jax.random.key(6), x)

    def loss(params, x):
        return (Attention().apply(params, x) ** 3).mean()

    report = lsdp.check_model(loss, params, x, batched=True)
    assert report, str(report)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda w, x: ((x @ w).sum(), x), "The loss must be one array, got tuple; return no aux"),
        (lambda w, x: jnp.int32((x @ w).sum()), "must be a real number, got int32"),
        (
            lambda w, x: jax.lax.while_loop(
                lambda v: v.sum() < 3.0, lambda v: v + 1, (x @ w)
            ).sum(),
            "The loss cannot be differentiated",
        ),
        (lambda w, x: jnp.log(0 * (x @ w)).sum(), "The loss is not finite"),
    ],
    ids=["aux", "integer", "while", "infinite"],
)
@pytest.mark.parametrize("batched", [False, True])
def test_a_loss_of_no_use_is_told_in_a_sentence(loss, words, batched):
    report = lsdp.check_model(loss, jnp.ones(5), BATCH[0], batched=batched)
    assert not report and words in str(report) and "depends on other examples" not in str(report)


def test_odd_batches_are_refused():
    with pytest.raises(ValueError, match="`batch` must hold arrays with leading axes"):
        lsdp.check_model(lambda w, x: jnp.vdot(w, x[0]), jnp.ones(5), (BATCH[0], BATCH[0][:2]))
    with pytest.raises(ValueError, match="`batch` must hold arrays with leading axes"):
        lsdp.check_model(lambda w, x: jnp.vdot(w, x[0]), jnp.ones(5), (BATCH[0], jnp.ones(())))


def test_too_few_examples_are_refused():
    with pytest.raises(ValueError, match="`batch` must hold two examples or more"):
        lsdp.check_model(lambda w, x: (x @ w).mean(), jnp.ones(5), BATCH[0][:1], batched=True)


def test_a_loss_that_closes_over_its_batch_is_told():
    data = jax.random.normal(jax.random.key(0), (20, 3))
    report = lsdp.check_model(
        lambda w, x: jnp.mean((data @ w) ** 2) + x @ w, jnp.ones(3), data[:10]
    )
    assert any("closes over the examples" in problem for problem in report.problems)
    public = jax.random.normal(jax.random.key(1), (20, 3))
    assert lsdp.check_model(
        lambda w, x: jnp.mean(public @ w) + x @ w, jnp.ones(3), data[:10]
    ).passed
