"""Tests of `audit_noise` and `audit_sampler`: they name what is wrong, and pass what is right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lsdp as lsdp
from benchmarks._pipeline import COUNT, RATE
from optax_lsdp.auditing import StatisticsReport, audit_noise, audit_sampler

FACTS = {"dataset_size": COUNT, "sampling_rate": RATE}


def smallest(report):
    """Return the name of the test with the smallest p-value."""
    return min(report.p_values, key=report.p_values.get)


def test_a_report_names_its_probability_of_a_false_rejection():
    assert "1e-05" in str(StatisticsReport("scale", 1.0, 1.1, {"shape": 0.5}, 1e-5))


@pytest.mark.parametrize("seed", range(3))
def test_a_sampler_passes_only_as_its_own_scheme(seed):
    key = jax.random.key(seed)
    fixed = lsdp.FixedSizeSampler(COUNT, round(RATE * COUNT), key)
    poisson = lsdp.PoissonSampler(COUNT, RATE, key)
    assert not audit_sampler(fixed, **FACTS, sampling="poisson")
    assert not audit_sampler(poisson, **FACTS, sampling="without_replacement")
    assert not audit_sampler(lsdp.PoissonSampler(COUNT, 1.1 * RATE, key), **FACTS)


class WrongSampler:
    """A Poisson sampler that fails one test."""

    def __init__(self, test, seed):
        self.test, self.key = test, (seed, 7)

    def batch(self, step):
        """Return the batch of a step."""
        if self.test == "no two batches too similar" and step == 300:
            step = 17
        rng = np.random.default_rng((*self.key, step))
        rates = np.full(COUNT, RATE)
        if self.test == "equal rates of all examples":
            rates[::2], rates[1::2] = 1.3 * RATE, 0.7 * RATE
        if self.test == "no example far too often or rarely":
            rates[123] = 5 * RATE
        included = rng.random(COUNT) < rates
        if self.test == "no two examples too often together":
            included[500] = included[3]
        if self.test == "independent examples":
            included[1::2] = included[::2]
        return lsdp.sampling.Batch(np.arange(COUNT), included)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "test",
    [
        None,
        "no two batches too similar",
        "equal rates of all examples",
        "no example far too often or rarely",
        "independent examples",
        "no two examples too often together",
    ],
)
def test_the_smallest_p_value_names_what_is_wrong_with_a_sampler(test, seed):
    report = audit_sampler(WrongSampler(test, seed), **FACTS)
    assert bool(report) == (test is None), str(report)
    assert test is None or smallest(report) == test


@pytest.mark.parametrize("draw", [jax.random.normal, lsdp.add_gaussian_noise])
def test_sound_noise_of_many_numbers_passes_and_two_percent_more_does_not(draw):
    """More than 100,000 numbers, so that 2 % is found, and some numbers are equal by chance."""
    zeros = {"a": jnp.zeros((64, 50)), "b": jnp.zeros(750)}
    key = jax.random.key(3)
    noise = lsdp.add_gaussian_noise(2.0, key=key)

    @jax.jit
    def release(step):
        if draw is lsdp.add_gaussian_noise:
            return noise.update(zeros, noise.init(zeros)._replace(step=step))[0]
        keys = jax.random.split(jax.random.fold_in(key, step))
        return {n: 2 * draw(k, x.shape) for (n, x), k in zip(zeros.items(), keys, strict=True)}

    drawn = [jax.device_get(release(step)) for step in range(32)]
    report = audit_noise(drawn.__getitem__, scale=2.0)
    assert report, str(report)
    more = [jax.tree.map(lambda x: np.float32(1.02) * x, one) for one in drawn]
    louder = audit_noise(more.__getitem__, scale=2.0)
    assert not louder and smallest(louder) == "scale"


def test_uniform_noise_in_one_leaf_is_found():
    def release(step):
        one, other = jax.random.split(jax.random.fold_in(jax.random.key(0), step))
        uniform = 12**0.5 * (jax.random.uniform(other, (200,)) - 0.5)
        return {"a": jax.random.normal(one, (9000,)), "z": uniform}

    report = audit_noise(jax.jit(release), scale=1.0)
    assert not report and smallest(report) == "Gaussian distribution"


@jax.jit
def gaussian(step):
    return jax.random.normal(jax.random.fold_in(jax.random.key(0), step), (50,))


@pytest.mark.parametrize("period", [31, 1000, 4095])
def test_noise_that_repeats_is_found_if_steps_are_a_period_apart(period):
    steps = [*range(32), *range(32, 4097, 32)]
    assert audit_noise(gaussian, scale=1.0, steps=steps)
    report = audit_noise(lambda step: gaussian(step % period), scale=1.0, steps=steps)
    assert not report and smallest(report) == "independent steps"
    assert bool(audit_noise(lambda step: gaussian(step % period), scale=1.0)) == (period > 31)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (
            [0, 5, 5],
            "`steps` must list 2 or more different steps, got 3 steps, 2 of them different",
        ),
        ([7], "`steps` must list 2 or more different steps, got 1"),
        ([0, -1], "`steps` must be a whole number, 0 or more, got -1"),
        (1, "`steps` must be a whole number, 2 or more, got 1"),
        (2.0, "`steps` must be a whole number, 2 or more, got 2.0"),
    ],
)
def test_steps_that_cannot_be_audited_are_refused(steps, message):
    with pytest.raises(ValueError, match=message):
        audit_noise(gaussian, scale=1.0, steps=steps)
    sampler = lsdp.PoissonSampler(1000, 0.05, jax.random.key(0))
    with pytest.raises(ValueError, match=message):
        audit_sampler(sampler, **FACTS, steps=steps)


def test_too_few_numbers_or_steps_are_refused():
    with pytest.raises(ValueError, match="`release` must return 100 numbers or more in all steps"):
        audit_noise(lambda step: gaussian(step)[:3], scale=1.0)
    with pytest.raises(ValueError, match="`steps` and examples must be enough for a test"):
        audit_sampler(WrongSampler(None, 0), **FACTS, steps=20)
