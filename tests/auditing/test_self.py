"""The command `optax-lsdp audit`: this installation passes, and a broken one is told."""

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest

from optax_lsdp.auditing import _self, audit_library, audit_noise, audit_sampler
from optax_lsdp.auditing._child import Child
from optax_lsdp.auditing._steps import FAR_STEPS, LONGEST_PERIOD
from optax_lsdp.cli import main
from optax_lsdp.sampling import PoissonSampler
from tests.cases import slow

ROOT = Path(__file__).parents[2]
ALL = _self.AUDITS | _self.AUDITS_APART
SLOW = (
    "sensitivity of clipping, engine 'bookkeeping'",
    "sensitivity of clipping, engine 'vmap'",
    "clipping of hard models, engine 'bookkeeping'",
    "clipping of hard models, engine 'vmap'",
    "clipping of rows that cancel",
    "clipping in microbatches",
    "clipping on several devices",
    "noise of large leaves",
    "parameters split over devices",
    "runs on neighbouring data",
    "resumed runs",
)
FEW = {name: ALL[name] for name in ("noise", "Poisson sampler", "collectives on several devices")}


@pytest.mark.parametrize("name", [*(n for n in ALL if n not in SLOW), *slow(*SLOW)])
def test_this_installation_passes(name):
    report = _self.run_audit(name, jax.random.key(0))
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
    assert done.stdout.count("verdict: passed") == len(ALL) and "REJECTED" not in done.stdout


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(_self, "AUDITS", dict(FEW))
    monkeypatch.setattr(_self, "AUDITS_APART", {})


def test_resumed_runs_are_left_out_with_a_warning_where_orbax_is_not_installed(few, monkeypatch):
    monkeypatch.setattr(_self, "AUDITS", {"Poisson sampler": ALL["Poisson sampler"]})
    monkeypatch.setattr(_self, "AUDITS_APART", {"resumed runs": ALL["resumed runs"]})
    monkeypatch.setattr(_self, "find_spec", lambda name: None)
    with pytest.warns(UserWarning, match="resumed runs are not audited without Orbax"):
        assert [name for name, _ in audit_library(jax.random.key(0))] == ["Poisson sampler"]


def test_a_broken_installation_is_told(few, monkeypatch, capsys):
    draw = _self.add_gaussian_noise
    monkeypatch.setattr(_self, "add_gaussian_noise", lambda scale, key: draw(0.9 * scale, key=key))
    with pytest.raises(SystemExit, match=r"Rejected: noise\."):
        main(["audit", "--seed", "1"])
    shown = capsys.readouterr()
    assert shown.out.count("REJECTED") == 1 and shown.out.count("verdict: passed") == 2
    assert not shown.err  # which is no terminal


def test_an_audit_that_breaks_off_is_a_rejection_and_the_others_go_on(few, monkeypatch, capsys):
    monkeypatch.setitem(_self.AUDITS, "noise", mock.Mock(side_effect=KeyError("a leaf")))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with pytest.raises(SystemExit, match=r"Rejected: noise\."):
        main(["audit"])
    shown = capsys.readouterr()
    assert "NO: KeyError: 'a leaf'" in shown.out and shown.out.count("verdict: passed") == 2
    assert shown.err.splitlines() == [f"{name} …" for name in FEW]


def test_audits_run_on_eight_devices_in_a_process_of_their_own():
    name = "collectives on several devices"
    with Child([name], jax.random.key(0), 8) as child:
        report = child.report(name)
        assert report and len(report.claims) > 4, str(report)
        assert "its process ended with code 0" in str(child.report("one more"))


def test_the_steps_of_the_command_show_every_period_up_to_the_longest():
    apart = np.unique(np.abs(np.subtract.outer(FAR_STEPS, FAR_STEPS)))[1:]
    assert all((apart % period == 0).any() for period in range(1, LONGEST_PERIOD + 1))
    assert max(FAR_STEPS) == 2**31 - 2


def gaussian(step):
    return jax.random.normal(jax.random.fold_in(jax.random.key(0), step), (50,))


@pytest.mark.parametrize("period", [31, 1000, 4095])
def test_noise_that_repeats_is_seen_if_steps_are_a_period_apart(period):
    steps = [*range(32), *range(32, 4097, 32)]
    draw = jax.jit(gaussian)
    assert audit_noise(draw, scale=1.0, steps=steps)
    report = audit_noise(lambda step: draw(step % period), scale=1.0, steps=steps)
    assert not report and min(report.p_values, key=report.p_values.get) == "independent steps"
    assert bool(audit_noise(lambda step: draw(step % period), scale=1.0)) == (period > 31)


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([0, 5, 5], "`steps` must list 2 or more steps, each once, got 3 of which 2 differ"),
        ([7], "`steps` must list 2 or more steps, each once, got 1"),
        ([0, -1], "`steps` must be a whole number, 0 or more, got -1"),
        (1, "`steps` must be a whole number, 2 or more, got 1"),
        (2.0, "`steps` must be a whole number, 2 or more, got 2.0"),
    ],
)
def test_steps_that_cannot_be_audited_are_told(steps, told):
    with pytest.raises(ValueError, match=told):
        audit_noise(gaussian, scale=1.0, steps=steps)
    sampler = PoissonSampler(1000, 0.05, jax.random.key(0))
    with pytest.raises(ValueError, match=told):
        audit_sampler(sampler, dataset_size=1000, sampling_rate=0.05, steps=steps)
