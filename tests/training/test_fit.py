"""fit does what a loop of the plan's parts does, and nothing else."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lsdp as lsdp
from optax_lsdp import training
from optax_lsdp.training._batches import Batches
from optax_lsdp.training._data import Examples
from tests.training.problem import PLAN, bits, fit, loss, make_data, make_params, make_plan

KEY = jax.random.key(5)


def by_hand(plan, optimizer, steps, seen=None):
    """Train with the parts of a plan, as README shows, from the keys that fit would derive."""
    run_key = lsdp.training._run.fold_in_text(KEY, "first")
    sampler, data = plan.sampler(run_key), make_data(plan.dataset_size)
    tx, params = plan.optimizer(optimizer, run_key), make_params()
    state, gradient = tx.init(params), plan.clipped_grad(loss)

    @jax.jit
    def take(params, state, batch, mask):
        updates, state = tx.update(gradient(params, batch, mask), state, params)
        return optax.apply_updates(params, updates), state

    for step in range(steps):
        indices, mask = sampler.batch(step)
        batch = jax.tree.map(lambda leaf, indices=indices: leaf[indices], data)
        params, state = take(params, state, batch, mask)
        if seen is not None:
            seen.append(params)
    return params


def test_fit_is_the_loop_of_the_parts():
    done = fit()
    assert done.stopped == "done" and done.steps == PLAN.steps == done.ledger.steps
    expected = by_hand(PLAN, optax.sgd(0.1, momentum=0.9), PLAN.steps)
    for got, want in zip(*map(jax.tree.leaves, (done.params, expected)), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)
    assert PLAN.spent(done.ledger) <= PLAN.epsilon


def test_microbatches_change_nothing_but_memory():
    whole, parts = fit(), fit(microbatch_size=16)
    for got, want in zip(*map(jax.tree.leaves, (parts.params, whole.params)), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("expected", [2, 40])
def test_chunks_of_padding_are_left_out_and_no_example_is(expected):
    plan = make_plan(expected_batch_size=expected)
    batches = Batches(plan, Examples(make_data()), KEY, 4, None)
    stream = batches.stream(0)
    for step in range(20):
        chunks = []
        while not chunks or not chunks[-1].is_last:
            chunks.append(next(stream))
        batch = batches.sampler.batch(step)
        found = np.concatenate([read.chunk.examples["x"][read.chunk.mask] for read in chunks])
        np.testing.assert_array_equal(found, make_data()["x"][batch.indices[batch.mask]])
        assert len(chunks) == max(2, -(-batch.mask.sum() // 4)) < batches.count
    with jax.enable_x64(True):  # where rounding hides nothing: in float32 it reaches 1.4e-6
        data = {name: x.astype(np.float64) if name == "x" else x for name, x in make_data().items()}
        params = jax.tree.map(lambda x: x.astype(jnp.float64), make_params())
        whole, parts = (fit(plan, data, params=params, microbatch_size=m) for m in (None, 4))
    for got, want in zip(*map(jax.tree.leaves, (parts.params, whole.params)), strict=True):
        assert got.dtype == jnp.float64
        np.testing.assert_allclose(got, want, atol=1e-12)


def memory(plan, microbatch_size):
    run = training._run.Run(
        plan,
        Examples(make_data(plan.dataset_size)),
        optax.sgd(0.1),
        None,
        None,
        microbatch_size,
        None,
    )
    run.start(loss, make_params(), KEY, None)
    run.close()
    found = run.take_step.memory_analysis()
    return found.temp_size_in_bytes + found.argument_size_in_bytes + found.output_size_in_bytes


def test_a_large_batch_takes_the_memory_of_a_microbatch():
    def plan(batch):
        return lsdp.PrivacyPlan(
            dataset_size=40_000,
            expected_batch_size=batch,
            steps=5,
            noise_multiplier=1.0,
            delta=1e-6,
        )

    assert memory(plan(16_384), 512) <= 1.2 * memory(plan(400), 512)


def test_averages_are_those_of_the_parameters():
    seen = []
    by_hand(PLAN, optax.sgd(0.5), PLAN.steps, seen)
    mean = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *seen)
    done = fit(optimizer=optax.sgd(0.5), average="polyak")
    for got, want in zip(*map(jax.tree.leaves, (done.average, mean)), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)
    expected = make_params()
    for params in seen:
        expected = jax.tree.map(lambda m, p: 0.9 * m + 0.1 * p, expected, params)
    done = fit(optimizer=optax.sgd(0.5), average=0.9)
    for got, want in zip(*map(jax.tree.leaves, (done.average, expected)), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)


def test_callbacks_are_told_of_every_step():
    reports = []
    fit(callbacks=[lambda report: reports.append((report.step, report.epsilon))])
    steps, epsilons = zip(*reports, strict=True)
    assert list(steps) == list(range(1, PLAN.steps + 1))
    assert list(epsilons) == sorted(epsilons) and epsilons[-1] <= PLAN.epsilon


def test_views_are_averaged_before_the_clip():
    def augment(key, example):
        shift = jax.random.normal(key, example["x"].shape)
        return {**example, "x": example["x"] + shift}

    viewed = training.average_views(loss, augment, views=3)
    example = jax.tree.map(lambda leaf: leaf[0], make_data())
    params = jax.tree.map(lambda x: x + 0.1, make_params())
    seen = [augment(key, example) for key in jax.random.split(KEY, 3)]
    expected = np.mean([float(loss(params, view)) for view in seen])
    assert float(viewed(params, example, KEY)) == pytest.approx(expected, rel=1e-6)
    assert fit(loss_fn=viewed).steps == PLAN.steps


def test_every_example_and_step_has_a_key_of_its_own():
    """Gradients that are the keys' bits: no two of them are the same."""
    batches = Batches(PLAN, Examples(make_data()), KEY, 16, None)
    keys = [read.chunk.key for read in itertools.islice(batches.stream(0), 2 * batches.count)]
    assert len({tuple(jax.random.key_data(key).tolist()) for key in keys}) == len(keys)


def test_half_precision_keeps_the_parameters_in_float32():
    done = fit(loss_fn=training.mixed_precision(loss))
    assert {leaf.dtype for leaf in jax.tree.leaves(done.params)} == {jnp.dtype("float32")}
    exact = fit()
    for got, want in zip(*map(jax.tree.leaves, (done.params, exact.params)), strict=True):
        assert np.abs(got - want).max() < 0.02  # bfloat16 has 8 bits


def test_a_smoothing_transform_may_be_given():
    plain = fit(smoothing=lsdp.laplacian_smooth(0.5))
    assert bits(plain.params) == bits(fit().params)
    assert bits(fit(smoothing=0.0).params) != bits(plain.params)


def test_schedules_of_clip_norms_and_noise_are_followed():
    pieces = lsdp.Piecewise((0, 10), (1.0, 0.5))
    plan = make_plan(steps=20, noise_schedule=pieces, clip_norm=pieces)
    done = fit(plan)
    assert [run.noise_multiplier for run in done.ledger.phases] == [1.0, 0.5]
    assert [run.steps for run in done.ledger.phases] == [10, 10]


def test_memory_mapped_files_are_read(tmp_path):
    data = make_data()
    np.save(tmp_path / "x.npy", data["x"])
    mapped = {"x": np.load(tmp_path / "x.npy", mmap_mode="r"), "y": data["y"]}
    assert bits(fit(data=mapped).params) == bits(fit().params)


class Source:
    """A data source as Grain has them."""

    def __init__(self, data):
        self.data, self.read = data, []

    def __len__(self):
        return len(self.data["y"])

    def __getitem__(self, index):
        self.read.append(index)
        return jax.tree.map(lambda leaf: leaf[index], self.data)


def test_a_source_with_random_access_is_read():
    source = Source(make_data())
    assert bits(fit(data=source).params) == bits(fit().params)
