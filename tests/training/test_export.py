"""Exported files hold the parameters, and nothing that must not be released."""

import io
import zipfile

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lsdp as lsdp
from optax_lsdp import training
from tests.training.problem import reference


def exported(tmp_path, params):
    training.export_params(tmp_path / "model.npz", params)
    with np.load(tmp_path / "model.npz") as found:
        return dict(found)


def test_parameters_are_written_under_their_paths(tmp_path):
    done = reference()
    found = exported(tmp_path, done.params)
    assert sorted(found) == ["bias", "kernel"]
    np.testing.assert_array_equal(found["kernel"], done.params["kernel"])


@pytest.mark.parametrize("name", ["file", "allow_pickle", "a b"])
def test_names_that_numpy_uses_itself_are_accepted(name, tmp_path):
    assert exported(tmp_path, {name: np.ones(3, np.float32)})[name].shape == (3,)


def test_half_precision_is_written_as_float32(tmp_path):
    found = exported(tmp_path, {"w": jnp.full(3, 1.5, jnp.bfloat16)})
    assert found["w"].dtype == np.float32 and found["w"][0] == 1.5


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"key": jax.random.key(7)}, "no key, got key<fry> at 'key'"),
        ({"key": jax.random.key_data(jax.random.key(7))}, "no key, got uint32"),
        ({"rate": 0.1}, "no key, got float at 'rate'"),
        ({"w": lsdp.Clipped(jnp.ones(1), 1.0)}, "got a clipped sum at 'w', which has no noise"),
        (
            {"a": {"b": jnp.ones(1)}, "a/b": jnp.ones(1)},
            "a different name for each array, got 'a/b' twice",
        ),
    ],
)
def test_anything_but_parameters_is_refused(params, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        exported(tmp_path, params)
    assert not list(tmp_path.iterdir())


def test_load_returns_what_export_has_written(tmp_path):
    params = {"a": [jnp.arange(3.0), jnp.ones((2, 2), jnp.bfloat16)], "b": jnp.float32(4)}
    training.export_params(tmp_path / "model", params)
    found = training.load_params(tmp_path / "model", jax.eval_shape(lambda: params))
    chex.assert_trees_all_equal(found, params)
    chex.assert_trees_all_equal_dtypes(found, params)


@pytest.mark.parametrize(
    ("like", "message"),
    [
        ({"w": jnp.ones(4)}, r"got \(4,\) at 'w', where the file has \(3,\)"),
        ({"w": jnp.ones(3), "v": jnp.ones(3)}, r"got \(3,\) at 'v', where the file has nothing"),
        ({}, r"got nothing at 'w', where the file has \(3,\)"),
    ],
)
def test_another_model_is_refused(like, message, tmp_path):
    training.export_params(tmp_path / "model.npz", {"w": jnp.ones(3)})
    with pytest.raises(ValueError, match=message):
        training.load_params(tmp_path / "model.npz", like)


def write_members(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)


def as_npy(array, **options):
    file = io.BytesIO()
    np.lib.format.write_array(file, array, **options)
    return file.getvalue()


PRIVATE = {
    "per-example results": lsdp.PerExample(jnp.ones(3), jnp.ones(3)),
    "auxiliary values of each example": lsdp.PerExample(
        jnp.ones(3), {"w": jnp.ones(3)}, jnp.ones((3, 2))
    ),
    "a clipped sum": lsdp.Clipped(jnp.ones(3), 1.0),
    "a quantized sum": lsdp.discrete.QuantizedSum(jnp.ones(3, jnp.int32), 0.1, 10, 1),
    "a report": training.StepReport(jnp.ones(()), jnp.ones(2), (), jnp.ones(()), jnp.ones(())),
    "an optimizer's state": lsdp.add_gaussian_noise(stddev=1.0, key=jax.random.key(0)).init(
        jnp.ones(2)
    ),
    "objects": np.array([lambda: jax.random.key(0)], object),
}


@pytest.mark.parametrize("where", ["alone", "in a dict", "in a tuple"])
@pytest.mark.parametrize("kind", PRIVATE)
def test_nothing_private_is_written_wherever_it_is_in_the_tree(kind, where, tmp_path):
    params = {
        "alone": PRIVATE[kind],
        "in a dict": {"a": jnp.ones(2), "b": {"c": PRIVATE[kind]}},
        "in a tuple": (jnp.ones(2), [PRIVATE[kind]]),
    }[where]
    with pytest.raises(ValueError, match=r"^`params` must"):
        exported(tmp_path, params)
    assert not list(tmp_path.iterdir())


NAMES = ("../../x", "..", ".", "/etc/x", "a//b", "a/", "", "a\\b", "C:\\x", "c:/x", "a/../b")
NAMES += ("a\nb", "a\0b", "\x7f", "\u202e", "\ud800", "a.npy", "x" * 2000)


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_a_name_that_could_be_read_as_a_path_elsewhere_is_refused(name, tmp_path):
    with pytest.raises(ValueError, match=r"^`params` must have names"):
        exported(tmp_path, {name: jnp.ones(1), "w": jnp.ones(1)})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["mlp/~/linear_0", "kernel:0", "W", "größe", "...", "a.npz", "-"])
def test_usual_names_of_models_are_written(name, tmp_path):
    params = {name: jnp.arange(2.0), "w": jnp.ones(2)}
    training.export_params(tmp_path / "model", params)
    chex.assert_trees_all_equal(training.load_params(tmp_path / "model", params), params)


def huge_header():
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


HOSTILE = {
    "no archive": b"garbage",
    "nothing": b"",
    "an array": as_npy(np.ones(3, np.float32)),
    "a pickle": [("w.npy", as_npy(np.array([{}], object), allow_pickle=True))],
    "an array that is huge": [("w.npy", huge_header())],
    "an array that is cut": [("w.npy", as_npy(np.ones(3, np.float32))[:-4])],
    "a damaged header": [("w.npy", b"\x93NUMPY\x01\x00\x05\x00abcde")],
    "two of a name": [("w.npy", as_npy(np.ones(3)))] * 2,
    "text": [("w.npy", as_npy(np.array(["a", "b", "c"])))],
    "whole numbers": [("w.npy", as_npy(np.ones(3, np.int64)))],
    "another name": [("w.npy", as_npy(np.ones(3))), ("../../x.npy", as_npy(np.ones(3)))],
    "no name of an array": [("w.npy", as_npy(np.ones(3))), ("run.py", b"import os")],
}


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_file_that_was_not_exported_is_refused(kind, tmp_path):
    content, path = HOSTILE[kind], tmp_path / "model.npz"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        write_members(path, content)
    with pytest.raises(ValueError, match=r"^`(path|like)` must"):
        training.load_params(path, {"w": jnp.ones(3)})
