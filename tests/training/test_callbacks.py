"""Callbacks, warnings and printed results: what a run tells its user, without secrets."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lsdp as lsdp
from optax_lsdp import training
from optax_lsdp.training import _fit
from tests.cases import slow
from tests.training.problem import (
    PLAN,
    SHORT,
    assert_ends_as_uninterrupted,
    bits,
    fit,
    loss,
    make_data,
    make_params,
    make_plan,
    raise_at,
)


def stop_at(step):
    return raise_at(step, training.StopTraining)


def test_a_callback_ends_a_run_which_is_saved_and_can_be_resumed(tmp_path):
    first, last = [], []
    callbacks = [
        lambda report: first.append(report.step),
        stop_at(3),
        lambda report: last.append(report.step),
    ]
    stopped = fit(SHORT, folder=tmp_path, callbacks=callbacks)
    assert (stopped.stopped, stopped.steps, stopped.ledger.steps) == ("callback", 3, 3)
    assert first == last == [1, 2, 3]  # all get the report of the step at which one stops
    assert SHORT.spent(stopped.ledger) < SHORT.epsilon
    assert_ends_as_uninterrupted(tmp_path, SHORT)


def test_a_stopped_run_returns_the_parameters_and_average_so_far():
    stopped = fit(SHORT, callbacks=[stop_at(3)], average="polyak")
    seen = []
    fit(
        SHORT,
        callbacks=[lambda report: seen.append(bits((report.params, report.average)))],
        average="polyak",
    )
    assert bits((stopped.params, stopped.average)) == seen[2]


def test_a_stop_at_the_last_step_is_no_stop_and_neither_is_a_returned_value():
    assert fit(SHORT, callbacks=[lambda report: True, stop_at(5)]).stopped == "done"


def test_a_stop_in_one_process_stops_all(monkeypatch):
    """Another process stops after three steps, and this one follows."""
    asked = []

    def any_process(flag):
        asked.append(flag)
        return flag or len(asked) > 3

    monkeypatch.setattr(_fit, "any_process", any_process)
    done = fit(SHORT)
    assert (done.stopped, done.steps) == ("callback", 3)


def test_fit_offers_automatic_clipping(tmp_path):
    """Automatic clipping scales gradients up to the clip norm that are far below it."""
    plan = make_plan(
        steps=2,
        noise_multiplier=1e-4,
        sampling="full",
        neighbouring="zero_out",
        expected_batch_size=400,
    )

    def tiny(params, example):
        return 1e-1 * loss(params, example)

    options = {"loss_fn": tiny, "optimizer": optax.sgd(1.0)}
    moved = {}
    for style in ("threshold", "automatic"):
        grad = jax.jit(lsdp.clipped_grad(tiny, clip_norm=1.0, clip_style=style))
        data = jax.tree.map(jnp.asarray, make_data())
        expected = -jax.tree.map(jnp.asarray, grad(make_params(), data))["kernel"].value / 400
        one = fit(plan, clip_style=style, callbacks=[stop_at(1)], **options)
        moved[style] = one.params["kernel"]
        np.testing.assert_allclose(moved[style], expected, atol=1e-5)  # noise
    assert np.linalg.norm(moved["automatic"]) > 3 * np.linalg.norm(moved["threshold"])
    with pytest.raises(ValueError, match="`clip_style` must be one of 'threshold', 'automatic'"):
        fit(clip_style="none", folder=tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_another_clip_style_changes_the_fingerprint(tmp_path):
    fit(SHORT, folder=tmp_path, callbacks=[stop_at(2)])
    with pytest.warns(UserWarning, match="made with different code or settings"):
        fit(SHORT, folder=tmp_path, clip_style="automatic")


def test_results_and_reports_have_a_short_repr():
    reports = []
    done = fit(SHORT, callbacks=[lambda report: reports.append(repr(report))], average=0.9)
    for text in (repr(done), str(done), reports[-1]):
        assert "kernel float32[16, 2]" in text and len(text) < 600 and "\n" not in text
        assert "0." not in text.replace("epsilon=", "").split("average=")[0]  # no weight
    assert "steps=5" in repr(done) and "stopped='done'" in repr(done)
    assert "private_loss=<private>" in reports[-1]
    many = done._replace(params={str(i): jnp.zeros(2) for i in range(100)})
    assert "and 94 more" in repr(many) and len(repr(many)) < 600


def secrets():
    key = jax.random.key(123456789)
    grid = lsdp.discrete.add_discrete_gaussian_noise(2.0, key=key)
    private = PLAN.optimizer(optax.adam(0.1), key)
    state = training._step.State(make_params(), private.init(make_params()), (), key)
    return {
        "noise": lsdp.add_gaussian_noise(1.0, key=key).init(None),
        "optimizer": private.init(make_params()),
        "grid": grid.init(make_params()),
        "sampler": PLAN.sampler(key),
        "run": state,
    }


@pytest.mark.parametrize("held", ["noise", "optimizer", "grid", "sampler", "run"])
def test_no_repr_shows_a_key(held):
    thing = secrets()[held]
    shown = repr(thing) + str(thing) + f"{thing}"
    for leaf in jax.tree.leaves(thing):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            words = [str(word) for word in jax.random.key_data(leaf).ravel().tolist() if word]
            assert words and not any(word in shown for word in words)
    assert "123456789" not in shown
    if held != "sampler":
        assert "key=<secret>" in shown
        assert jax.tree.structure(jax.tree.map(lambda x: x, thing)) == jax.tree.structure(thing)


def wrong_labels():
    data = make_data()
    data["y"][:] = 2  # of two classes
    return data


@pytest.mark.parametrize("size", [None, *slow(16)])
def test_a_loss_that_is_not_finite_gives_one_warning(size):
    with pytest.warns(UserWarning, match="NaN or infinity in the batch of step 1;") as caught:
        done = fit(SHORT, wrong_labels(), microbatch_size=size)
    assert done.stopped == "done" and len(caught) == 1
    assert "depends on private data: release no log" in str(caught[0].message)


def test_a_loss_that_becomes_infinite_gives_a_warning_at_a_checkpoint_or_the_end():
    def later(params, example):
        return loss(params, example) + jnp.where(params["bias"][0] == 0, 0, jnp.inf)

    for steps, save_every in ((5, 3), (2, 100)):
        with pytest.warns(UserWarning, match=f"in the batch of step {min(steps, save_every)};"):
            fit(make_plan(steps=steps), loss_fn=later, save_every=save_every)
