"""`fit` does what a loop of the plan's parts does, and nothing else."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lsdp as lsdp
from optax_lsdp import training
from optax_lsdp._keys import fold_in_text
from optax_lsdp.training import _data
from optax_lsdp.training._data import BatchReader, describe_microbatch, open_data
from optax_lsdp.training._multihost import Placement
from optax_lsdp.training._resume import Compiler
from optax_lsdp.training._step import CompiledStep, State, make_step
from tests.training.problem import (
    PLAN,
    SEED,
    SHORT,
    TWENTY,
    Source,
    assert_close,
    bits,
    fit,
    loss,
    make_data,
    make_params,
    make_plan,
    reference,
)

KEY = jax.random.key(SEED)


def train_by_hand(plan, optimizer, steps):
    """Train with the parts of a plan and the keys of `fit`; return the parameters of each step."""
    run_key = fold_in_text(KEY, "first")
    sampler, data = plan.sampler(run_key), make_data(plan.dataset_size)
    tx, params = plan.optimizer(optimizer, run_key), make_params()
    state, gradient = tx.init(params), plan.clipped_grad(loss)

    @jax.jit
    def take(params, state, batch, mask):
        updates, state = tx.update(gradient(params, batch, mask), state, params)
        return optax.apply_updates(params, updates), state

    seen = []
    for step in range(steps):
        indices, mask = sampler.batch(step)
        batch = jax.tree.map(lambda leaf, indices=indices: leaf[indices], data)
        params, state = take(params, state, batch, mask)
        seen.append(params)
    return seen


def test_fit_equals_a_loop_of_the_parts():
    done = reference()
    assert done.stopped == "done" and done.steps == PLAN.steps == done.ledger.steps
    expected = train_by_hand(PLAN, optax.sgd(0.1, momentum=0.9), PLAN.steps)[-1]
    assert_close(done.params, expected)
    assert PLAN.spent(done.ledger) <= PLAN.epsilon


def test_microbatches_change_nothing_but_memory():
    assert_close(fit(TWENTY, microbatch_size=16).params, reference(TWENTY).params)


def make_reader(plan, thread, size):
    data = open_data(make_data(plan.dataset_size))
    return BatchReader(plan, data, KEY, size=size, placement=Placement(None), thread=thread)


@pytest.mark.parametrize("expected", [2, 40])
def test_microbatches_of_padding_are_skipped_and_no_example_is(expected):
    plan = make_plan(expected_batch_size=expected, steps=20)
    with ThreadPoolExecutor(1) as thread:
        reader = make_reader(plan, thread, 4)
        for step in range(plan.steps):
            reads = [reader.next()]
            while not reads[-1].is_last:
                reads.append(reader.next())
            batch = reader.sampler.batch(step)
            parts = [np.asarray(read.microbatch.examples["x"]) for read in reads]
            masks = [np.asarray(read.microbatch.mask) for read in reads]
            found = np.concatenate([x[mask] for x, mask in zip(parts, masks, strict=True)])
            np.testing.assert_array_equal(found, make_data()["x"][batch.indices[batch.mask]])
            assert len(reads) == max(2, -(-batch.mask.sum() // 4)) < reader.sampler.size // 4
    with jax.enable_x64(True):  # where rounding hides nothing: in float32 it reaches 1.4e-6
        data = {name: x.astype(np.float64) if name == "x" else x for name, x in make_data().items()}
        params = jax.tree.map(lambda x: x.astype(jnp.float64), make_params())
        whole, parts = (fit(plan, data, params=params, microbatch_size=m) for m in (None, 4))
    assert {x.dtype for x in jax.tree.leaves(parts.params)} == {jnp.dtype("float64")}
    assert_close(parts.params, whole.params, atol=1e-12)


def memory(plan, microbatch_size):
    """Return the bytes that the compiled step takes."""
    optimizer, params = plan.optimizer(optax.sgd(0.1), KEY), make_params()
    state = State(params, optimizer.init(params), (), KEY)
    examples = open_data(make_data(4))
    compiled = CompiledStep(
        make_step(plan, loss, optimizer, None),
        state,
        describe_microbatch(examples, microbatch_size, KEY, Placement(None)),
        count=2,
        compile=lambda function, *arguments: function.lower(*arguments).compile(),
        replicated=None,
    ).compiled
    found = compiled.memory_analysis()
    return found.temp_size_in_bytes + found.argument_size_in_bytes + found.output_size_in_bytes


def test_a_large_batch_takes_the_memory_of_a_microbatch():
    def plan(batch):
        return make_plan(dataset_size=40_000, expected_batch_size=batch, steps=5, delta=1e-6)

    assert memory(plan(16_384), 512) <= 1.2 * memory(plan(400), 512)


def test_averages_are_those_of_the_parameters():
    seen = train_by_hand(TWENTY, optax.sgd(0.5), TWENTY.steps)
    mean = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *seen)
    assert_close(fit(TWENTY, optimizer=optax.sgd(0.5), average="polyak").average, mean)
    expected = make_params()
    for params in seen:
        expected = jax.tree.map(lambda m, p: 0.9 * m + 0.1 * np.asarray(p), expected, params)
    assert_close(fit(TWENTY, optimizer=optax.sgd(0.5), average=0.9).average, expected)


def test_callbacks_get_a_report_of_every_step():
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
    assert fit(SHORT, loss_fn=viewed).steps == SHORT.steps


def test_every_microbatch_of_every_step_has_its_own_key():
    with ThreadPoolExecutor(1) as thread:
        reader = make_reader(PLAN, thread, 16)
        count = 2 * reader.sampler.size // 16
        keys = [reader.next().microbatch.key for _ in range(count)]
    assert len({tuple(jax.random.key_data(key).tolist()) for key in keys}) == len(keys)


def test_half_precision_keeps_the_parameters_in_float32():
    done = fit(loss_fn=training.mixed_precision(loss))
    assert {leaf.dtype for leaf in jax.tree.leaves(done.params)} == {jnp.dtype("float32")}
    for got, want in zip(*map(jax.tree.leaves, (done.params, reference().params)), strict=True):
        assert np.abs(got - want).max() < 0.02  # bfloat16 has 8 bits


def test_a_smoothing_transform_replaces_the_smoothing_of_the_plan():
    assert bits(fit(smoothing=lsdp.laplacian_smooth(0.5)).params) == bits(reference().params)
    assert bits(fit(smoothing=0.0).params) != bits(reference().params)


def test_schedules_of_clip_norms_and_noise_are_followed():
    pieces = lsdp.Piecewise((0, 10), (1.0, 0.5))
    plan = make_plan(steps=20, noise_schedule=pieces, clip_norm=pieces)
    done = fit(plan)
    assert [phase.noise_multiplier for phase in done.ledger.phases] == [1.0, 0.5]
    assert [phase.steps for phase in done.ledger.phases] == [10, 10]


def test_memory_mapped_files_are_read(tmp_path):
    data = make_data()
    np.save(tmp_path / "x.npy", data["x"])
    mapped = {"x": np.load(tmp_path / "x.npy", mmap_mode="r"), "y": data["y"]}
    assert bits(fit(data=mapped).params) == bits(reference().params)


def test_a_source_is_read_by_index():
    source = Source(make_data())
    assert bits(fit(data=source).params) == bits(reference().params)


def test_fit_works_in_a_checkout_that_is_not_installed(tmp_path):
    """The package is on the path, and its metadata is not."""
    site = Path(jax.__file__).parents[1]
    for entry in site.iterdir():
        if not entry.name.startswith(("optax_lsdp", "_optax_lsdp", "__editable__")):
            (tmp_path / entry.name).symlink_to(entry)
    (tmp_path / "optax_lsdp").symlink_to(Path(lsdp.__file__).parent)
    script = (
        "import importlib.metadata as metadata\n"
        "assert not [d for d in metadata.distributions() if d.name == 'optax-lsdp']\n"
        "import jax.numpy as jnp, optax\n"
        "from optax_lsdp import PrivacyPlan, training\n"
        "plan = PrivacyPlan(dataset_size=4, expected_batch_size=2, steps=1, noise_multiplier=1.0, "
        "delta=0.1)\n"
        "done = training.fit(plan, lambda p, x: p * x, jnp.ones(()), jnp.ones(4), "
        "optimizer=optax.sgd(0.1), folder='run', progress=False)\n"
        "assert done.stopped == 'done'\n"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_data_are_hashed_only_for_a_folder(tmp_path, monkeypatch):
    hashed = []
    update = _data.update_digest

    def remember(digest, tree):
        hashed.append(tree)
        update(digest, tree)

    monkeypatch.setattr(_data, "update_digest", remember)
    fit(SHORT)
    assert not hashed
    fit(SHORT, folder=tmp_path)
    assert hashed


def refuse_above(most, monkeypatch, *, at_run_time):
    """Refuse microbatches of more than `most` examples; return the sizes that are compiled."""
    compile, sizes = Compiler.compile, []

    def compile_or_refuse(self, function, *arguments):
        sizes.append(arguments[-1].mask.shape[0])
        error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        compiled = compile(self, function, *arguments)
        if sizes[-1] <= most:
            return compiled
        if not at_run_time:
            raise error
        refusing = mock.Mock(wraps=compiled, side_effect=error)
        refusing.output_shardings = compiled.output_shardings
        return refusing

    monkeypatch.setattr(Compiler, "compile", compile_or_refuse)
    return sizes


@pytest.mark.parametrize("at_run_time", [False, True])
@pytest.mark.parametrize(("passed", "most", "fitting"), [(None, 30, 20), (40, 10, 10), (2, 1, 1)])
def test_a_step_without_enough_memory_names_a_microbatch_that_fits(
    passed, most, fitting, at_run_time, monkeypatch
):
    sizes = refuse_above(most, monkeypatch, at_run_time=at_run_time)
    if at_run_time:  # the devices tell how much memory they have
        needed = CompiledStep.needed_bytes
        monkeypatch.setattr(
            CompiledStep, "needed_bytes", lambda self: needed(self) * (sizes[-1] > most)
        )
        device = mock.Mock(memory_stats=lambda: {"bytes_limit": 1})
        monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setattr(lsdp.PrivacyPlan, "room", 80)
    with pytest.raises(MemoryError, match=f"pass microbatch_size={fitting}, which fits") as caught:
        fit(SHORT, microbatch_size=passed)
    assert "RESOURCE_EXHAUSTED" in str(caught.value.__cause__)
    fit(SHORT, microbatch_size=fitting)


def test_a_model_without_a_fitting_microbatch_is_refused(monkeypatch):
    refuse_above(0, monkeypatch, at_run_time=False)
    with pytest.raises(MemoryError, match="got 4; no smaller microbatch fits"):
        fit(SHORT, microbatch_size=4)


def test_other_errors_of_the_devices_are_not_explained(monkeypatch):
    def fail(*arguments):
        raise jax.errors.JaxRuntimeError("INTERNAL: broken")

    monkeypatch.setattr(Compiler, "compile", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        fit(SHORT)
