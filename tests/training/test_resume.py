"""A killed, stopped or failed run resumes; if anything has changed, its repeated steps count."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_lsdp import training
from optax_lsdp._keys import fold_in_text
from optax_lsdp.accounting import Ledger
from optax_lsdp.training import _data, _resume
from optax_lsdp.training._checkpoint import RunFolder
from optax_lsdp.training._journal import Journal
from tests.cases import slow
from tests.training.problem import (
    PLAN,
    SEED,
    Crash,
    Source,
    assert_ends_as_uninterrupted,
    bits,
    copy_crashed,
    crash,
    fit,
    loss,
    make_data,
    make_plan,
    reference,
)

pytestmark = pytest.mark.filterwarnings("ignore:The run in this folder was made with different")

ROOT = Path(__file__).parents[2]


def last_checkpoint(folder):
    return sorted(path.stem for path in folder.glob("[0-9]*.json"))[-1]


@pytest.mark.parametrize("kills", [3, *slow(20)])
def test_a_run_that_is_killed_or_cannot_write_ends_like_an_uninterrupted_one(kills, tmp_path):
    script = [sys.executable, str(ROOT / "tests/training/problem.py"), str(tmp_path), str(kills)]
    # Without a cache: runs must agree to the bit although each process compiles them again.
    uncached = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    environment = {**os.environ, **uncached, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    message = f"`folder` must accept journal and checkpoints.*{os.strerror(errno.EFBIG)}"
    assert re.search(message, done.stderr)
    with np.load(tmp_path / "alone.npz") as one, np.load(tmp_path / "killed.npz") as other:
        for name in one:
            assert one[name].tobytes() == other[name].tobytes()
    ledgers = [(tmp_path / f"{name}.ledger").read_text() for name in ("alone", "killed")]
    assert ledgers[0] == ledgers[1]


def send(number, step):
    def callback(report):
        if report.step == step:
            os.kill(os.getpid(), number)

    return callback


def test_sigterm_saves_and_returns_and_the_run_can_be_resumed(tmp_path):
    stopped = fit(folder=tmp_path, callbacks=[send(signal.SIGTERM, 11)])
    assert stopped.stopped == "signal" and stopped.steps == 11
    assert_ends_as_uninterrupted(tmp_path)


def test_ctrl_c_finishes_the_step_and_saves(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit(folder=tmp_path, callbacks=[send(signal.SIGINT, 11)])
    assert last_checkpoint(tmp_path) == "0001-000000011"
    assert_ends_as_uninterrupted(tmp_path)


def test_a_resumed_run_chooses_the_same_smoothing(tmp_path):
    """Evidence from before the crash is saved: the sum of releases, their noise, and the choice."""
    plan, data = make_plan(steps=10, smoothing="auto"), make_data()
    wave = np.sin(np.arange(16) * np.pi / 8)  # neighbouring weights belong together
    data["y"] = (data["x"] @ wave > 0).astype(np.int32)
    expected = fit(plan, data)
    crash(tmp_path, step=9, plan=plan, data=data)  # the last checkpoint has 7 steps
    resumed = fit(plan, data, folder=tmp_path)
    assert bits(resumed.params) == bits(expected.params)
    assert resumed.smoothing == expected.smoothing
    assert (
        max(
            choice.smoothing
            for choice in jax.tree.leaves(
                expected.smoothing, is_leaf=lambda node: hasattr(node, "length")
            )
        )
        > 0
    )


def test_a_callback_that_raised_gets_the_report_of_its_step_again(tmp_path):
    steps = []

    def raise_once(report):
        steps.append(report.step)
        if steps == [1, 2, 3]:
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        fit(folder=tmp_path, callbacks=[raise_once], save_every=2)
    assert_ends_as_uninterrupted(tmp_path, callbacks=[raise_once], save_every=2)
    assert steps[3:6] == [3, 4, 5]


def test_a_step_that_fails_halfway_is_not_saved(tmp_path, monkeypatch):
    """A checkpoint would have the parameters of the next step with the ledger of this one."""
    record = _resume.Account.record

    def fail(self, step):
        if step == 9:
            raise Crash
        record(self, step)

    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(_resume.Account, "record", fail)
        fit(folder=tmp_path, save_every=4)
    assert last_checkpoint(tmp_path) == "0001-000000008"
    assert_ends_as_uninterrupted(tmp_path)


def test_steps_repeated_on_other_data_count_twice(tmp_path):
    copy_crashed(tmp_path, step=20)  # the last checkpoint has 14 steps
    changed = make_data()
    changed["x"][7] += 1
    steps = []
    done = fit(folder=tmp_path, data=changed, callbacks=[lambda report: steps.append(report.step)])
    assert steps[0] == 15
    assert done.stopped == "budget"  # six steps may have been seen twice, so six are missing
    assert (done.steps, done.ledger.steps) == (54, 60)
    assert PLAN.spent(done.ledger) <= PLAN.epsilon


def test_a_changed_fingerprint_means_new_noise(tmp_path, monkeypatch):
    """Gradients are zero, so that parameters are noise alone."""

    def zero(params, example):
        return 0 * sum(map(jnp.sum, jax.tree.leaves(params)))

    def train(**options):
        seen = {}
        fit(
            make_plan(steps=12),
            loss_fn=zero,
            callbacks=[lambda report: seen.setdefault(report.step, bits(report.params))],
            **options,
        )
        return seen

    alone = train()
    for name in ("same", "other"):
        crash(tmp_path / name, step=9, plan=make_plan(steps=12), loss_fn=zero)
    assert train(folder=tmp_path / "same")[8] == alone[8]
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"] + " ")
    assert train(folder=tmp_path / "other")[8] != alone[8]


@pytest.mark.parametrize(
    ("change", "named"), [("loss", "code or settings"), ("flags", "devices"), ("data", "data")]
)
def test_a_changed_fingerprint_is_named_and_gets_a_new_nonce(change, named, tmp_path, monkeypatch):
    copy_crashed(tmp_path, step=9)
    before, options = Journal(tmp_path, 60), {}
    if change == "loss":
        options["loss_fn"] = lambda params, example: 2 * loss(params, example)
    elif change == "data":
        options["data"] = make_data()
        options["data"]["x"][7] += 1
    else:
        monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"] + " ")
    with pytest.warns(
        UserWarning, match=f"with different {named}: it restarts from step"
    ) as caught:
        done = fit(folder=tmp_path, **options)
    assert {Path(warning.filename).name for warning in caught} == {"problem.py"}  # the caller
    after = Journal(tmp_path, 60)
    assert after.nonce != before.nonce and after.starts == 2
    assert done.ledger.steps > done.steps


def test_a_changed_example_is_noticed_when_its_step_is_repeated(tmp_path, monkeypatch):
    """The fingerprint covers few examples of a source; the journal covers what steps have read."""
    monkeypatch.setattr(_data, "_HASHED_EXAMPLES", 2)  # the first example and the last
    data = make_data()
    crash(tmp_path, step=20, data=Source(data))
    key = fold_in_text(jax.random.key(SEED), "first")
    used = PLAN.sampler(key).batch(16)
    data["x"][used.indices[used.mask][0]] += 1
    done = fit(folder=tmp_path, data=Source(data))
    assert Journal(tmp_path, 60).starts == 2
    assert done.ledger.steps > done.steps
    again = fit(folder=tmp_path / "same", data=Source(data))
    assert bits(again.params) != bits(done.params)


def test_a_restart_does_not_exceed_the_budget(tmp_path, monkeypatch):
    """All steps were taken and none was saved; the data changed where the fingerprint is blind."""
    monkeypatch.setattr(_data, "_HASHED_EXAMPLES", 2)
    data, save = make_data(), RunFolder.save
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save", lambda self, at: None if at.step else save(self, at))
        fit(data=Source(data), folder=tmp_path)
    data["x"][1:-1] += 1
    done = fit(data=Source(data), folder=tmp_path)
    assert done.stopped == "budget" and done.steps == 0 and done.ledger.steps == 60
    assert PLAN.spent(done.ledger) <= PLAN.epsilon


def test_steps_of_every_nonce_count_whichever_checkpoint_can_be_read(tmp_path):
    plan = make_plan(epsilon=50.0)
    crash(tmp_path, step=30, plan=plan)  # the last checkpoint has 28 steps
    newest = tmp_path / "checkpoints" / last_checkpoint(tmp_path)
    newest.rename(tmp_path / "away")
    data = make_data()
    data["x"][0] += 1
    with pytest.warns(UserWarning, match="is damaged"):
        crash(tmp_path, step=27, plan=plan, data=data)  # restarts from 21 with another nonce
    (tmp_path / "away").rename(newest)
    steps = []
    done = fit(plan, folder=tmp_path, callbacks=[lambda report: steps.append(report.step)])
    assert done.stopped == "done"
    assert done.ledger.steps >= 30 + 6 + len(steps)


SHUFFLED = make_plan(
    steps=25, noise_multiplier=4.0, sampling="shuffled", neighbouring="zero_out", epsilon=50.0
)


def test_shuffled_runs_take_all_their_steps():
    plan = make_plan(steps=25, noise_multiplier=4.0, sampling="shuffled", neighbouring="zero_out")
    done = fit(plan)
    assert (done.stopped, done.steps) == ("done", 25)
    assert plan.spent(done.ledger) == pytest.approx(plan.epsilon)


def test_a_restart_counts_the_epoch_of_its_new_order_though_it_crashes_at_once(tmp_path):
    """In the middle of an epoch of ten steps, a new order may repeat what the old one has used."""
    crash(tmp_path / "run", step=16, plan=SHUFFLED)  # the last checkpoint has 14 steps
    data = make_data()
    data["x"][7] += 1
    ledgers = []
    for crashes in (0, 1):  # one step after the restart, before its next checkpoint
        folder = tmp_path / str(crashes)
        shutil.copytree(tmp_path / "run", folder)
        for _ in range(crashes):
            crash(folder, step=15, plan=SHUFFLED, data=data)
        ledgers.append(fit(SHUFFLED, data, folder=folder).ledger)
    assert ledgers[0] == ledgers[1]
    old_order, new_order = 16, 14 % 10 + 11  # steps 14 to 24 of the new order, from 10 on
    expected = Ledger()
    for steps in (old_order, new_order):
        expected.append(replace(SHUFFLED.event(0), steps=steps))
    assert ledgers[0] == expected


def test_a_full_disk_is_named_and_the_run_resumes_later(tmp_path, monkeypatch):
    def fail(number):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    copy_crashed(tmp_path, step=9)
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fail)
        with pytest.raises(OSError, match="`folder` must have room for journal and checkpoints"):
            fit(folder=tmp_path)
    assert_ends_as_uninterrupted(tmp_path)


class Faulty(Source):
    """A source whose examples 120 to 129 are broken in some way."""

    def __init__(self, data, fault):
        super().__init__(data)
        self.fault = fault

    def __getitem__(self, index):
        example = super().__getitem__(index)
        return self.fault(example) if index // 10 == 12 else example


def raising(example):
    raise OSError("the disk is gone")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (raising, r"must return example 12\d, got OSError"),
        (lambda example: {**example, "x": example["x"] * np.nan}, r"infinity in example 12\d"),
        pytest.param(
            lambda example: {**example, "x": example["x"][:3]},
            r"float32\[3\].* at index 12\d",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_broken_example_is_named_and_the_run_resumes_later(fault, message, tmp_path):
    with pytest.raises(training.DataError, match=message):
        fit(folder=tmp_path, data=Faulty(make_data(), fault))
    assert_ends_as_uninterrupted(tmp_path, data=Source(make_data()))


def test_a_finished_run_is_returned_with_a_warning_if_the_code_has_changed(tmp_path):
    done = fit(folder=tmp_path)
    assert bits(fit(folder=tmp_path).params) == bits(done.params) == bits(reference().params)
    with pytest.warns(UserWarning, match="it is finished and returned unchanged"):
        again = fit(folder=tmp_path, optimizer=optax.sgd(0.2, momentum=0.9))
    assert bits(again.params) == bits(done.params)
