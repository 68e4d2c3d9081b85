"""Damaged, moved or foreign checkpoints are recognised, and never restart a run from nothing."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys

import jax
import optax
import pytest
from absl import logging as absl_logging

from optax_lsdp.training import _checkpoint
from optax_lsdp.training._checkpoint import lock
from tests.cases import slow
from tests.training.problem import (
    PLAN,
    SHORT,
    assert_ends_as_uninterrupted,
    copy_crashed,
    crash,
    fit,
    make_plan,
)
from tests.training.test_resume import ROOT


def names(folder):
    return sorted(path.stem for path in folder.glob("0*-*.json"))


def change_manifest(folder, **changes):
    """Change the newest manifest, and write the hash that belongs to the change."""
    path = folder / f"{names(folder)[-1]}.json"
    manifest = {**json.loads(path.read_text()), **changes}
    manifest.pop("digest")
    manifest = {name: value for name, value in manifest.items() if value is not None}
    manifest["digest"] = _checkpoint._hash_json(manifest)
    path.write_text(json.dumps(manifest))


def test_a_checkpoint_with_a_flipped_bit_is_skipped(tmp_path):
    copy_crashed(tmp_path, step=25)
    newest = sorted((tmp_path / "checkpoints").iterdir())[-1]
    victim = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(bytes(content))
    with pytest.warns(UserWarning, match=r"is damaged \(its files were changed\)"):
        assert_ends_as_uninterrupted(tmp_path)


def test_a_run_without_an_intact_checkpoint_does_not_start_anew(tmp_path):
    copy_crashed(tmp_path, step=25)
    for path in tmp_path.glob("[0-9]*.json"):
        path.write_text("{")
    with (
        pytest.warns(UserWarning, match="is damaged"),
        pytest.raises(ValueError, match="`folder` must hold an intact checkpoint"),
    ):
        fit(folder=tmp_path)


def test_a_journal_without_checkpoints_is_refused(tmp_path):
    copy_crashed(tmp_path, step=25)
    for path in tmp_path.glob("[0-9]*.json"):
        path.unlink()
    with pytest.raises(
        ValueError, match="`folder` must hold a checkpoint if its journal has steps"
    ):
        fit(folder=tmp_path)


@pytest.mark.parametrize("field", ["ledger", *slow("files", "step", "plan")])
def test_a_changed_manifest_is_skipped(field, tmp_path):
    copy_crashed(tmp_path, step=25)
    path = tmp_path / f"{names(tmp_path)[-1]}.json"
    manifest = json.loads(path.read_text())
    manifest[field] = 3 if field == "step" else {}
    path.write_text(json.dumps(manifest))
    with pytest.warns(UserWarning, match=r"is damaged \(its manifest was changed\)"):
        assert_ends_as_uninterrupted(tmp_path)


@pytest.mark.parametrize("version", [None, _checkpoint.FORMAT + 1, "1"])
def test_a_checkpoint_of_another_format_is_refused(version, tmp_path):
    copy_crashed(tmp_path, step=25)
    change_manifest(tmp_path, format=version)
    demand = f"^`folder` must hold checkpoints of format {_checkpoint.FORMAT}, "
    message = demand + r"got (no )?format.* in '.*'; resume [^\n]+\.$"
    with pytest.raises(ValueError, match=message):
        fit(folder=tmp_path)


def test_the_files_of_another_checkpoint_are_recognised(tmp_path):
    copy_crashed(tmp_path, step=25)
    older, newer = (tmp_path / "checkpoints" / name for name in names(tmp_path))
    shutil.rmtree(newer)
    shutil.copytree(older, newer)
    with pytest.warns(UserWarning, match="its files were changed"):
        assert_ends_as_uninterrupted(tmp_path)


def test_a_damaged_checkpoint_is_written_again_and_foreign_files_are_kept(tmp_path):
    copy_crashed(tmp_path, step=25)
    (tmp_path / "2024-notes.json").write_text("mine")
    damaged = names(tmp_path)[-1]
    shutil.rmtree(tmp_path / "checkpoints" / damaged)
    with pytest.warns(UserWarning, match="is damaged"):
        crash(tmp_path, step=23)
    assert names(tmp_path)[-1] == "0001-000000021"
    assert fit(folder=tmp_path).stopped == "done"
    assert (tmp_path / "2024-notes.json").exists()


def test_only_two_checkpoints_are_kept(tmp_path):
    copy_crashed(tmp_path, step=25)
    (tmp_path / "checkpoints" / "0001-000000007").mkdir()  # a kill came before its removal
    fit(folder=tmp_path)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == names(tmp_path)
    assert len(names(tmp_path)) == 2


def test_a_run_without_its_plan_is_refused(tmp_path):
    copy_crashed(tmp_path, step=9)
    (tmp_path / "plan.json").unlink()
    with pytest.raises(ValueError, match=r"`folder` must hold the plan\.json of its run"):
        fit(folder=tmp_path)
    (tmp_path / "plan.json").write_text("")
    with pytest.raises(ValueError, match="`folder` must hold a valid plan"):
        fit(folder=tmp_path)  # the lock is free again


def test_a_folder_of_another_plan_is_refused(tmp_path):
    copy_crashed(tmp_path, step=9)
    with pytest.raises(ValueError, match="`plan` must be the plan of the run"):
        fit(make_plan(noise_multiplier=2.0), folder=tmp_path)


def test_another_optimizer_is_not_mistaken_for_a_damaged_checkpoint(tmp_path):
    copy_crashed(tmp_path, step=9)
    message = (
        r"like those of this run, got nothing at 'optimizer/\S+/count' .* instead of int32\[\]"
    )
    with pytest.raises(ValueError, match=message):
        fit(folder=tmp_path, optimizer=optax.adam(0.1))


def test_two_runs_in_one_folder_are_refused(tmp_path):
    first = _checkpoint.RunFolder(tmp_path, PLAN)
    with pytest.raises(ValueError, match="`folder` must be used by one run at a time"):
        fit(folder=tmp_path)
    first.close()
    assert fit(folder=tmp_path).stopped == "done"


def test_a_lock_ends_with_its_process_though_a_forked_worker_lives_on(tmp_path):
    script = """
import os, sys, time
from optax_lsdp.training._checkpoint import lock
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
            lock(path)
        run.kill()
        run.wait()
        lock(path).close()
    finally:
        os.killpg(run.pid, signal.SIGKILL)
        run.stdout.close()


def test_nobody_else_may_read_a_run(tmp_path):
    fit(SHORT, folder=tmp_path / "run")
    assert (tmp_path / "run").stat().st_mode & 0o077 == 0


def test_only_the_messages_of_orbax_are_silenced_and_only_while_it_works(tmp_path, caplog):
    logger = logging.getLogger("absl")
    before = logger.level, list(logger.filters)
    caplog.set_level(logging.INFO, logger="absl")

    def log(report):
        absl_logging.info("a message of the user")

    with _checkpoint._quiet_orbax():
        log(None)
    fit(SHORT, folder=tmp_path, save_every=1, callbacks=[log])
    messages = [record.getMessage() for record in caplog.records if record.name == "absl"]
    assert messages == ["a message of the user"] * (1 + SHORT.steps)
    caplog.set_level(before[0], logger="absl")
    assert (logger.level, logger.filters) == before


@pytest.mark.full  # another process, because JAX reads this setting when it is imported
@pytest.mark.skipif(jax.__version_info__ < (0, 9), reason="it fails with such programs")
def test_constants_outside_of_the_program_text_are_part_of_the_fingerprint():
    script = """
import jax, numpy as np
from optax_lsdp.training._resume import Compiler

for scale in (1, 1, 2):
    compiler, table = Compiler(), np.float32(scale) * np.arange(5000, dtype=np.float32)
    function = jax.jit(lambda x: x + table)
    compiler.compile(function, np.float32(1))
    print(len(function.trace(np.float32(1)).lower().as_text()), compiler.digest.hexdigest())
"""
    environment = {**os.environ, "JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True)
    one, same, other = done.stdout.decode().splitlines()
    assert one == same != other
    assert int(one.split()[0]) < 1000  # without the table
