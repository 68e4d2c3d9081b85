"""`fit` with correlated noise: runs resume to the bit, and restarts begin a new mechanism."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import optax_lsdp as lsdp
from optax_lsdp import training
from optax_lsdp.accounting import Ledger
from optax_lsdp.correlated_noise import AddCorrelatedNoiseState
from optax_lsdp.correlation import banded_inverse, square_root
from tests.oracles import toeplitz_dense
from tests.training.problem import (
    Crash,
    assert_close,
    bits,
    fit,
    make_data,
    make_params,
    make_plan,
    raise_at,
    reference,
)

STEPS = 18
small = functools.partial(make_plan, expected_batch_size=20, steps=STEPS)
BANDED = small(correlation=4)
INVERSE = small(
    correlation=banded_inverse(STEPS, 3, min_separation=20), neighbouring="zero_out", epochs=None
)
pytestmark = pytest.mark.filterwarnings("ignore:The run in this folder was made with different")


def crash(folder, step, plan, **options):
    with pytest.raises(Crash):
        fit(plan, folder=folder, save_every=3, callbacks=[raise_at(step)], **options)


FIVE = (1, 2, 5, 9, 16)


@pytest.mark.parametrize(
    ("plan", "steps"),
    [
        (BANDED, (2, 5, 16)),
        pytest.param(BANDED, FIVE, marks=pytest.mark.full),
        pytest.param(INVERSE, FIVE, marks=pytest.mark.full),
    ],
    ids=["banded", "banded, five times", "inverse, five times"],
)
def test_a_run_that_crashes_ends_like_an_uninterrupted_one(plan, steps, tmp_path):
    """And a changed strategy is refused in between, without harm to the run."""
    for step in steps:
        crash(tmp_path, step, plan)
        for other in (square_root(STEPS, 4), None):
            with pytest.raises(ValueError, match="`plan` must be the plan of the run in"):
                fit(small(correlation=other), folder=tmp_path)
    done, alone = fit(plan, folder=tmp_path), reference(plan)
    assert done.stopped == alone.stopped == "done"
    assert bits(done.params) == bits(alone.params)
    assert done.ledger == alone.ledger == Ledger(plan.mechanism.phases)
    assert plan.spent(done.ledger) == pytest.approx(plan.epsilon)


def train_on_noise(plan, seen, **options):
    """Train without gradients, and put the noise of each step into `seen`, with scale 1.

    The optimizer replaces the parameters by the noisy mean.
    """
    scale = plan.expected_batch_size / plan.noise_multiplier

    def record(report):
        seen[report.step] = scale * np.float64(report.params)

    return fit(
        plan,
        loss_fn=lambda params, example: 0 * params.sum(),
        params=jnp.zeros(1000),
        optimizer=optax.stateless(lambda u, p: jax.tree.map(jnp.subtract, u, p)),
        save_every=3,
        **{**options, "callbacks": [record, *options.get("callbacks", ())]},
    )


@pytest.mark.parametrize("plan", [BANDED, INVERSE], ids=["banded", "inverse"])
def test_a_restart_begins_a_second_mechanism_from_an_empty_state(plan, tmp_path):
    plan = replace(plan, epsilon=4 * plan.epsilon)
    changed = make_data()
    changed["x"][7] += 1
    noises = {}
    for step, options in ((8, {}), (13, {"data": changed})):  # restarts from step 6
        with pytest.raises(Crash):
            train_on_noise(plan, noises, folder=tmp_path, callbacks=[raise_at(step)], **options)
    done = train_on_noise(plan, noises, folder=tmp_path, data=changed)  # goes on at step 12
    assert done.stopped == "done"
    assert [phase.steps for phase in done.ledger.phases] == [8, 12]
    first, second = (replace(plan.event(0), steps=steps) for steps in (8, 12))
    assert plan.spent(done.ledger) == (first + second).epsilon(plan.delta_of_noise)
    if plan.sampling == "cyclic_poisson":
        assert sum(part.steps for part in done.ledger.parts) == 2 + 3  # ⌈8/4⌉ + ⌈12/4⌉
    rows = np.stack([noises[step + 1] for step in range(6, STEPS)])
    drawn = toeplitz_dense(plan.correlation.column()[:12]) @ rows
    np.testing.assert_allclose(drawn @ drawn.T / 1000, np.eye(12), atol=0.2)  # 6 standard errors


SHUFFLED = small(sampling="shuffled", neighbouring="zero_out", steps=25, noise_multiplier=9.0)


@pytest.mark.parametrize(
    ("plan", "steps", "counted"),
    [
        (small(correlation=4, epsilon=3.89, unit="user"), 17, [9, 8]),
        (SHUFFLED, 20, [9, 20]),
    ],
    ids=["cyclic, users", "shuffled"],
)
def test_new_noise_after_a_clean_stop_does_not_exceed_the_budget(plan, steps, counted, tmp_path):
    """The ledger is that of the plan until the restart, which begins a new cycle or order."""

    def stop(report):
        if report.step == 9:
            raise training.StopTraining

    data = make_data(800 if plan.unit == "user" else 400)

    def units():
        is_user = plan.unit == "user"
        return training.UserData(data, np.arange(800) // 2, max_examples=2) if is_user else data

    fit(plan, units(), folder=tmp_path, callbacks=[stop])
    data["x"][7] += 1
    done = fit(plan, units(), folder=tmp_path)
    assert (done.stopped, done.steps) == ("budget", steps)
    assert [phase.steps for phase in done.ledger.phases] == counted
    assert plan.spent(done.ledger) <= plan.epsilon


def test_past_noises_are_sharded_as_their_leaves_and_noise_is_that_of_one_device():
    mesh = jax.make_mesh((2,), ("examples",), devices=jax.devices()[:2])
    split = jax.NamedSharding(mesh, PartitionSpec("examples"))
    params = make_params()
    sharded = params | {"kernel": jax.device_put(params["kernel"], split)}
    done, alone = fit(BANDED, params=sharded, mesh=mesh), reference(BANDED)
    assert done.params["kernel"].sharding.is_equivalent_to(split, 2)
    assert_close(done.params, alone.params, atol=1e-5)
    state = BANDED.optimizer(optax.sgd(1.0), jax.random.key(0)).init(sharded)
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, AddCorrelatedNoiseState))
    past = next(x for x in nodes if isinstance(x, AddCorrelatedNoiseState)).past
    assert past["kernel"].sharding.shard_shape((3, 16, 2)) == (3, 8, 2)


def test_watching_is_refused_by_name():
    with pytest.raises(ValueError, match="`watch` must be False with correlated noise, got True"):
        fit(BANDED, watch=True)
    watched = lsdp.watch(optax.sgd(0.1), steps=3, stddev=1.0)
    with pytest.raises(ValueError, match="`optimizer` must not be watched with a `correlation`"):
        fit(BANDED, optimizer=watched)
