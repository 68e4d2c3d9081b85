"""check_model names layers that mix examples and values that are not finite; sound models pass."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optax_lsdp as lsdp
from tests.cases import slow

BATCH = jax.random.normal(jax.random.key(0), (6, 5)), jnp.arange(6) % 3


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # which Flax needs
        yield


class Linen(nn.Module):
    """A linear layer, and some normalisation after it."""

    norm: type[nn.Module] | None

    @nn.compact
    def __call__(self, x):
        """Return the logits of a batch."""
        x = nn.relu(nn.Dense(4)(x))
        if self.norm is nn.BatchNorm:
            return nn.BatchNorm(use_running_average=False)(x)
        return x if self.norm is None else self.norm()(x)


def linen(norm, reduce=jnp.mean):
    model = Linen(norm)
    variables = jax.jit(model.init)(jax.random.key(1), BATCH[0])
    params = variables.pop("params")

    def loss(params, batch):
        x, y = batch
        logits, _ = model.apply({"params": params, **variables}, x, mutable=["batch_stats"])
        return reduce(optax.softmax_cross_entropy_with_integer_labels(logits, y))

    return loss, params


@pytest.mark.parametrize("reduce", [jnp.mean, lambda losses: losses, *slow(jnp.sum)])
def test_batch_normalisation_is_found_and_named(reduce):
    report = lsdp.check_model(*linen(nn.BatchNorm, reduce), BATCH, batched=True)
    assert not report and "in Linen/BatchNorm_0; replace batch normalisation" in str(report)


@pytest.mark.parametrize(
    ("norm", "reduce"),
    [
        (None, jnp.sum),
        (nn.LayerNorm, lambda losses: losses),
        pytest.param(nn.GroupNorm, jnp.mean, marks=pytest.mark.full),
    ],
    ids=["none", "layer", "group"],
)
def test_normalisation_within_one_example_passes(norm, reduce):
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


def balance(x, w):
    return (jax.nn.softmax(x @ w).mean(axis=0) ** 2).sum()


@pytest.mark.parametrize("weight", [1.0, 1e-5])
def test_an_auxiliary_loss_over_the_batch_is_found(weight):
    def loss(w, x):
        return ((x @ w) ** 2).mean() + weight * balance(x, w)

    w = jax.random.normal(jax.random.key(3), (5, 4))
    report = lsdp.check_model(loss, w, BATCH[0], batched=True)
    assert not report and "depends on other examples, in balance" in str(report)


def test_mixing_of_tokens_and_behind_custom_derivatives_is_found_by_differences():
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


@pytest.mark.parametrize("weight", [0, 10])
def test_a_penalty_on_the_parameters_is_not_mixing(weight):
    def loss(w, x):
        return ((x @ w) ** 2).mean() + weight * (w**2).sum()

    w = jax.random.normal(jax.random.key(3), (5, 4))
    assert lsdp.check_model(loss, w, BATCH[0], batched=True)


def test_a_loss_of_one_example_is_held_to_the_rules_of_the_engine():
    def loss(w, x):
        jax.debug.print("{}", x)
        return jnp.vdot(w, x)

    report = lsdp.check_model(loss, jnp.ones(5), BATCH[0])
    assert not report and "remove jax.debug.print" in str(report)
    report = lsdp.check_model(lambda w, x: w * x, jnp.ones(5), BATCH[0])
    assert not report and "The loss must have shape (), got (5,)" in str(report)


def test_losses_and_gradients_that_are_not_finite_are_reported():
    report = lsdp.check_model(lambda w, x: jnp.log(jnp.vdot(w, 0 * x)), jnp.ones(5), BATCH[0])
    assert not report and "The loss is not finite for 6 of 6" in str(report)

    def steep(params, x):
        return jnp.sqrt(jnp.vdot(params["w"], 0 * x)) + params["b"]

    report = lsdp.check_model(steep, {"w": jnp.ones(5), "b": jnp.ones(())}, BATCH[0])
    assert not report and "The gradient of 'w' is not finite" in str(report)


def test_random_numbers_that_all_examples_share_are_noted():
    def noisy(w, x, key):
        return jnp.vdot(w, x * jax.random.bernoulli(key, 0.5, x.shape))

    def fixed(w, x):
        return noisy(w, x, jax.random.key(0))

    batch = BATCH[0]
    report = lsdp.check_model(fixed, jnp.ones(5), batch)
    assert report and "takes no key: all examples and steps get the same numbers" in str(report)
    with_keys = batch, jax.random.split(jax.random.key(1), len(batch))
    assert "no key" not in str(lsdp.check_model(noisy, jnp.ones(5), batch))
    assert "no key" not in str(lsdp.check_model(lambda w, x: noisy(w, *x), jnp.ones(5), with_keys))


def test_parameters_without_a_gradient_are_reported():
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
def test_mixing_is_found_in_any_part_of_the_loss(mixing):
    report = lsdp.check_model(mixing, jnp.arange(1.0, 6.0), BATCH[0], batched=True)
    assert not report and "depends on other examples" in str(report)


def test_attention_with_biases_is_not_mixing():
    """The gradient of the keys' bias is zero but for the rounding of the other gradients."""
    attention = nn.MultiHeadDotProductAttention(num_heads=2)
    x = jax.random.normal(jax.random.key(5), (6, 4, 8))
    params = jax.jit(attention.init)(jax.random.key(6), x)

    def loss(params, x):
        return (attention.apply(params, x).mean(axis=1) ** 3).mean()

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
def test_an_unusable_loss_is_reported_in_one_sentence(loss, words, batched):
    report = lsdp.check_model(loss, jnp.ones(5), BATCH[0], batched=batched)
    assert not report and words in str(report) and "depends on other examples" not in str(report)


def test_batches_with_different_lengths_are_refused():
    with pytest.raises(ValueError, match="`batch` must hold arrays with leading axes"):
        lsdp.check_model(lambda w, x: jnp.vdot(w, x[0]), jnp.ones(5), (BATCH[0], BATCH[0][:2]))
    with pytest.raises(ValueError, match="`batch` must hold arrays with leading axes"):
        lsdp.check_model(lambda w, x: jnp.vdot(w, x[0]), jnp.ones(5), (BATCH[0], jnp.ones(())))


def test_data_of_users_are_refused_with_a_remedy():
    data = lsdp.training.UserData(np.ones((4, 5)), [1, 1, 2, 3], max_examples=2)
    with pytest.raises(TypeError, match=r"`batch` .*got UserData; .*the `arrays` of a UserData"):
        lsdp.check_model(jnp.vdot, jnp.ones(5), data)
    assert lsdp.check_model(jnp.vdot, jnp.ones(5), data.arrays)


def test_a_batch_of_one_example_is_refused():
    with pytest.raises(ValueError, match="`batch` must hold two examples or more"):
        lsdp.check_model(lambda w, x: (x @ w).mean(), jnp.ones(5), BATCH[0][:1], batched=True)


def test_a_loss_that_closes_over_its_batch_is_reported():
    data = jax.random.normal(jax.random.key(0), (20, 3))
    report = lsdp.check_model(
        lambda w, x: jnp.mean((data @ w) ** 2) + x @ w, jnp.ones(3), data[:10]
    )
    assert any("closes over the examples" in problem for problem in report.problems)
    public = jax.random.normal(jax.random.key(1), (20, 3))
    assert lsdp.check_model(
        lambda w, x: jnp.mean(public @ w) + x @ w, jnp.ones(3), data[:10]
    ).passed


def of_labels(w, example):
    x, label = example
    return optax.softmax_cross_entropy_with_integer_labels(x @ w, label)


value_and_clipped_grad = jax.jit(lsdp.value_and_clipped_grad(of_labels, clip_norm=0.1))


@pytest.mark.parametrize("place", [0, 5, 30, 36])
def test_every_example_is_checked_and_its_effect_on_training_is_reported(place):
    """A label out of range makes the loss NaN, but its finite gradient trains the model."""
    w = np.full((5, 3), 0.2, np.float32)
    x = np.random.default_rng(2).normal(size=(37, 5)).astype(np.float32)
    labels = np.where(np.arange(37) == place, 3, np.arange(37) % 3)
    private, total = value_and_clipped_grad(w, (x[place, None], labels[place, None]))
    assert np.isnan(private.values[0]) and np.linalg.norm(total.value) > 0.099
    report = lsdp.check_model(of_labels, w, (x, labels))
    assert f"is not finite for 1 of 37 examples, first at index {place}: their gr" in str(report)
    assert "finite, and still train the model" in str(report)
    assert "contribute nothing" not in str(report)


def test_a_bad_loss_and_a_bad_gradient_are_reported_separately():
    def loss(w, x):
        bad_loss = jnp.where(x[0] == 1, jnp.nan, 0.0)
        return jnp.vdot(w, x) + bad_loss + jnp.sqrt(jnp.abs(x[0] - 2) * w[0])

    x = jnp.ones((20, 2)).at[:, 0].set(0).at[3, 0].set(1).at[11, 0].set(2)
    problems = lsdp.check_model(loss, jnp.ones(2), x).problems
    assert len(problems) == 2
    assert "The loss is not finite for 1 of 20 examples, first at index 3" in problems[0]
    assert "still train the model" in problems[0]
    assert "not finite for 1 of 20 examples, although the loss is finite: these" in problems[1]
    both = lsdp.check_model(lambda w, x: loss(w, x) * jnp.where(x[0] == 1, w[0], 1), jnp.ones(2), x)
    assert "not finite either, and contribute nothing" in str(both)


def test_a_loss_of_whole_batches_is_checked_on_all_examples():
    x = jnp.ones((19, 5)).at[18].set(0)

    def loss(w, x):
        return jnp.log(x @ w).mean()

    assert lsdp.check_model(loss, jnp.ones(5), x[:18], batched=True)
    report = lsdp.check_model(loss, jnp.ones(5), x, batched=True)
    assert "The loss is not finite for 1 of 3 batches" in str(report)


def test_a_factor_that_starts_at_zero_does_not_hide_a_gradient():
    """In LoRA, B is zero at the start, so A gets its first gradient one step later."""

    def loss(params, example):
        x, label = example
        x = x.astype(params["a"].dtype)
        return of_labels(params["a"] @ params["b"], (x, label)) + 0 * params["idle"].sum()

    params = {
        "a": jax.random.normal(jax.random.key(7), (5, 2)),
        "b": jnp.zeros((2, 3)),
        "idle": jnp.zeros(2),
    }
    report = lsdp.check_model(loss, params, BATCH)
    assert report and report.notes == ("idle gets no gradient from these examples, only noise.",)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    assert lsdp.check_model(loss, half, BATCH).notes == report.notes
