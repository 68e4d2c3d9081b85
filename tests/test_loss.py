"""All functions accept the same losses, and explain each likely mistake in one sentence."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optax_lsdp as lsdp
from optax_lsdp import training
from optax_lsdp._loss import takes_key
from tests.cases import slow

X, Y = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32), np.arange(6) % 3
BATCH = (jnp.asarray(X), jnp.asarray(Y))
W = {"w": jnp.ones((4, 3))}
PLAN = lsdp.PrivacyPlan(
    dataset_size=6, expected_batch_size=2, steps=1, noise_multiplier=1.0, delta=1e-2
)
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # which Flax needs
        yield


def by_fit(loss, params, batch):
    return training.fit(PLAN, loss, params, batch, optimizer=optax.sgd(0.1), progress=False)


def by_clipped_grad(loss, params, batch):
    return jax.eval_shape(lsdp.clipped_grad(loss, clip_norm=1.0), params, batch)


def by_quantized(loss, params, batch):
    return jax.eval_shape(lsdp.discrete.quantized_grad(loss, clip_norm=1.0), params, batch)


def by_explain(loss, params, batch):
    return lsdp.explain_clipping(loss, params, jax.tree.map(lambda x: x[0], batch))


def by_check(loss, params, batch):
    """Raise the first problem of the report, so that all functions fail alike."""
    report = lsdp.check_model(loss, params, batch)
    if not report:
        raise ValueError(report.problems[0])
    return report


USES = {
    "fit": by_fit,
    "clipped_grad": by_clipped_grad,
    "quantized_grad": by_quantized,
    "explain_clipping": by_explain,
    "check_model": by_check,
}


def loss(params, example):
    x, y = example
    return cross_entropy(x @ params["w"], y)


def keyed(params, example, key):
    x, y = example
    kept = jax.random.bernoulli(key, 0.5, x.shape)
    return cross_entropy((x * kept) @ params["w"], y)


def by_name(params, example, *, key):
    return keyed(params, example, key)


def by_default(params, example, key=None):
    return keyed(params, example, key)


def by_place(params, example, rng):
    return keyed(params, example, rng)


@pytest.mark.parametrize("use", ["explain_clipping", "check_model", *slow("fit")])
@pytest.mark.parametrize("one", [by_name, by_default, by_place, jax.jit(by_place)])
def test_a_loss_may_take_a_key(use, one):
    assert USES[use](one, W, BATCH)


def test_a_loss_of_whole_batches_may_take_a_key():
    def mixed(params, batch, key):
        del key
        x = batch[0] - batch[0].mean(axis=0)
        return cross_entropy(x @ params["w"], batch[1]).mean()

    def apart(params, batch, key):
        return by_place(params, batch, key).mean()

    assert lsdp.check_model(apart, W, BATCH, batched=True)
    assert "depends on other examples" in str(lsdp.check_model(mixed, W, BATCH, batched=True))


def test_a_key_does_not_change_the_explanation():
    """A key is not a parameter, so the table is the same without a key."""
    shapes = jax.eval_shape(lambda: (BATCH[0][0], BATCH[1][0]))
    rows = lsdp.explain_clipping(keyed, W, shapes).rows
    assert rows == lsdp.explain_clipping(loss, W, shapes).rows


@pytest.mark.parametrize("one", [by_name, by_place])
def test_clipped_grad_takes_keys_as_part_of_the_batch(one):
    with pytest.raises(TypeError, match=r"pass the batch .*random\.split"):
        by_clipped_grad(one, W, BATCH)
    pairs = BATCH, jax.random.split(jax.random.key(0), 6)
    assert by_clipped_grad(lambda p, e: keyed(p, *e), W, pairs)  # the remedy of the message


def of_batches(params, batch):
    x, y = batch
    return jax.vmap(lambda x, y: cross_entropy(x @ params["w"], y))(x, y).mean()


def of_batches_by_axis(params, batch):
    x, y = batch
    return (cross_entropy(jnp.einsum("nd,dk->nk", x, params["w"]), y) / len(x)).sum()


def of_labels(params, x, y):
    return cross_entropy(x @ params["w"], y)


def of_labels_in_batches(params, x, y):
    return jax.vmap(of_labels, (None, 0, 0))(params, x, y).mean()


def backwards(example, params):
    return loss(params, example)


def undressed(params, example):
    return loss(params["params"], example)


class Dropping(nn.Module):
    """A dropout layer, which needs a key."""

    @nn.compact
    def __call__(self, x):
        """Apply dropout."""
        return nn.Dropout(0.5, deterministic=False)(x)


def of_missing_keys(params, example):
    x, y = example
    return cross_entropy(Dropping().apply({}, x) @ params["w"], y)


COUNTED = nnx.split(nnx.Dropout(0.5, rngs=nnx.Rngs(0)))


def of_live_modules(params, example):
    x, y = example
    return cross_entropy(nnx.merge(*COUNTED)(x) @ params["w"], y)


def of_keys_first(params, rng, example):
    return keyed(params, example, rng)


MISTAKES = {
    "a vmap inside": (
        of_batches,
        BATCH,
        "got the loss of a whole batch: it fails on .* and works on",
    ),
    "an axis inside": (of_batches_by_axis, BATCH, "got the loss of a whole batch: it fails on"),
    "labels as an argument": (of_labels, BATCH, r"write `lambda params, example: .*\*example\)`"),
    "columns as arguments": (
        of_labels,
        {"x": BATCH[0], "y": BATCH[1]},
        r"write `lambda params, example: loss_fn\(params, \*\*example\)`",
    ),
    "labels and a vmap": (of_labels_in_batches, BATCH, r"\*example\)`, and remove vmap"),
    "the example first": (backwards, BATCH, "got a function that takes the example first"),
    "the key first": (of_keys_first, BATCH, "got a function that takes the key before the example"),
    "a column of labels": (loss, (BATCH[0], BATCH[1][:, None]), r"as in labels\[:, 0\]"),
    "Linen's collections": (
        undressed,
        BATCH,
        r"takes its parameters in a dict; write .*\"params\": params",
    ),
    "dropout without a key": (of_missing_keys, BATCH, "let it take a key, .* rngs=.*dropout"),
    "a live NNX module": (of_live_modules, BATCH, "merge a copy, .*copy=True"),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_likely_mistake_is_explained_in_one_sentence(mistake, use):
    function, batch, message = MISTAKES[mistake]
    with pytest.raises((ValueError, TypeError, IndexError), match=message) as caught:
        USES[use](function, W, batch)
    text = str(caught.value)
    assert text.startswith("`loss_fn` must") and text.endswith(".") and "\n" not in text
    if use != "check_model":
        assert caught.value.__cause__ is not None  # the original error


def test_the_remedies_work():
    for mended in (
        training.keep_batch_axis(of_batches),
        lambda params, example: of_labels(params, *example),
        lambda params, example: undressed({"params": params}, example),
    ):
        assert by_clipped_grad(mended, W, BATCH)
    assert lsdp.check_model(of_batches, W, BATCH, batched=True)


def test_an_error_of_the_loss_itself_is_raised_unchanged():
    class MineError(Exception):
        pass

    def broken(params, example):
        raise MineError("the reason")

    for use in USES.values():
        with pytest.raises(MineError, match="the reason"):
            use(broken, W, BATCH)


def test_labels_as_an_argument_are_explained_for_whole_batches_too():
    report = lsdp.check_model(of_labels_in_batches, W, BATCH, batched=True)
    assert "`loss_fn` must take parameters and a batch, got a function that takes the parts" in str(
        report
    )


@pytest.mark.parametrize("use", USES)
def test_a_filtered_model_that_was_not_combined_is_explained(use):
    params = eqx.filter(eqx.nn.MLP(4, 3, 2, 1, key=jax.random.key(0)), eqx.is_inexact_array)
    with pytest.raises((ValueError, TypeError), match=r"got None .*eqx.partition.*eqx.combine"):
        USES[use](lambda model, e: cross_entropy(model(e[0]), e[1]), params, BATCH)


def test_a_loss_that_uses_no_parameter_is_refused():
    """If the loss closes over its model, only noise would change the parameters."""
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="`loss_fn` must depend on `params`, got a function"):
        by_fit(lambda params, e: cross_entropy(model(e[0]), e[1]), nnx.state(model), BATCH)


@pytest.mark.parametrize("callback", [lambda: None, lambda report, more: None])
def test_callbacks_are_checked_before_the_first_step(callback):
    with pytest.raises(TypeError, match="`callbacks` must be functions of one argument, the rep"):
        training.fit(PLAN, loss, W, BATCH, optimizer=optax.sgd(0.1), callbacks=[callback])


def test_text_in_a_batch_is_refused():
    with pytest.raises(TypeError, match="`batch` must hold numbers or keys, got <U1 at '1'"):
        lsdp.check_model(loss, W, (X, np.array(["a"] * 6)))


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda p, e: (loss(p, e), e), "must return only the loss, got a tuple of 2; drop aux"),
        (lambda p, e: p["w"][0], r"must return a scalar for one example, got shape \(3,\)"),
        (lambda p, e: None, "must return the loss, a real floating-point scalar, got NoneType"),
    ],
)
def test_fit_refuses_anything_but_a_scalar_loss(loss_fn, message):
    with pytest.raises((ValueError, TypeError), match=message):
        by_fit(loss_fn, W, BATCH)


@pytest.mark.parametrize("loss", [lambda p: 0.0, lambda p, x, y, z: 0.0, lambda p, *, x: 0.0])
def test_a_loss_with_too_few_or_too_many_arguments_is_refused(loss):
    for make in (lambda f: lsdp.clipped_grad(f, clip_norm=1.0), takes_key):
        with pytest.raises(
            TypeError, match="must take parameters, one example and optionally a key"
        ):
            make(loss)
    assert not takes_key(lambda *both: 0.0) and not takes_key(jnp.vdot)
