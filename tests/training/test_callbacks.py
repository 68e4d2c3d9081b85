"""A callback ends a run without losing it; what is printed is short, and holds no secret."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lsdp as lsdp
from optax_lsdp import training
from optax_lsdp.training import _run
from tests.cases import slow
from tests.training.problem import (
    PLAN,
    SHORT,
    assert_as_if_alone,
    bits,
    fit,
    loss,
    make_data,
    make_params,
    make_plan,
)


def stop_at(step, told=None):
    def callback(report):
        if told is not None:
            told.append(report.step)
        if report.step == step:
            raise training.StopTraining

    return callback


def test_a_callback_ends_a_run_that_is_kept_and_can_go_on(tmp_path):
    told, others = [], []
    callbacks = [stop_at(3, told), lambda report: others.append(report.step)]
    stopped = fit(SHORT, folder=tmp_path, callbacks=callbacks)
    assert (stopped.stopped, stopped.steps, stopped.ledger.steps) == ("callback", 3, 3)
    assert told == others == [1, 2, 3]  # all are told of the step at which one stops
    assert SHORT.spent(stopped.ledger) < SHORT.epsilon
    assert_as_if_alone(tmp_path, plan=SHORT)


def test_a_run_that_is_stopped_is_the_run_so_far():
    stopped = fit(SHORT, callbacks=[stop_at(3)], average="polyak")
    seen = []
    fit(
        SHORT,
        callbacks=[lambda report: seen.append(bits((report.params, report.average)))],
        average="polyak",
    )
    assert bits((stopped.params, stopped.average)) == seen[2]


def test_a_stop_at_the_last_step_is_the_end_and_what_is_returned_is_no_stop():
    assert fit(SHORT, callbacks=[lambda report: True, stop_at(5)]).stopped == "done"


def test_one_process_that_stops_stops_all(monkeypatch):
    """Another process has stopped: this one learns of it, and says so too."""
    asked = []

    def holds_anywhere(flag):
        asked.append(flag)
        return flag or len(asked) > 3

    monkeypatch.setattr(_run, "holds_anywhere", holds_anywhere)
    done = fit(SHORT)
    assert (done.stopped, done.steps) == ("callback", 3)


def test_automatic_clipping_is_a_choice_of_fit(tmp_path):
    """Gradients far below the clip norm are scaled up to it, and not passed as they are."""
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


def test_another_clip_style_is_another_program(tmp_path):
    fit(SHORT, folder=tmp_path, callbacks=[stop_at(2)])
    with pytest.warns(UserWarning, match="made with other code or settings"):
        fit(SHORT, folder=tmp_path, clip_style="automatic")


def test_what_a_run_returns_prints_in_short():
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
def test_no_key_is_printed(held):
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
def test_a_loss_that_is_not_finite_is_told_once(size):
    with pytest.warns(UserWarning, match="NaN or infinity in the batch of step 1;") as caught:
        done = fit(SHORT, wrong_labels(), microbatch_size=size)
    assert done.stopped == "done" and len(caught) == 1
    assert "depends on private data: release no log" in str(caught[0].message)


def test_a_loss_that_becomes_infinite_is_told_at_a_checkpoint_or_the_end():
    def later(params, example):
        return loss(params, example) + jnp.where(params["bias"][0] == 0, 0, jnp.inf)

    for steps, save_every in ((5, 3), (2, 100)):
        with pytest.warns(UserWarning, match=f"in the batch of step {min(steps, save_every)};"):
            fit(make_plan(steps=steps), loss_fn=later, save_every=save_every)
