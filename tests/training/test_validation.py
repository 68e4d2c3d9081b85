"""Mistakes of new users get one sentence that names the leaf and the remedy."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import optax_lsdp as lsdp
from tests.training.problem import SHORT, bits, fit, loss, make_data, make_params

DATA = make_data()
OBJECTS = DATA["x"].astype(object)


def with_bools():
    table = OBJECTS.copy()
    table[:, 0] = DATA["y"] == 1
    return table


def with_entry(entry):
    table = OBJECTS.copy()
    table[3, 4] = entry
    return table


class Loader:
    """Batches, such as torch.utils.data.DataLoader."""

    dataset = DATA

    def __len__(self):
        return 10

    def __iter__(self):
        return iter(())


class Stream:
    """A dataset such as those of tf.data."""

    def __len__(self):
        return 400

    def as_numpy_iterator(self):
        """Return an iterator."""
        return iter(())


class OnDevice:
    """A tensor that NumPy cannot read."""

    def __array__(self, *args, **kwargs):
        raise TypeError("can't convert cuda:0 device type tensor to numpy.\nUse Tensor.cpu()")


def ragged():
    rows = np.empty(400, object)
    rows[:] = [list(range(1 + i % 2)) for i in range(400)]
    return rows


WRONG_DATA = {
    "numbers and bools": (
        {"a": with_bools()},
        r"at 'a'; convert the array, which holds bool, float.*`df.to_numpy\(np.float32\)`",
    ),
    "text in a column": (
        {"a": with_entry("x")},
        "at 'a'; convert the array, which holds float, str, .* encode text",
    ),
    "a hole in a column": (
        {"a": with_entry(None)},
        "at 'a'; convert the array, which holds NoneType, float, .* fill in",
    ),
    "rows of lengths": ({"a": ragged()}, "at 'a'; pad its rows to equal length"),
    "text": ((DATA["x"], np.array(["a"] * 400)), "got <U1 at '1'; encode text"),
    "a masked array": ({"x": np.ma.array(DATA["x"])}, "got a masked array at 'x'"),
    "a number": ({**DATA, "z": np.float32(1)}, "leading axis of examples at 'z', got a single"),
    "lengths": (
        {**DATA, "z": np.ones(3)},
        "equal length, got lengths 400 at 'x', 400 at 'y', 3 at 'z'",
    ),
    "infinity": ({**DATA, "z": np.full(400, np.inf)}, "NaN or infinity in example 0 at 'z'"),
    "beyond 32 bits": (
        {**DATA, "z": np.full(400, 2**40)},
        "outside of this range in example 0 at 'z'",
    ),
    "lists": ([{"x": [1.0, 2.0]}] * 400, "got a list of numbers at 'x'"),
    "an infinite source": (
        [{"x": np.full(16, np.nan, np.float32), "y": np.int32(0)}] * 400,
        r"NaN or infinity in example \d+ at 'x'",
    ),
    "a loader": (Loader(), "got Loader; pass the `dataset` of the loader"),
    "a stream": (Stream(), r"got Stream; read it into arrays, as with np\.stack"),
    "a generator": (
        (x for x in DATA["x"]),
        "got generator; pass a list or an array of its examples",
    ),
    "a tensor elsewhere": (
        {"x": OnDevice()},
        "got OnDevice at 'x', which NumPy cannot convert: can",
    ),
}


@pytest.mark.parametrize("kind", WRONG_DATA)
def test_a_message_about_data_names_the_leaf(kind):
    data, message = WRONG_DATA[kind]
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        fit(SHORT, data)
    text = str(caught.value)
    assert text.startswith("`data` must") and text.endswith(".") and "\n" not in text


def state_of_training():
    return TrainState.create(apply_fn=loss, params=make_params(), tx=optax.sgd(0.1))


class Dropping(nnx.Module):
    """A module with a counter, which is no parameter."""

    def __init__(self):
        self.linear, self.drop = (
            nnx.Linear(2, 2, rngs=nnx.Rngs(0)),
            nnx.Dropout(0.5, rngs=nnx.Rngs(0)),
        )


WRONG_PARAMS = {
    "a TrainState": (
        state_of_training,
        r"got TrainState, a training state; pass the `\.params` of this state",
    ),
    "an NNX module": (Dropping, "got Rng.* at 'drop/rngs/.*nnx.split"),
}


@pytest.mark.parametrize("kind", WRONG_PARAMS)
def test_a_message_about_parameters_names_the_remedy(kind):
    make, message = WRONG_PARAMS[kind]
    with pytest.raises((ValueError, TypeError), match=f"`params` must .*{message}"):
        fit(SHORT, params=make())


GREEDY = {
    "lbfgs": (lambda: optax.lbfgs(0.1), "'value', 'grad', and 'value_fn'"),
    "polyak_sgd": (lambda: optax.polyak_sgd(), "'value'"),
    "momo": (lambda: optax.contrib.momo(), "'value'"),
    "plateau": (lambda: optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()), "'value'"),
}


@pytest.mark.parametrize("kind", GREEDY)
def test_an_optimizer_that_needs_the_loss_is_refused(kind):
    make, names = GREEDY[kind]
    message = f"`optimizer` must need gradients only, got one that also needs {names}, .*"
    with jax.numpy_dtype_promotion("standard"), pytest.raises(TypeError, match=message) as caught:
        fit(SHORT, optimizer=make())
    assert caught.value.__cause__ is not None
    params = make_params()
    tx = lsdp.privatize(
        make(), clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=4, key=jax.random.key(0)
    )
    grad, data = lsdp.clipped_grad(loss, clip_norm=1.0), jax.tree.map(jnp.asarray, DATA)
    with jax.numpy_dtype_promotion("standard"), pytest.raises(TypeError, match=message):
        jax.eval_shape(lambda p: tx.update(grad(p, data), tx.init(p), p), params)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.sgd,
        0.1,
        "sgd",
        nnx.Optimizer(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), wrt=nnx.Param),
    ],
)
def test_an_argument_that_is_no_optimizer_is_refused(optimizer):
    with pytest.raises(TypeError, match=r"`optimizer` must be an Optax optimizer, such as"):
        fit(SHORT, optimizer=optimizer)


def test_wide_labels_train_on_a_mesh_as_without_one():
    """Labels of scikit-learn are int64, for which JAX would warn."""
    wide = {"x": DATA["x"].astype(np.float64), "y": DATA["y"].astype(np.int64)}
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        spread = fit(SHORT, wide, mesh=mesh)
    assert bits(spread.params) == bits(fit(SHORT, mesh=mesh).params)
