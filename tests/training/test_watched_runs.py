"""Runs that are watched: the curve of `fit`, on the bar, in reports, and after a crash."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lsdp as lsdp
from optax_lsdp import training
from tests.training.problem import SHORT, Crash, bits, fit, make_plan, raise_at

FULL = make_plan(
    steps=12, sampling="full", neighbouring="zero_out", expected_batch_size=400, smoothing=0.5
)


def test_a_run_is_watched_only_if_asked():
    done = fit(SHORT)
    assert done.curve is None and done.smoothing is None


@pytest.mark.parametrize("clip", [1.0, lsdp.AdaptiveClip(0.1)], ids=["fixed", "adaptive"])
def test_a_resumed_run_has_the_curve_of_an_uninterrupted_run(tmp_path, clip):
    plan = make_plan(steps=5, clip_norm=clip)
    expected = fit(plan, watch=True)
    with pytest.raises(Crash):
        fit(plan, watch=True, folder=tmp_path, save_every=2, callbacks=[raise_at(3)])
    resumed = fit(plan, watch=True, folder=tmp_path, save_every=2)
    assert np.all(expected.curve.stderr[1:] > 0)
    assert bits(resumed.curve) == bits(expected.curve)
    assert bits(resumed.params) == bits(expected.params)
    with pytest.raises(ValueError, match="same model, optimizer, average and `watch`"):
        fit(plan, folder=tmp_path)


def test_reports_bar_and_curve_agree(capsys):
    seen = []
    done = fit(
        FULL,
        watch=True,
        progress=True,
        optimizer=optax.sgd(0.5),
        callbacks=[lambda report: seen.append(np.asarray(report.work).copy())],
    )
    curve = done.curve
    np.testing.assert_array_equal(np.stack([curve.work, curve.stderr], 1), np.stack(seen))
    assert list(curve.steps) == list(range(12))
    text = repr(curve).removesuffix(")").split(", ", 1)[1]
    assert text.startswith("clipped loss −0.") and text in capsys.readouterr().err
    # The loss begins at log 2 and cannot fall below 0; the noise is small.
    assert -0.7 < curve.work[-1] < -5 * curve.stderr[-1]
    assert curve.signal_to_noise.keys() == {"kernel", "bias"}


def test_a_mesh_changes_no_curve():
    alone = fit(FULL, watch=True).curve
    split = fit(FULL, watch=True, mesh=jax.make_mesh((8,), ("examples",))).curve
    rounding = 1e-4  # of sums over shards, for differences of the first steps
    np.testing.assert_allclose(alone.work, split.work, rtol=rounding, atol=1e-6)
    np.testing.assert_allclose(alone.stderr, split.stderr, rtol=rounding, atol=1e-6)


def test_shuffled_batches_are_refused():
    plan = make_plan(steps=2, sampling="shuffled", neighbouring="zero_out")
    with pytest.raises(ValueError, match="`watch` must be False with sampling='shuffled'"):
        training.fit(
            plan,
            lambda w, x: w @ x,
            np.zeros(2),
            np.zeros((400, 2)),
            optimizer=optax.sgd(0.1),
            watch=True,
        )


@pytest.mark.parametrize("collect", [optax.apply_every(4), None], ids=["apply_every", "MultiSteps"])
def test_optimizers_that_collect_updates_have_no_bias(collect):
    """On pure noise, the true work is 0; their updates are zero in three of four steps."""
    optimizer = optax.MultiSteps(optax.sgd(4.0), 4)
    if collect is not None:
        optimizer = optax.chain(collect, optax.sgd(1.0))
    tx, params = lsdp.watch(optimizer, steps=40, stddev=1.0), jnp.zeros(100)

    @jax.jit
    @jax.vmap
    def run(key):
        def step(state, key):
            with jax.numpy_dtype_promotion("standard"):  # which `optax.MultiSteps` needs
                return tx.update(jax.random.normal(key, (100,)), state, params)[1], None

        return jax.lax.scan(step, tx.init(params), jax.random.split(key, 40))[0]

    states = run(jax.random.split(jax.random.key(0), 40))
    ends = np.asarray(states.curve[:, -1])
    assert np.mean(np.abs(ends[:, 0]) < 2 * ends[:, 1]) >= 0.9
    assert abs(np.mean(ends[:, 0] / ends[:, 1])) < 0.7  # all runs share the probes' signs
