"""What may be released is written whole, and nothing else."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lsdp as lsdp
from optax_lsdp import training
from tests.training.problem import fit


def exported(tmp_path, params):
    training.export_params(tmp_path / "model.npz", params)
    with np.load(tmp_path / "model.npz") as found:
        return dict(found)


def test_parameters_are_written_under_their_paths(tmp_path):
    done = fit()
    found = exported(tmp_path, done.params)
    assert sorted(found) == ["bias", "kernel"]
    np.testing.assert_array_equal(found["kernel"], done.params["kernel"])


@pytest.mark.parametrize("name", ["file", "allow_pickle", "a b"])
def test_any_name_will_do(name, tmp_path):
    assert exported(tmp_path, {name: np.ones(3, np.float32)})[name].shape == (3,)


def test_half_precision_can_be_read_again(tmp_path):
    found = exported(tmp_path, {"w": jnp.full(3, 1.5, jnp.bfloat16)})
    assert found["w"].dtype == np.float32 and found["w"][0] == 1.5


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"key": jax.random.key(7)}, "no key, got key<fry> at 'key'"),
        ({"key": jax.random.key_data(jax.random.key(7))}, "no key, got uint32"),
        ({"rate": 0.1}, "no key, got float at 'rate'"),
        ({"w": lsdp.Clipped(jnp.ones(1), 1.0)}, "got a clipped sum at 'w', which has no noise"),
        ({"a": {"b": jnp.ones(1)}, "a/b": jnp.ones(1)}, "different names, got two of 'a/b'"),
    ],
)
def test_what_is_no_parameter_is_refused(params, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        exported(tmp_path, params)
    assert not list(tmp_path.iterdir())


def test_what_is_written_is_read_again(tmp_path):
    params = {"a": [jnp.arange(3.0), jnp.ones((2, 2), jnp.bfloat16)], "b": jnp.float32(4)}
    training.export_params(tmp_path / "model", params)
    found = training.load_params(tmp_path / "model", jax.eval_shape(lambda: params))
    chex.assert_trees_all_equal(found, params)
    chex.assert_trees_all_equal_dtypes(found, params)


@pytest.mark.parametrize(
    ("like", "message"),
    [
        ({"w": jnp.ones(4)}, r"got \(4,\) at 'w' where it has \(3,\)"),
        ({"w": jnp.ones(3), "v": jnp.ones(3)}, r"got \(3,\) at 'v' where it has nothing"),
        ({}, r"got nothing at 'w' where it has \(3,\)"),
    ],
)
def test_another_model_is_refused(like, message, tmp_path):
    training.export_params(tmp_path / "model.npz", {"w": jnp.ones(3)})
    with pytest.raises(ValueError, match=message):
        training.load_params(tmp_path / "model.npz", like)
