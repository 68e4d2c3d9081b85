"""Which releases a training curve accepts, and the signal-to-noise ratio that they have."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lsdp as lsdp
from tests.test_watching import feed


def test_leaves_beyond_int32_are_watched():
    tx = lsdp.watch(optax.sgd(0.1), steps=4, stddev=1.0)
    huge = jax.ShapeDtypeStruct((2**16, 2**15), jnp.float32)
    found = jax.eval_shape(lambda y: tx.update(y, tx.init(y), y)[1].ratio, huge)
    assert found.shape == (1,)


@pytest.mark.parametrize("scale", [jnp.bfloat16(0.5), jnp.int32(1), 1])
def test_the_scale_of_a_release_may_have_any_dtype(scale):
    tx, params = lsdp.watch(optax.sgd(0.1), steps=4, stddev=1.0), jnp.ones(3)
    _, state = tx.update(params, tx.init(params), params, release_scale=scale)
    expected = 1 / float(scale) ** 2 - 1  # ‖y‖² = d, and s is the scale
    assert float(state.ratio[0]) == pytest.approx(expected)


def test_parameters_may_be_split_where_releases_are_not():
    mesh = jax.make_mesh((4, 2), ("x", "y"))  # explicit axes
    shapes, specs = {"a": (8, 16), "b": (8,), "c": ()}, {"a": ("x", "y"), "b": ("x",), "c": ()}
    curves = []
    for names in (specs, dict.fromkeys(specs, ())):
        with jax.set_mesh(mesh):
            params = {
                k: jax.device_put(jnp.ones(shapes[k]), jax.NamedSharding(mesh, jax.P(*names[k])))
                for k in shapes
            }
            release = {k: jnp.full(shapes[k], 0.5) for k in shapes}
            tx = lsdp.watch(optax.add_decayed_weights(0.1), steps=4, stddev=1.0)
            state = tx.init(params)
            for _ in range(3):
                _, state = jax.jit(tx.update)(release, state, params)
            curves.append(np.asarray(state.curve))
    np.testing.assert_allclose(curves[0], curves[1], rtol=1e-5)  # another order of addition


def test_silent_releases_do_not_count_in_the_signal_to_noise_ratio():
    tx = lsdp.watch(optax.sgd(0.1), steps=20, stddev=0.5)
    params, update = jnp.zeros(30), jax.jit(tx.update)
    rows = np.random.default_rng(3).normal(size=(12, 30)).astype(np.float32)
    ratios = []
    for silent in ([], [0, 1, 2], [4, 9], [8, 12]):  # these come before, between and after probes
        state, heard = tx.init(params), iter(rows)
        for step in range(12 + len(silent)):
            release, scale = (params, 0.0) if step in silent else (next(heard), 1.0)
            _, state = update(release, state, params, release_scale=scale)
        ratios.append(lsdp.training_curve(state).signal_to_noise)
    assert ratios == [ratios[0]] * 4 and ratios[0] > 0


def test_signal_to_noise_is_zero_for_noise_and_right_for_a_known_signal():
    steps, stddev = 20, optax.linear_schedule(0.5, 1.0, 10)
    tx = lsdp.watch(optax.sgd(0.1), steps=steps, stddev=stddev)
    params = {"noise": jnp.zeros(1000), "signal": jnp.zeros((20, 50)), "empty": jnp.zeros((0, 3))}
    stddevs = [float(stddev(step)) for step in range(steps)]
    normal = np.random.default_rng(5).normal(size=(steps, 2000)).astype(np.float32)
    releases = [
        params | {"noise": s * noise[:1000], "signal": s * noise[1000:].reshape(20, 50) + 1}
        for s, noise in zip(stddevs, normal, strict=True)
    ]
    ratio = lsdp.training_curve(feed(tx, releases, params)).signal_to_noise
    weights = {**dict.fromkeys(range(8), 1), 8: 8, 16: 8}  # every eighth release stands for eight
    for name in ("noise", "signal"):
        energies = [float(np.square(releases[t][name], dtype=np.float64).sum()) for t in weights]
        each = [e / (1000 * stddevs[t] ** 2) - 1 for e, t in zip(energies, weights, strict=True)]
        expected = np.average(each, weights=list(weights.values()))
        rounding = 1e-5  # of the energy, which is a thousand times the noise in the ratio
        assert ratio[name] == pytest.approx(expected, rel=rounding, abs=rounding)
    error = np.sqrt(2 * np.square([*weights.values()]).sum() / 1000) / sum(weights.values())
    assert abs(ratio["noise"]) < 4 * error and ratio["empty"] == 0
    expected = np.average([1 / stddevs[t] ** 2 for t in weights], weights=[*weights.values()])
    assert abs(ratio["signal"] - expected) < 4 * error * np.sqrt(1 + 2 * expected)
