"""Benchmarks run, and write a record from which they go on."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lsdp as lsdp
from benchmarks import (
    _correlated,
    _timing,
    auto_smoothing,
    clip_norms,
    correlated_noise,
    users,
)
from benchmarks._results import RESULTS
from optax_lsdp.smoothing._auto import _is_due


def test_a_record_is_whole_once_all_is_measured(tmp_path):
    path = tmp_path / "record.json"

    def measure(**runs):
        _timing.measure_missing(path, {"part": runs})
        return _timing.load_record(path)

    path.write_text('{"part": {"zero": 0}}')  # as records once were: nothing to add or to date
    assert "is_whole" not in measure(zero=lambda: 0)
    path.unlink()
    assert measure(zero=lambda: 0)["is_whole"]
    assert measure(zero=lambda: 0, one=lambda: 1)["is_whole"]
    with pytest.raises(ZeroDivisionError):
        measure(one=lambda: 0, two=lambda: 2, three=lambda: 1 / 0)
    assert not _timing.load_record(path)["is_whole"]
    found = measure(one=lambda: 0, two=lambda: 0, three=lambda: 3)
    assert found["part"] == {"zero": 0, "one": 1, "two": 2, "three": 3} and found["is_whole"]


@pytest.mark.full
def test_a_smoke_run_of_smoothing_goes_on_where_it_stopped(tmp_path):
    output = tmp_path / "smoothing.json"
    command = [sys.executable, "-m", "benchmarks.smoothing", "--smoke", "--output", str(output)]
    subprocess.run(command, check=True, capture_output=True)
    record = json.loads(output.read_text())
    lost = record["methods"].popitem()[0]
    output.write_text(json.dumps(record))
    subprocess.run(command, check=True, capture_output=True)
    again = json.loads(output.read_text())
    assert again["methods"][lost]["auto"]["milliseconds"] > 0
    assert again["steps"] == record["steps"]


@pytest.mark.full
def test_a_smoke_run_of_scaling_writes_a_record(tmp_path):
    output = tmp_path / "scaling.json"
    command = [sys.executable, "-m", "benchmarks.scaling", "--smoke", "--output", str(output)]
    subprocess.run(command, check=True, capture_output=True)
    assert json.loads(output.read_text())["overhead"]["MNIST CNN"]["fit"] > 0


@jax.numpy_dtype_promotion("standard")  # which JAX Privacy needs
def test_a_smoke_run_of_correlated_noise_goes_on_where_it_stopped(tmp_path, monkeypatch):
    pytest.importorskip("jax_privacy")
    output = tmp_path / "correlated_noise.json"
    monkeypatch.setattr(sys, "argv", ["correlated_noise", "--smoke", "--output", str(output)])
    correlated_noise.main()
    whole = json.loads(output.read_text())
    ((size, ways),) = whole["steps"].items()
    copies = {name: row["past_bytes"] / (4 * int(size)) for name, row in ways.items()}
    assert {name: count for name, count in copies.items() if count} == {
        "3 bands": 2,
        "3 bands, JAX Privacy": 2,
    }
    ((setting, found),) = whole["errors"].items()
    means = {name: row["mean"] for name, row in found["ways"].items()}
    assert found["least"] < min(means.values()) and max(means.values()) == means["independent"]
    del whole["errors"][setting]
    output.write_text(json.dumps({**whole, "is_whole": False}))
    correlated_noise.main()
    again = json.loads(output.read_text())
    assert again["is_whole"] and again["steps"] == whole["steps"]
    assert again["errors"][setting]["ways"]["square_root"]["mean"] == means["square_root"]
    monkeypatch.setattr("benchmarks._results.RESULTS", tmp_path)
    monkeypatch.setattr("benchmarks._trust.RESULTS", tmp_path)
    assert "| 3 bands |" in _correlated.costs() and "| 30 | 3 |" in _correlated.errors()
    assert "| 30 | 3 |" in _correlated.best()


@pytest.mark.full
def test_a_smoke_run_of_auto_smoothing_writes_a_record(tmp_path, monkeypatch):
    output = tmp_path / "auto_smoothing.json"
    monkeypatch.setattr(sys, "argv", ["auto_smoothing", "--smoke", "--output", str(output)])
    auto_smoothing.main()
    record = json.loads(output.read_text())
    assert record["is_whole"] and record["milliseconds"]["softmax regression"]["choosing"] > 0


def test_auto_smoothing_times_steps_that_choose_and_steps_between():
    due = [step for step in range(1, 1001) if auto_smoothing.chooses(step)]
    assert due == list(1 + np.flatnonzero(_is_due(jnp.arange(1, 1001))))
    taken = auto_smoothing.TAKEN
    assert taken["choosing"] + 1 in due and taken["between"] + 1 not in due
    row = {"choosing": 1000.0, "between": 0.0}
    assert auto_smoothing.mean_milliseconds(row) == pytest.approx(len(due))
    params = {"w": jnp.zeros((16, 3)), "b": jnp.zeros(3)}
    private = {"clip_norm": 1.0, "noise_multiplier": 1.0, "expected_batch_size": 4}
    tx = lsdp.privatize(optax.sgd(1.0), smoothing="auto", key=jax.random.key(0), **private)
    chosen = lsdp.chosen_smoothing(auto_smoothing.smooth_all(tx.init(params)))
    assert all(set(leaf) == {1} for leaf in chosen.values())


def test_a_smoke_run_of_users_goes_on_where_it_stopped(tmp_path, monkeypatch):
    output = tmp_path / "users.json"
    monkeypatch.setattr(users, "EPSILONS", (3.0,))
    monkeypatch.setattr(sys, "argv", ["users", "--smoke", "--speed", "--output", str(output)])
    users.main()
    whole = json.loads(output.read_text())
    levels = {name: part for name, part in whole.items() if "level" in name or "group" in name}
    assert {name: [row["examples"] for row in part.values()] for name, part in levels.items()} == {
        "invented, ε = 3, user level": [40, 40],
        "invented, ε = 3, group privacy": [7, 14],
    }
    found = levels["invented, ε = 3, user level"].pop("2")
    output.write_text(json.dumps({**whole, "is_whole": False}))
    users.main()
    again = json.loads(output.read_text())
    assert again["is_whole"] and again["invented, ε = 3, user level"]["2"] == found
    assert again["milliseconds"] == whole["milliseconds"]


def test_users_take_hardly_more_time_than_examples_on_record():
    for name, row in _timing.load_record(RESULTS / "users.json")["milliseconds"].items():
        assert row["users"] <= 1.1 * row["examples"], name


def test_a_smoke_run_of_clip_norms_writes_a_record(tmp_path, monkeypatch):
    output = tmp_path / "clip_norms.json"
    monkeypatch.setattr(sys, "argv", ["clip_norms", "--smoke", "--output", str(output)])
    clip_norms.main()
    record = json.loads(output.read_text())
    assert record["is_whole"] and len(record["final"]) == len(clip_norms.METHODS)
    slack = record["final"]["softmax regression, slack, ε = 0.5, 0.01"]
    assert slack["clip_norms"][0] == pytest.approx(0.01) and slack["clip_norms"][1] > 0.02


def test_training_curves_cover_the_truth_on_record():
    rows = _timing.load_record(RESULTS / "watching.json")["coverage"]
    assert len(rows) == 3 * 3 * 2  # data, optimizers, sampling schemes
    assert np.mean([row["covered"] for row in rows.values()]) >= 0.9
