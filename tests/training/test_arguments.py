"""Arguments of `fit` of any kind are used as meant, or refused in one sentence."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lsdp as lsdp
from optax_lsdp import training
from tests.cases import slow
from tests.training.problem import (
    PLAN,
    SHORT,
    assert_ends_as_uninterrupted,
    bits,
    fit,
    loss,
    make_data,
    make_params,
    make_plan,
    raise_at,
    reference,
)

DATA = make_data()
ALL = jnp.asarray(DATA["x"])


def test_a_list_of_examples_is_a_source():
    rows = [{"x": x, "y": y} for x, y in zip(DATA["x"], DATA["y"], strict=True)]
    assert bits(fit(SHORT, rows).params) == bits(reference(SHORT).params)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_data_are_read(dtype, tmp_path):
    half = {"x": np.array(jnp.asarray(DATA["x"], dtype)), "y": DATA["y"]}

    def widened(params, example):
        return loss(params, {**example, "x": example["x"].astype(jnp.float32)})

    assert fit(SHORT, half, loss_fn=widened, folder=tmp_path).steps == 5
    half["x"][:] = np.nan
    with pytest.raises(training.DataError, match="must be finite"):
        fit(SHORT, half, loss_fn=widened)


class Table:
    """A table such as those of pandas, whose index is a column."""

    def __init__(self, rows):
        self.to_numpy = lambda: rows

    def __len__(self):
        return len(self.to_numpy())

    def __getitem__(self, index):
        return self.to_numpy()[:, index]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"x": np.zeros((0, 3))}, "`data` must hold at least one example, got none"),
        ([], "`data` must hold at least one example, got none"),
        (iter([1, 2]), "`data` must be arrays .* got list_iterator"),
        (7, "`data` must be arrays .* got int"),
        (np.array(["a"] * 400), "`data` must hold numbers, got <U1"),
        (
            [DATA["x"], DATA["y"]],
            "must have 400 examples, .*, got 2; pass several arrays as a dict",
        ),
        ({"x": np.float32(3)}, "`data` must hold arrays .*, got a single number"),
        ((DATA["x"], DATA["y"].tolist()), "or a list of numbers; .* convert lists with np.asarray"),
        (DATA["x"].tolist(), "got a list of numbers; convert the list with np.asarray"),
        ([(row.tolist(), 1) for row in DATA["x"]], "got a list of numbers"),
        (Table(DATA["x"]), r"got Table; pass an array, such as `df.to_numpy\(np.float32\)`"),
        ("data.npz", "got str; read the file into arrays first"),
        ((DATA["x"], np.array([1] * 400, dtype=object)), "must hold numbers, got object"),
        ((np.ma.array(DATA["x"], mask=DATA["x"] > 2), DATA["y"]), "got a masked array"),
        (
            (DATA["x"], jax.random.split(jax.random.key(0), 400)),
            "got random keys; .* `fit` passes a new key",
        ),
        (
            {**DATA, "y": DATA["y"].astype(np.int64) + 2**40},
            "within the range of int32, .* in example 0",
        ),
        ({**DATA, "x": DATA["x"].astype(np.float64) * 1e300}, "finite as float32, .* example 0"),
    ],
)
def test_data_without_examples_are_refused(data, message):
    with pytest.raises((ValueError, TypeError), match=message):
        fit(SHORT, data)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"average": "ema"}, '`average` must be "polyak"'),
        ({"average": 1.5}, '`average` must be "polyak"'),
        ({"average": True}, '`average` must be "polyak"'),
        ({"average": float("nan")}, '`average` must be "polyak"'),
        ({"callbacks": print}, "`callbacks` must be a list of functions"),
        ({"callbacks": None}, "`callbacks` must be a list of functions, got None"),
        ({"callbacks": [3]}, "`callbacks` must be a list of functions"),
        ({"folder": ""}, "`folder` must be the path of a folder"),
        ({"folder": 3}, "`folder` must be the path of a folder, got 3"),
        ({"folder": __file__}, "`folder` must be a folder .* which cannot be made"),
        ({"mesh": 4}, r"`mesh` must be a jax\.sharding\.Mesh, got 4"),
        ({"loss_fn": 3}, "`loss_fn` must be a function"),
        ({"params": {"w": jnp.zeros(3), "name": "relu"}}, "`params` .* at 'name'"),
        ({"params": {}}, "`params` must hold at least one array"),
        ({"params": {"w": jnp.full(3, jnp.nan)}}, "`params` must hold arrays of finite numbers"),
        ({"params": {"params": 1.0, "batch_stats": 1.0}}, "got 'batch_stats', to which noise"),
        ({"loss_fn": lambda params, x, y, z: 0.0}, "got a function of params, x, y, z"),
        ({"loss_fn": lambda p, e: jnp.mean((ALL - e["x"]) ** 2)}, "closes over an array of all"),
    ],
)
def test_invalid_arguments_are_refused(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        fit(SHORT, **options)


def counted():
    """Return an optimizer whose state is a Python number and a NumPy array."""

    def update(updates, state, params=None):
        return jax.tree.map(lambda g: -0.1 * g, updates), {**state, "count": state["count"] + 1}

    return optax.GradientTransformation(
        lambda params: {"count": 0, "scale": np.ones(3, np.float32)}, update
    )


@pytest.mark.parametrize(
    "optimizer",
    [
        counted(),
        optax.chain(lsdp.add_gaussian_noise(0.1, key=jax.random.key(5)), optax.sgd(0.1)),
        *slow(optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(3)), optax.sgd(0.1))),
        *slow(optax.adamw(0.1)),
    ],
)
@jax.numpy_dtype_promotion("standard")  # which Optax needs
def test_optimizer_states_of_any_kind_are_restored(optimizer, tmp_path):
    plan = make_plan(steps=6)

    stop = raise_at(3, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        fit(plan, folder=tmp_path, optimizer=optimizer, callbacks=[stop], save_every=2)
    assert_ends_as_uninterrupted(tmp_path, plan, optimizer=optimizer)


def test_an_average_of_half_precision_parameters_moves():
    params = jax.tree.map(lambda x: (x + 2).astype(jnp.bfloat16), make_params())

    def steady(params, example):
        return -sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(params))

    seen = []
    done = fit(
        loss_fn=steady,
        params=params,
        average="polyak",
        callbacks=[lambda report: seen.append(np.asarray(report.params["bias"], np.float32))],
    )
    assert done.average["bias"].dtype == jnp.float32
    np.testing.assert_allclose(done.average["bias"], np.mean(seen, axis=0), rtol=1e-3)


def test_a_loss_may_close_over_a_key():
    key = jax.random.key(3)

    def noisy(params, example):
        return loss(params, example) * jax.random.uniform(key)

    assert fit(SHORT, loss_fn=noisy).stopped == "done"


def test_an_optimizer_that_is_private_already_is_refused():
    with pytest.raises(ValueError, match="or `fit` an ordinary optimizer, not a private one"):
        fit(optimizer=PLAN.optimizer(optax.sgd(0.1), jax.random.key(0)))
    with pytest.raises(TypeError, match="`plan` must be a PrivacyPlan, got dict"):
        training.fit({}, loss, {}, {}, optimizer=optax.sgd(0.1))


def test_views_work_with_a_loss_that_takes_a_key():
    def keyed(params, example, key):
        return loss(params, example) + 0 * jax.random.normal(key, ())

    viewed = training.average_views(keyed, lambda key, example: example, views=2)
    assert float(viewed(make_params(), jax.tree.map(lambda x: x[0], DATA), jax.random.key(0))) > 0


def test_the_progress_bar_ends_with_the_epsilon_spent(capsys):
    done = fit(progress=True)
    shown = capsys.readouterr().err.split("\r")[-1]
    assert f"ε = {lsdp.accounting.show_epsilon(PLAN.spent(done.ledger))}" in shown
    assert "60/60" in shown and "loss" not in shown


def test_only_a_few_microbatches_are_in_memory():
    plan = make_plan(expected_batch_size=320, steps=3)
    data = {"x": np.ones((400, 64), np.float32), "y": np.zeros(400, np.int32)}
    most = []

    def counted(params, example):
        return (example["x"] @ params).sum()

    def live():
        return sum(x.nbytes for x in jax.live_arrays() if x.shape[1:] == (64,))

    fit(
        plan,
        data,
        loss_fn=counted,
        params=jnp.zeros((64, 2)),
        microbatch_size=8,
        callbacks=[lambda report: most.append(live())],
    )
    assert max(most) <= 5 * 8 * 64 * 4  # in flight, waiting to be used, and being read


def test_a_loss_gets_its_key_by_position_or_by_name():
    def by_place(params, example, random):
        return loss(params, example) * jax.random.uniform(random)

    def by_default(params, example, key=None):
        return by_place(params, example, key)

    def by_name(params, example, *, key):
        return by_place(params, example, key)

    params, key = {"kernel": jnp.ones((16, 2)), "bias": jnp.zeros(2)}, jax.random.key(1)
    example = jax.tree.map(lambda x: jnp.asarray(x[0]), DATA)
    expected = by_place(params, example, key)
    for one in (by_place, by_default, by_name):
        kept = training.mixed_precision(one, jnp.float32)
        assert kept(params, example, key) == expected
    assert bits(fit(SHORT, loss_fn=by_default).params) == bits(fit(SHORT, loss_fn=by_name).params)


def test_labels_are_not_a_third_argument():
    with pytest.raises(TypeError) as caught:
        fit(SHORT, (DATA["x"], DATA["y"]), loss_fn=lambda params, x, y: params["bias"] @ x)
    assert any(
        "third argument of `loss_fn` is a random key" in note for note in caught.value.__notes__
    )


def test_an_example_may_keep_its_batch_axis():
    def of_batches(params, batch):
        assert batch["x"].shape == (1, 16)
        return jax.vmap(loss, (None, 0))(params, batch).mean()

    kept = fit(SHORT, loss_fn=training.keep_batch_axis(of_batches))
    np.testing.assert_allclose(kept.params["kernel"], reference(SHORT).params["kernel"], atol=1e-6)


def test_fit_inside_of_jit_is_refused():
    with pytest.raises(TypeError, match="`fit` must be called outside of jit"):
        jax.jit(lambda data: fit(SHORT, data).params)(DATA)


def test_changed_initial_values_of_a_resumed_run_give_a_warning(tmp_path):
    def resume(rate=0.1, **options):
        optimizer = optax.inject_hyperparams(optax.sgd)(rate)
        return fit(SHORT, folder=tmp_path, optimizer=optimizer, **options)

    done = resume()
    resume()  # without a warning
    with pytest.warns(UserWarning, match="`params` should be the same as when"):
        other = resume(params={"kernel": jnp.ones((16, 2)), "bias": jnp.zeros(2)})
    with pytest.warns(
        UserWarning, match="`optimizer` .its initial state, which may hold hyper-parameters"
    ):
        resume(0.5)
    assert bits(other.params) == bits(done.params)


def test_sizes_and_intervals_are_checked():
    with pytest.raises(ValueError, match="`data` must have 400 examples"):
        fit(data=make_data(300))
    with pytest.raises(ValueError, match="`data` must hold arrays of equal length"):
        fit(data={"x": np.zeros((400, 2)), "y": np.zeros(3)})
    with pytest.raises(ValueError, match="`save_every` must be a whole number"):
        fit(save_every=0)
    with pytest.raises(ValueError, match="`microbatch_size` must be a whole number"):
        fit(microbatch_size=0)
