"""check_model looks at every example, and tells its loss from its gradient."""

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lsdp as lsdp

BATCH = jax.random.normal(jax.random.key(0), (6, 5)), jnp.arange(6) % 3


def of_labels(w, example):
    x, label = example
    return optax.softmax_cross_entropy_with_integer_labels(x @ w, label)


@pytest.mark.parametrize("place", [0, 5, 30, 36])
def test_every_example_is_looked_at_and_told_what_becomes_of_it(place):
    """A label beyond the classes makes the loss NaN, and its gradient trains all the same."""
    w, x = jnp.ones((5, 3)) / 5, jax.random.normal(jax.random.key(2), (37, 5))
    labels = (jnp.arange(37) % 3).at[place].set(3)
    private, total = lsdp.value_and_clipped_grad(of_labels, clip_norm=0.1)(
        w, (x[place, None], labels[place, None])
    )
    assert jnp.isnan(private.values[0]) and jnp.linalg.norm(total.value) > 0.099
    report = lsdp.check_model(of_labels, w, (x, labels))
    assert f"is not finite for 1 of 37 examples, first at index {place}: their gr" in str(report)
    assert "finite, and still train the model" in str(report)
    assert "contribute nothing" not in str(report)


def test_losses_and_gradients_are_told_apart():
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


def test_a_batch_loss_is_looked_at_in_all_parts_of_the_batch():
    x = jnp.ones((19, 5)).at[18].set(0)

    def loss(w, x):
        return jnp.log(x @ w).mean()

    assert lsdp.check_model(loss, jnp.ones(5), x[:18], batched=True)
    report = lsdp.check_model(loss, jnp.ones(5), x, batched=True)
    assert "The loss is not finite for 1 of 3 batches" in str(report)


def test_a_factor_that_starts_at_zero_hides_no_gradient():
    """LoRA: B is zero at the start, so that A gets no gradient there, and does a step later."""

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
