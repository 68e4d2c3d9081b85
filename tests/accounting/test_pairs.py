"""Dominating pairs: each is held to all datasets of a few examples, counted one by one."""

import itertools

import numpy as np
import pytest

from optax_lsdp.accounting import SampledGaussian
from optax_lsdp.accounting._pairs import add, add_group, remove, remove_group, replace
from tests.oracles import batches, hockey_stick, noisy_sums

WIDTH = 0.005
X = np.arange(-14, 14, WIDTH)
VALUES = (-1.0, 0.0, 1.0)
PAIRS = {
    "remove": remove(0.2, 0.7),
    "add": add(0.2, 0.7),
    "replace": replace(0.2, 0.7),
    "remove, rarely": remove(1e-6, 2.0),
    "add, rarely": add(1e-6, 2.0),
    "replace, rarely": replace(1e-6, 2.0),
    "remove, always": remove(1.0, 1.5),
    "add, always": add(1.0, 1.5),
    "replace, always": replace(1.0, 1.5),
    "remove three": remove_group(0.2, 0.7, 3),
    "add three": add_group(0.2, 0.7, 3),
}


def neighbours(size, relation):
    """Return all pairs of datasets of contributions up to 1 that differ in their last example."""
    for others in itertools.product(VALUES, repeat=size - 1):
        for one, other in itertools.product(VALUES, repeat=2):
            if relation == "add_remove":
                yield (*others, one), others
                yield others, (*others, one)
            elif relation == "zero_out":
                yield (*others, one), (*others, 0.0)
                yield (*others, 0.0), (*others, one)
            else:
                yield (*others, one), (*others, other)


@pytest.mark.parametrize(
    ("sampling", "relation", "drawn", "most"),
    [
        ("poisson", "add_remove", 0.3, None),
        ("poisson", "zero_out", 0.3, None),
        ("poisson", "replace_one", 0.3, None),
        ("poisson", "add_remove", 0.6, 1),
        ("poisson", "zero_out", 0.6, 1),
        ("poisson", "replace_one", 0.6, 1),
        ("poisson", "add_remove", 0.6, 2),
        ("poisson", "add_remove", 1.0, 2),
        ("poisson", "zero_out", 1.0, 2),
        ("poisson", "replace_one", 1.0, 2),
        ("poisson", "zero_out", 0.6, 2),
        ("without_replacement", "replace_one", 1, None),
        ("without_replacement", "replace_one", 2, None),
    ],
)
@pytest.mark.parametrize("noise", [0.8, 2.0])
def test_no_small_dataset_reveals_more_than_is_reported(sampling, relation, drawn, most, noise):
    size = 3
    rate = drawn if sampling == "poisson" else drawn / size
    run = SampledGaussian(
        noise,
        rate,
        1,
        sampling=sampling,
        neighbouring=relation,
        max_batch_size=most,
        dataset_size=size,
    )
    for epsilon in (0.0, 0.1, 0.5, 1.0):
        worst = 0.0
        for pair in neighbours(size, relation):
            p, q = (
                noisy_sums(
                    tuple(value / noise for value in data),
                    batches(len(data), sampling, drawn, most),
                    X,
                )
                for data in pair
            )
            worst = max(worst, hockey_stick(p, q, WIDTH, epsilon))
        bound = run.delta(epsilon)
        assert worst <= bound + 1e-6
        if most is None:
            assert bound <= worst * 1.002 + 1e-6 or sampling == "without_replacement"


def test_a_shuffled_epoch_reveals_no_more_than_is_reported():
    width, noise = 0.05, 1.0
    x = np.arange(-8, 8, width)

    def density(data):  # two batches of one, in either order
        bumps = [np.exp(-((x - value / noise) ** 2) / 2) / np.sqrt(2 * np.pi) for value in data]
        return (np.outer(*bumps) + np.outer(*bumps[::-1])) / 2

    for relation in ("zero_out", "replace_one"):
        run = SampledGaussian(noise, 0.5, 2, sampling="shuffled", neighbouring=relation)
        for epsilon in (0.0, 0.5, 1.0):
            worst = max(
                hockey_stick(density(one), density(other), width**2, epsilon)
                for one, other in neighbours(2, relation)
            )
            assert 0 < worst <= run.delta(epsilon) + 1e-6


@pytest.mark.parametrize("seed", range(20))
def test_no_two_directions_are_worse_than_opposite_ones(seed):
    # In the plane: an example's contribution u is replaced by v, of norms up to μ.
    rng = np.random.default_rng(seed)
    rate, shift, width = rng.uniform(0.05, 0.95), rng.uniform(0.3, 2.0), 0.05
    x = np.arange(-8, 8, width)
    plane = np.stack(np.meshgrid(x, x), axis=-1)
    u, v = rng.normal(size=(2, 2))
    u, v = (w / np.linalg.norm(w) * shift * rng.uniform(0.3, 1) ** 0.1 for w in (u, v))

    def bump(centre):
        return np.exp(-np.sum((plane - centre) ** 2, axis=-1) / 2) / (2 * np.pi)

    p, q = ((1 - rate) * bump(np.zeros(2)) + rate * bump(w) for w in (u, v))
    run = SampledGaussian(1 / shift, rate, 1, neighbouring="replace_one")
    for epsilon in (0.0, 0.2, 1.0):
        assert hockey_stick(p, q, width**2, epsilon) <= run.delta(epsilon) + 1e-6


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS.keys())
def test_a_point_is_where_its_loss_is(pair):
    x = np.linspace(-6, 8, 400)
    losses = pair.loss(x)
    assert np.all(np.diff(losses) >= -1e-15 * np.abs(losses[1:]))
    found = pair.loss(pair.point(losses))
    np.testing.assert_allclose(found, losses, rtol=1e-9, atol=1e-15)


def test_losses_that_no_point_has_are_at_infinity():
    rate = 0.2
    least = np.log1p(-rate)
    assert remove(rate, 1.0).point(np.array([least - 0.01]))[0] == -np.inf
    assert remove_group(rate, 1.0, 2).point(np.array([2 * least - 0.01]))[0] == -np.inf
    assert add(rate, 1.0).point(np.array([-least + 0.01]))[0] == np.inf


@pytest.mark.parametrize("name", PAIRS)
def test_both_sides_are_probabilities(name):
    pair, rounding = PAIRS[name], 1e-9 if "three" in name else 4e-16  # groups are rounded up
    np.testing.assert_allclose(pair.base.sum(), 1, rtol=rounding)
    np.testing.assert_allclose(pair.change.sum(), 0, atol=rounding)
    assert np.all(pair.weights >= -1e-16)
