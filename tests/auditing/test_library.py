"""Tests of `optax-lsdp audit`: this installation passes, and a broken one is rejected."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from optax_lsdp.auditing import _library, audit_library
from optax_lsdp.auditing._library import AUDITS, FAR_STEPS, LONGEST_PERIOD, reports_from_child
from optax_lsdp.cli import main
from tests.cases import slow

ROOT = Path(__file__).parents[2]
SLOW = (
    "clipping by search, engine 'bookkeeping'",
    "clipping by search, engine 'vmap'",
    "clipping of hard models, engine 'bookkeeping'",
    "clipping of hard models, engine 'vmap'",
    "clipping of cancelling rows",
    "clipping of hard models, rounded as on a TPU",
    "clipping in microbatches",
    "clipping on several devices",
    "noise of large leaves",
    "parameters split over devices",
    "a step of fit on neighbouring data",
    "resumed runs",
    "correlated noise",
    "resumed runs with correlated noise",
)
NOISE, POISSON, COLLECTIVES = "noise", "Poisson sampler", "collectives on several devices"


@pytest.mark.parametrize("name", [*(n for n in AUDITS if n not in SLOW), *slow(*SLOW)])
def test_this_installation_passes(name):
    report = _library.run_audit(name, jax.random.key(0))
    assert report, str(report)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
def test_the_whole_command_passes(seed):
    command = [sys.executable, "-m", "optax_lsdp", "audit", "--seed", str(seed)]
    as_for_users = {name: text for name, text in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=as_for_users
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("verdict: passed") == len(AUDITS) and "REJECTED" not in done.stdout


def test_without_orbax_a_warning_names_the_skipped_audits(monkeypatch):
    few = {name: AUDITS[name] for name in (POISSON, "resumed runs")}
    monkeypatch.setattr(_library, "AUDITS", few)
    monkeypatch.setattr(_library, "find_spec", lambda name: None)
    with pytest.warns(UserWarning, match="Skipped resumed runs, which need Orbax"):
        assert [name for name, _ in audit_library(jax.random.key(0))] == [POISSON]


def crashing(key):
    raise KeyError("a leaf")


def test_the_command_rejects_an_installation_with_too_little_noise(monkeypatch, capsys):
    small = partial(_library._audit_gaussian_noise, {"a": (200,)}, 32)  # 10 % less is found
    few = {NOISE: _library.Audit(small)}
    few |= {name: AUDITS[name] for name in (POISSON, COLLECTIVES)}
    monkeypatch.setattr(_library, "AUDITS", few)
    draw = _library.add_gaussian_noise
    monkeypatch.setattr(
        _library, "add_gaussian_noise", lambda stddev, key: draw(0.9 * stddev, key=key)
    )
    with pytest.raises(SystemExit, match=r"Rejected: noise\."):
        main(["audit", "--seed", "1"])
    shown = capsys.readouterr()
    assert shown.out.count("REJECTED") == 1 and shown.out.count("verdict: passed") == 2
    assert not shown.err  # it is not a terminal


def test_an_audit_that_crashes_is_a_rejection_and_the_others_still_run(monkeypatch, capsys):
    few = {NOISE: _library.Audit(crashing)}
    few |= {name: AUDITS[name] for name in (POISSON, COLLECTIVES)}
    monkeypatch.setattr(_library, "AUDITS", few)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with pytest.raises(SystemExit, match=r"Rejected: noise\."):
        main(["audit"])
    shown = capsys.readouterr()
    assert "NO: KeyError: 'a leaf'" in shown.out and shown.out.count("verdict: passed") == 2
    assert shown.err.splitlines() == [f"{name} …" for name in few]


def test_a_child_process_runs_audits_on_eight_devices():
    with reports_from_child([COLLECTIVES], jax.random.key(0)) as reports:
        report = next(reports)
        assert report and len(report.claims) > 4, str(report)
        assert "the child process ended with code 0" in str(next(reports))


def test_the_audited_steps_reveal_every_period_up_to_the_longest():
    apart = np.unique(np.abs(np.subtract.outer(FAR_STEPS, FAR_STEPS)))[1:]
    assert all((apart % period == 0).any() for period in range(1, LONGEST_PERIOD + 1))
    assert max(FAR_STEPS) == 2**31 - 2
