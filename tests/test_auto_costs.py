"""The benchmark of smoothing="auto" runs, and averages over the steps of the rule."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lsdp as lsdp
from benchmarks import auto_smoothing
from optax_lsdp.smoothing._auto import _is_due


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
