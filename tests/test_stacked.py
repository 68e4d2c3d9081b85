"""Many runs of softmax regression in one program do what the library does for one run."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lsdp as lsdp
from benchmarks.paper import _features, _record, _stacked, _wavelets, correlated
from optax_lsdp.accounting import CorrelatedGaussian


def test_the_clipped_sum_of_all_runs_is_that_of_clipped_grad():
    """The closed form of the clip factor, for examples inside and outside the clip norm."""
    rng = np.random.default_rng(0)
    params = {"kernel": rng.normal(size=(3, 5, 4)), "bias": rng.normal(size=(3, 4))}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    features = jnp.asarray(rng.normal(size=(8, 5)), jnp.float32)
    labels = jnp.arange(8) % 4
    mask = jnp.arange(8) < 6
    clip_norms = jnp.array([0.3, 1.5, 100.0])

    def loss(params, example):
        x, label = example
        logits = x @ params["kernel"] + params["bias"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, label)

    found = _stacked.clipped_sum(params, features, labels, mask, clip_norms)
    for run, clip_norm in enumerate(clip_norms.tolist()):
        one = jax.tree.map(lambda x, run=run: x[run], params)
        link = lsdp.clip_per_example(clip_norm)
        marked = lsdp.clipped_grad(loss, clip_norm=clip_norm)(one, (features, labels), mask)
        total, _ = link.update(marked, link.init(one), one)
        rounding = 2e-4  # the engine clips to slightly less than the clip norm
        for name in total:
            ours = clip_norm * found[name][run]
            np.testing.assert_allclose(ours, total[name], rtol=rounding, atol=rounding)


def test_runs_of_one_program_do_not_disturb_each_other():
    rng = np.random.default_rng(0)
    data = rng.normal(size=(40, 6)).astype(np.float32), np.arange(40, dtype=np.int32) % 3

    def optimizer(run, key, recipe):
        noise = lsdp.add_gaussian_noise(lambda step: run.noise_multiplier, key=key)
        return optax.chain(noise, optax.sgd(run.step_size / recipe.batch))

    recipe = _stacked.Recipe(8, 40, optimizer, average=0.5, points=8)
    settings = [[1.0, 2.0], [1.0, 0.5], [1.0, 3.0], [0.0, 0.0]]
    both = _stacked.train(recipe, data, data, _stacked.Runs(*settings), (3, 4), classes=3)
    second = _stacked.Runs(*(values[1:] for values in settings))
    alone = _stacked.train(recipe, data, data, second, (3, 4), classes=3)
    assert both.shape == (2, 2, 8) and both[:, 1] == pytest.approx(alone[:, 0])
    assert (both[0] != both[1]).any(axis=1).all() and (both[:, 0] != both[:, 1]).any(axis=1).all()


def test_mirrored_images_have_mirrored_coefficients():
    images = np.random.default_rng(0).uniform(size=(2, 40, 40)).astype(np.float32)
    blur = _wavelets._blur(5.5 + 4 * np.arange(8), 40)
    found, turned = (
        np.asarray(_wavelets._scatter(x, _wavelets._spectra(40), blur))
        for x in (images, images[:, :, ::-1])
    )
    rounding = 1e-5
    np.testing.assert_allclose(_wavelets.mirrored(found), turned, atol=rounding)
    assert np.abs(found - turned).max() > 100 * rounding
    thinned = np.asarray(_wavelets._scatter(images, _wavelets._spectra(40), blur, thin=2))
    assert np.abs(thinned - found).max() < 0.03 * np.abs(found).max()


def test_colours_are_scattered_one_by_one():
    images = np.random.default_rng(0).uniform(size=(1, 32, 32, 3)).astype(np.float32)
    images[..., 1] = images[..., 0]
    found = _wavelets.scatter_colours(images)
    assert found.shape == (1, 8, 8, 81, 3)
    np.testing.assert_array_equal(found[..., 0], found[..., 1])
    assert np.abs(found[..., 0] - found[..., 2]).max() > 0.01
    middle = images[
        0, 14:18, 14:18, 0
    ].mean()  # the plain blur is near the mean of its surroundings
    assert found[0, 3:5, 3:5, 0, 0].mean() == pytest.approx(middle, abs=0.1)


def test_features_have_one_length_which_private_examples_do_not_change():
    rng = np.random.default_rng(0)
    parts = [(rng.normal(size=(n, 2, 3, 4)).astype(np.float16), np.zeros(n)) for n in (5, 9, 2)]
    found = _features.unit_length(_record.Split(*parts))
    lengths = [np.linalg.norm(x, axis=1) for x, _ in found]
    np.testing.assert_allclose(np.concatenate(lengths), _features.LENGTH, rtol=1e-5)
    parts[0] = (parts[0][0][:1], parts[0][1][:1])
    fewer = _features.unit_length(_record.Split(*parts))
    np.testing.assert_array_equal(fewer.private[0][0], found.private[0][0])


def test_inner_products_of_smoothed_cosines_are_those_of_smoothed_images():
    images = np.random.default_rng(0).normal(size=(2, 6, 6)).astype(np.float32)
    grid = lsdp.smoothing.Grid((0, 1))
    tx = lsdp.laplacian_smooth(3.0, layout=lambda path, shape: grid, boundary="neumann")
    smoothed, _ = tx.update(jnp.asarray(images[1]), tx.init(images[1]))
    found = _features.lowest_cosines(images, 6, 3.0)
    rounding = 1e-5  # float32, 36 terms
    assert np.sum(found[0] * found[1]) == pytest.approx(np.vdot(images[0], smoothed), abs=rounding)
    few = _features.lowest_cosines(images, 2, 3.0)
    np.testing.assert_array_equal(few, found[:, :2, :2])


def test_all_kinds_of_noise_spend_at_most_epsilon():
    steps, epsilon = 100, 4.0
    for noise in (correlated.Noise(), correlated.Noise(4), correlated.Noise(3, is_inverse=True)):
        z = correlated.multiplier(noise, steps, epsilon)
        matrix = correlated.correlation(noise, steps)
        how = {"sampling_rate": 1 / correlated.PART}
        if noise.is_inverse:
            how = {"min_separation": correlated.PART, "neighbouring": "zero_out"}
        spent = CorrelatedGaussian(z, matrix, **how).epsilon(_record.DELTA)
        assert 0.99 * epsilon < spent <= epsilon
