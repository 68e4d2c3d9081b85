"""The search of an `AdaptiveClip` ends at the scale of the gradients, from any clip norm."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lsdp as lsdp
from optax_lsdp._clipped import WithSlack

BATCH = 1e9  # examples, all alike, so that one step knows s
NOISE = 1e-3
STEPS = 100
SCALES = np.geomspace(1e-5, 1e5, 101).astype(np.float32)  # norms of gradients; C begins at 1


def search(target, slack):
    """Return C and an update of each step, for each scale. In the last steps, gradients vanish."""
    tx = lsdp.estimate_norms(
        lsdp.AdaptiveClip(1.0, target=target, slack=slack),
        stddev=NOISE,
        expected_batch_size=BATCH,
    )

    def run(scale):
        def step(state, norm):
            now = lsdp.current_clip_norm(state).value
            places = jnp.arange(1.0, slack + 1)
            filled = slack * (1 - jnp.square(norm / jnp.maximum(norm, now))) >= places
            noisy = WithSlack(
                jnp.ones([]), BATCH * filled.astype(jnp.float32) / slack**0.5, True, True
            )
            update, after = tx.update(noisy, state)
            return after, (now, update)

        norms = jnp.append(jnp.full(STEPS, scale), jnp.zeros(20))
        return jax.lax.scan(step, tx.init(None), norms)[1]

    return tuple(map(np.asarray, jax.jit(jax.vmap(run))(SCALES)))


@pytest.mark.parametrize(
    ("target", "slack"),
    [(0.7, 64), (0.7, 3), (0.1, 4), (0.02, 16), (0.005, 64), (0.9, 5), (6 / 7, 64)],
)
def test_the_search_ends_at_the_scale_from_any_clip_norm(target, slack):
    """Targets of 0.9 and 6/7 are made so that C rises by 3 and falls by 3, if it falls too far."""
    norms, updates = search(target, slack)
    factors = norms[:, 1:] / norms[:, :-1]
    is_over = (updates[:, :-1] > 0) & (np.abs(np.log(factors)) < 0.03)  # the search moves C faster
    begin = np.argmax(is_over, axis=1)
    assert begin.max() < 40
    ends = np.square(SCALES / (3 * norms[np.arange(len(SCALES)), begin]))  # s, if it were exact
    assert ends.min() > target / 2.5 and ends.max() < (1 + target) / 2 + 1 / slack
    assert (updates[:, 40:] > 0).all()
    assert (factors[:, STEPS:] <= 1).all()  # gradients that vanish never raise C


def first_move(clip, noise):
    """Return after how many steps C moves, if s is 1."""
    tx = lsdp.estimate_norms(clip, stddev=noise, expected_batch_size=1000)
    clipped = WithSlack(jnp.ones([]), jnp.zeros(clip.slack), True, True)
    step = jax.jit(lambda state: tx.update(clipped, state)[1])
    state, steps = tx.init(None), 0
    while lsdp.current_clip_norm(state).value == 1.0:
        state, steps = step(state), steps + 1
    return steps


SETTINGS = dict(dataset_size=1000, expected_batch_size=1000, sampling="full", delta=1e-5, steps=50)


def test_s_is_averaged_until_its_measured_noise_is_a_quarter_of_the_target():
    """With three coordinates, the noise in s is 1.5 times that of a count of all examples."""
    noise, clip = 600.0, lsdp.AdaptiveClip(1.0, slack=3)
    tx = lsdp.estimate_norms(clip, stddev=noise, expected_batch_size=1000)

    def share(slack):
        _, state = tx.update(WithSlack(jnp.ones([]), slack, True, True), tx.init(None))
        return 1 - jnp.sum(lsdp.norm_estimates(state).shares) / 2

    draws = noise * jax.random.normal(jax.random.key(0), (4000, 3))
    error = float(jax.jit(jax.vmap(share))(draws).std())
    assert error == pytest.approx(1.5 * noise / 1000, rel=0.035)  # 3 standard errors
    steps = first_move(clip, noise)
    assert steps == pytest.approx((error**2 + 1 / 1000) * (4 / clip.target) ** 2, rel=0.1)
    with pytest.warns(UserWarning, match=f"needs about {steps} steps for its first estimate"):
        lsdp.PrivacyPlan(**SETTINGS, noise_multiplier=noise, clip_norm=clip)


@pytest.mark.parametrize(
    ("starts", "factors", "steps"),
    [
        ((0,), (10.0,), 17),
        ((0, 3), (10.0, 20.0), 67),
        ((0, 17), (10.0, 100.0), 17),
        ((0, 1), (1.0, 100.0), 1),  # no warning
    ],
)
def test_the_warning_of_a_long_search_follows_the_noise_schedule(starts, factors, steps):
    noise, clip = 70.0, lsdp.AdaptiveClip(1.0)
    assert first_move(clip, lsdp.Piecewise(starts, [noise * x for x in factors])) == steps
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        schedule = lsdp.Piecewise(starts, factors)
        lsdp.PrivacyPlan(
            **SETTINGS, noise_multiplier=noise, noise_schedule=schedule, clip_norm=clip
        )
    found = [str(one.message) for one in caught]
    assert len(found) == (steps > 50 / 4)
    assert all(f"needs about {steps} steps for its first estimate" in text for text in found)
