"""A folder that was damaged, moved or meddled with is told from a whole one, and counts it all."""

import json
import os
import shutil
import signal
import subprocess
import sys

import jax
import optax
import pytest

from optax_lsdp import training
from optax_lsdp.training import _journal
from tests.cases import slow
from tests.training.problem import PLAN, assert_as_if_alone, bits, fit, make_data, make_plan
from tests.training.test_faults import ROOT, fall
from tests.training.test_fit import Source

pytestmark = pytest.mark.filterwarnings("ignore:This folder's run was made with other")


SAME = {"data": "f"}


def names(folder):
    return sorted(path.stem for path in folder.glob("0*-*.json"))


def open_journal(folder, steps=10**6):
    return _journal.Journal(folder, steps)


def test_a_line_that_was_not_written_to_its_end_is_no_line(tmp_path):
    journal = open_journal(tmp_path)
    journal.renew(SAME, 0)
    journal.record(0, "a", safe=True)
    journal.close()
    path = tmp_path / "examples-0.jsonl"
    path.write_text(path.read_text() + '{"step": 1, "exa')
    again = open_journal(tmp_path)
    assert again.changed(SAME) == [] and again.seen_since(0, "first") == [range(64)]
    assert again.differs(0, "b") and not again.differs(1, "b")
    again.record(1, "b", safe=False)
    again.close()
    path.write_text(path.read_text()[:-1])  # its newline was lost
    third = open_journal(tmp_path)
    third.record(2, "c", safe=False)
    third.close()
    last = open_journal(tmp_path)
    assert last.differs(1, "c") and last.differs(2, "d")


@pytest.mark.parametrize("damage", [b"{", b"5", b"null", b"\xff\xfe"])
def test_a_damaged_line_is_told(damage, tmp_path):
    journal = open_journal(tmp_path)
    journal.renew(SAME, 0)
    journal.close()
    path = tmp_path / "journal.jsonl"
    path.write_bytes(damage + b"\n" + path.read_bytes())
    with pytest.raises(ValueError, match="`folder` must hold a whole journal"):
        open_journal(tmp_path)


def test_steps_of_every_era_count_whichever_checkpoint_can_be_read(tmp_path):
    plan = make_plan(epsilon=50.0)
    fall(tmp_path, step=30, plan=plan)  # saved at 28
    newest = tmp_path / "checkpoints" / names(tmp_path)[-1]
    newest.rename(tmp_path / "away")
    data = make_data()
    data["x"][0] += 1
    with pytest.warns(UserWarning, match="cannot be read"):
        fall(tmp_path, step=27, plan=plan, data=data)  # goes on from 21 under another nonce
    (tmp_path / "away").rename(newest)
    seen = []
    done = fit(plan, folder=tmp_path, callbacks=[lambda report: seen.append(report.step)])
    assert done.stopped == "done"
    assert done.ledger.steps >= 30 + 6 + len(seen)


@pytest.mark.parametrize("field", ["ledger", *slow("files", "step", "plan")])
def test_a_manifest_that_was_changed_is_passed_over(field, tmp_path):
    fall(tmp_path, step=25)
    path = tmp_path / f"{names(tmp_path)[-1]}.json"
    manifest = json.loads(path.read_text())
    manifest[field] = 3 if field == "step" else {}
    path.write_text(json.dumps(manifest))
    with pytest.warns(UserWarning, match="cannot be read"):
        assert_as_if_alone(tmp_path)


def test_files_of_another_checkpoint_are_told_from_its_own(tmp_path):
    fall(tmp_path, step=25)
    older, newer = (tmp_path / "checkpoints" / name for name in names(tmp_path))
    shutil.rmtree(newer)
    shutil.copytree(older, newer)
    with pytest.warns(UserWarning, match="its files are not those that were written"):
        assert_as_if_alone(tmp_path)


def test_a_damaged_checkpoint_is_written_again_and_strays_are_left_alone(tmp_path):
    fall(tmp_path, step=25)
    (tmp_path / "2024-notes.json").write_text("mine")
    damaged = names(tmp_path)[-1]
    shutil.rmtree(tmp_path / "checkpoints" / damaged)
    with pytest.warns(UserWarning, match="cannot be read"):
        fall(tmp_path, step=23)
    assert names(tmp_path)[-1] == "0001-000000021"
    assert fit(folder=tmp_path).stopped == "done"
    assert (tmp_path / "2024-notes.json").exists()


def test_no_checkpoint_is_left_behind(tmp_path):
    fall(tmp_path, step=25)
    (tmp_path / "checkpoints" / "0001-000000007").mkdir()  # a kill before it was removed
    fit(folder=tmp_path)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == names(tmp_path)
    assert len(names(tmp_path)) == 2


def test_a_run_without_its_plan_is_refused(tmp_path):
    fall(tmp_path, step=9)
    (tmp_path / "plan.json").unlink()
    with pytest.raises(ValueError, match=r"`folder` must hold plan\.json"):
        fit(folder=tmp_path)
    (tmp_path / "plan.json").write_text("")
    with pytest.raises(ValueError, match="`folder` must hold its plan"):
        fit(folder=tmp_path)  # and the lock is free again


def test_another_optimizer_is_told_from_a_damaged_checkpoint(tmp_path):
    fall(tmp_path, step=9)
    said = r"like those of this run, got nothing at 'optimizer/\S+/count' .* instead of int32\[\]"
    with pytest.raises(ValueError, match=said):
        fit(folder=tmp_path, optimizer=optax.adam(0.1))


def test_a_lock_ends_with_its_run_though_a_worker_lives_on(tmp_path):
    script = """
import os, sys, time
from optax_lsdp.training._files import lock
from pathlib import Path
file = lock(Path(sys.argv[1]))
if os.fork() == 0:
    time.sleep(30)
print("ready", flush=True)
time.sleep(30)
"""
    path = tmp_path / "lock-0"
    run = subprocess.Popen(
        [sys.executable, "-c", script, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        run.stdout.readline()
        with pytest.raises(ValueError, match="one run at a time"):
            training._files.lock(path)
        run.kill()
        run.wait()
        training._files.lock(path).close()
    finally:
        os.killpg(run.pid, signal.SIGKILL)
        run.stdout.close()


def test_a_renewal_does_not_go_beyond_the_budget(tmp_path, monkeypatch):
    """All steps were seen and none was saved; the data changed where nobody looked."""
    monkeypatch.setattr(training._data, "_LOOKED_AT", 2)
    data = make_data()
    with pytest.MonkeyPatch.context() as patch:
        save = training._folder.RunFolder.save
        patch.setattr(
            training._folder.RunFolder, "save", lambda self, s: save(self, s) if not s.step else 0
        )
        fit(data=Source(data), folder=tmp_path)
    data["x"][1:-1] += 1
    done = fit(data=Source(data), folder=tmp_path)
    assert done.stopped == "budget" and done.steps == 0 and done.ledger.steps == 60
    assert PLAN.spent(done.ledger) <= PLAN.epsilon


def test_what_sources_gave_is_on_the_disk_before_a_step_is_seen(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(_journal.os, "fsync", lambda number: synced.append(number))
    plan = make_plan(steps=10)
    fit(plan, make_data(), folder=tmp_path / "arrays", save_every=100)
    arrays = len(synced)
    fit(plan, Source(make_data()), folder=tmp_path / "source", save_every=100)
    assert len(synced) - arrays == arrays + plan.steps


@pytest.mark.full  # another process, for JAX reads this when it is imported
@pytest.mark.skipif(jax.__version_info__ < (0, 9), reason="it fails with such programs")
def test_constants_that_jax_leaves_out_of_a_program_are_circumstances():
    script = """
import jax, numpy as np
from optax_lsdp.training._circumstances import Program

for scale in (1, 1, 2):
    program, table = Program(), np.float32(scale) * np.arange(5000, dtype=np.float32)
    function = jax.jit(lambda x: x + table)
    program.compile(function, np.float32(1))
    print(len(function.trace(np.float32(1)).lower().as_text()), program.digest.hexdigest())
"""
    environment = {**os.environ, "JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True)
    one, same, other = done.stdout.decode().splitlines()
    assert one == same != other
    assert int(one.split()[0]) < 1000  # of which the table is no part


def test_a_finished_run_that_others_would_have_made_is_told(tmp_path):
    done = fit(folder=tmp_path)
    assert bits(fit(folder=tmp_path).params) == bits(done.params)  # without a word
    with pytest.warns(UserWarning, match="it is finished, and returned as it was"):
        again = fit(folder=tmp_path, optimizer=optax.sgd(0.2, momentum=0.9))
    assert bits(again.params) == bits(done.params)


def test_nobody_else_may_read_a_run(tmp_path):
    fit(folder=tmp_path / "run")
    assert (tmp_path / "run").stat().st_mode & 0o077 == 0
