"""Runs that are killed, stopped, starved or deceived go on, and count what they must."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lsdp as lsdp
from optax_lsdp import training
from optax_lsdp.training import _folder, _journal
from tests.cases import slow
from tests.training.problem import PLAN, assert_as_if_alone, bits, fit, loss, make_data, make_plan
from tests.training.test_fit import Source

pytestmark = pytest.mark.filterwarnings("ignore:This folder's run was made with other")

ROOT = Path(__file__).parents[2]


class StopHere(Exception):
    """Raised by a callback in place of a fall."""


def stop_at(step):
    def callback(report):
        if report.step == step:
            raise StopHere

    return callback


def fall(folder, step, **options):
    """Run until a step is taken, without saving after it, as if the machine had failed."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(StopHere):
        save = _folder.RunFolder.save
        patch.setattr(
            _folder.RunFolder,
            "save",
            lambda self, saved: save(self, saved) if saved.step % 7 == 0 else None,
        )
        fit(folder=folder, save_every=7, callbacks=[stop_at(step)], **options)


def start(folder, result, pause):
    environment = {**os.environ, "PAUSE": str(pause), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tests/training/problem.py"), str(folder), str(result)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("kills", [3, *slow(20)])
def test_a_run_that_is_killed_ends_as_one_that_was_not(kills, tmp_path):
    alone = start(tmp_path / "alone", tmp_path / "alone.npz", 0)
    chance = random.Random(kills)
    killed = 0
    while killed < kills:
        run = start(tmp_path / "killed", tmp_path / "killed.npz", 0.2)
        journal = tmp_path / "killed" / "journal.jsonl"
        while not (journal.exists() and journal.stat().st_size) and run.poll() is None:
            time.sleep(0.05)
        time.sleep(chance.uniform(0, 3) if killed else 2.5)  # the first one gets somewhere
        assert run.poll() is None, run.communicate()[1]
        run.send_signal(signal.SIGKILL)
        run.communicate()
        killed += 1
    last = start(tmp_path / "killed", tmp_path / "killed.npz", 0)
    for run in (alone, last):
        assert run.wait() == 0, run.communicate()[1]
        run.communicate()
    with np.load(tmp_path / "alone.npz") as one, np.load(tmp_path / "killed.npz") as other:
        for name in one:
            assert one[name].tobytes() == other[name].tobytes()
    ledgers = [(tmp_path / f"{name}.ledger").read_text() for name in ("alone", "killed")]
    assert ledgers[0] == ledgers[1]


def test_sigterm_saves_and_stops_and_the_run_goes_on(tmp_path):
    def terminate(report):
        if report.step == 11:
            os.kill(os.getpid(), signal.SIGTERM)

    stopped = fit(folder=tmp_path, callbacks=[terminate])
    assert stopped.stopped == "signal" and stopped.steps == 11
    assert_as_if_alone(tmp_path)


def test_ctrl_c_finishes_the_step_and_saves(tmp_path):
    def interrupt(report):
        if report.step == 11:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        fit(folder=tmp_path, callbacks=[interrupt])
    assert sorted(path.stem for path in tmp_path.glob("[0-9]*.json"))[-1] == "0001-000000011"
    assert_as_if_alone(tmp_path)


def test_a_callback_that_raised_is_told_of_its_step_again(tmp_path):
    told = []

    def raise_once(report):
        told.append(report.step)
        if told == [1, 2, 3]:
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        fit(folder=tmp_path, callbacks=[raise_once], save_every=2)
    assert_as_if_alone(tmp_path, callbacks=[raise_once], save_every=2)
    assert told[3:6] == [3, 4, 5]


def test_a_step_that_fails_halfway_is_not_saved(tmp_path, monkeypatch):
    """Its parameters would be those of the next step, under the count of this one."""
    count = training._run.Run._count

    def fail(self, step):
        if step == 9:
            raise StopHere
        count(self, step)

    with monkeypatch.context() as patch, pytest.raises(StopHere):
        patch.setattr(training._run.Run, "_count", fail)
        fit(folder=tmp_path, save_every=4)
    assert sorted(path.stem for path in tmp_path.glob("[0-9]*.json"))[-1] == "0001-000000008"
    assert_as_if_alone(tmp_path)


def test_steps_that_are_taken_again_on_other_data_have_other_noise_and_count_twice(tmp_path):
    fall(tmp_path, step=20)  # of which 14 are saved
    changed = make_data()
    changed["x"][7] += 1
    seen = []
    done = fit(folder=tmp_path, data=changed, callbacks=[lambda report: seen.append(report.step)])
    assert seen[0] == 15
    assert done.stopped == "budget"  # six steps may have been seen twice, and are not left
    assert (done.steps, done.ledger.steps) == (54, 60)
    assert PLAN.spent(done.ledger) <= PLAN.epsilon


def test_other_circumstances_have_other_noise(tmp_path, monkeypatch):
    """Gradients are zero: all that happens is noise."""

    def nothing(params, example):
        return 0 * sum(map(jnp.sum, jax.tree.leaves(params)))

    def steps_of(**options):
        seen = {}
        fit(
            loss_fn=nothing,
            callbacks=[lambda report: seen.setdefault(report.step, bits(report.params))],
            **options,
        )
        return seen

    alone = steps_of(folder=tmp_path / "alone")
    fall(tmp_path / "same", step=9, loss_fn=nothing)
    assert steps_of(folder=tmp_path / "same")[8] == alone[8]
    fall(tmp_path / "other", step=9, loss_fn=nothing)
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"] + " ")
    assert steps_of(folder=tmp_path / "other")[8] != alone[8]


@pytest.mark.parametrize(
    ("change", "named"), [("loss", "code or settings"), ("flags", "devices"), ("data", "data")]
)
def test_other_circumstances_are_named_and_get_another_nonce(change, named, tmp_path, monkeypatch):
    fall(tmp_path, step=9)
    before, options = _journal.Journal(tmp_path, 60), {}
    if change == "loss":
        options["loss_fn"] = lambda params, example: 2 * loss(params, example)
    elif change == "data":
        options["data"] = make_data()
        options["data"]["x"][7] += 1
    else:
        monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"] + " ")
    with pytest.warns(UserWarning, match=f"with other {named}: it goes on from step"):
        plan_steps = fit(folder=tmp_path, **options)
    after = _journal.Journal(tmp_path, 60)
    assert after.nonce != before.nonce and after.era == 2
    assert plan_steps.ledger.steps > plan_steps.steps


def test_an_example_that_changed_unnoticed_is_noticed_when_it_is_used_again(tmp_path, monkeypatch):
    """A source is too large to be hashed; the journal knows what every step has read."""
    monkeypatch.setattr(training._data, "_LOOKED_AT", 2)  # the first example and the last
    data = make_data()
    fall(tmp_path, step=20, data=Source(data))
    sampler = lsdp.training._run.fold_in_text(jax.random.key(5), "first")
    used = PLAN.sampler(sampler).batch(16)
    data["x"][used.indices[used.mask][0]] += 1
    done = fit(folder=tmp_path, data=Source(data))
    assert _journal.Journal(tmp_path, 60).era == 2
    assert done.ledger.steps > done.steps
    again = fit(folder=tmp_path / "same", data=Source(data))
    assert bits(again.params) != bits(done.params)


def test_a_corrupt_checkpoint_is_passed_over(tmp_path):
    fall(tmp_path, step=25)
    newest = sorted((tmp_path / "checkpoints").iterdir())[-1]
    victim = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(bytes(content))
    with pytest.warns(UserWarning, match="cannot be read"):
        assert_as_if_alone(tmp_path)


def test_without_any_checkpoint_that_can_be_read_the_run_does_not_start_anew(tmp_path):
    fall(tmp_path, step=25)
    for path in tmp_path.glob("[0-9]*.json"):
        path.write_text("{")
    with (
        pytest.warns(UserWarning, match="cannot be read"),
        pytest.raises(ValueError, match="`folder` must hold a checkpoint that can be read"),
    ):
        fit(folder=tmp_path)


def test_a_full_disk_is_told_and_the_run_goes_on_later(tmp_path):
    script = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300)); "
        "sys.argv = ['problem.py', sys.argv[1], sys.argv[2]]; "
        "import runpy; runpy.run_path('tests/training/problem.py', run_name='__main__')"
    )
    folder = tmp_path / "run"
    fall(folder, step=9)
    run = subprocess.run(
        [sys.executable, "-c", script, str(folder), str(tmp_path / "result.npz")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert run.returncode and "`folder` must have room" in run.stderr, run.stderr[-2000:]
    done = fit(folder=folder)
    assert done.stopped == "done" and done.steps == PLAN.steps


def test_two_runs_in_one_folder_are_refused(tmp_path):
    first = _folder.RunFolder(tmp_path, PLAN)
    with pytest.raises(ValueError, match="`folder` must belong to one run at a time"):
        fit(folder=tmp_path)
    first.close()
    assert fit(folder=tmp_path).stopped == "done"


def test_a_folder_of_another_plan_is_refused(tmp_path):
    fall(tmp_path, step=9)
    other = make_plan(noise_multiplier=2.0)
    with pytest.raises(ValueError, match="`plan` must be the one of the run"):
        fit(other, folder=tmp_path)


class Faulty(Source):
    """A source whose example 123 is broken in some way."""

    def __init__(self, data, fault):
        super().__init__(data)
        self.fault = fault

    def __getitem__(self, index):
        example = super().__getitem__(index)
        return self.fault(example) if index == 123 else example


def raising(example):
    raise OSError("the disk is gone")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (raising, "must give example 123, but raised OSError"),
        (lambda example: {**example, "x": example["x"] * np.nan}, "infinity in example 123"),
        pytest.param(
            lambda example: {**example, "x": example["x"][:3]},
            r"float32\[3\].* at index 123",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_broken_example_is_named_and_the_run_goes_on(fault, message, tmp_path):
    with pytest.raises(training.DataError, match=message):
        fit(folder=tmp_path, data=Faulty(make_data(), fault))
    assert_as_if_alone(tmp_path, data=Source(make_data()))


def test_bad_input_is_told(tmp_path):
    with pytest.raises(ValueError, match="`data` must have 400 examples"):
        fit(data=make_data(300))
    with pytest.raises(ValueError, match="`data` must hold arrays of one length"):
        fit(data={"x": np.zeros((400, 2)), "y": np.zeros(3)})
    with pytest.raises(ValueError, match="`save_every` must be a whole number"):
        fit(save_every=0)
    with pytest.raises(ValueError, match="`microbatch_size` must be a whole number"):
        fit(microbatch_size=0)
