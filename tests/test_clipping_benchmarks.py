"""Benchmarks of clipping run, and write a record from which they go on."""

import json
import subprocess
import sys

import jax
import pytest

from benchmarks import _timing, clipping, effective_clip_norm, zoo
from benchmarks._results import RESULTS


@pytest.mark.full
def test_a_smoke_run_writes_a_record(tmp_path):
    output = tmp_path / "clipping.json"
    command = [sys.executable, "-m", "benchmarks.clipping", "--smoke", "--output", str(output)]
    subprocess.run(command, check=True, capture_output=True)
    ways = json.loads(output.read_text())["models"]["softmax regression"]["ways"]
    assert ways["bookkeeping"]["milliseconds"] > 0


def test_large_models_are_recorded_apart_from_the_zoo_and_shapes_are_not_run(tmp_path, monkeypatch):
    output, small = tmp_path / "clipping.json", zoo.mlp((10,), 4)
    shapes = small._replace(
        params=jax.eval_shape(lambda: small.params), batch=jax.eval_shape(lambda: small.batch)
    )
    monkeypatch.setattr(clipping, "LARGE", {"arrays": lambda: small, "shapes": lambda: shapes})
    output.write_text('{"growth": [0], "microbatches": [0]}')  # these are measured already

    def measure(*words):
        command = ["clipping", "--smoke", "--output", str(output), "--models", *words]
        monkeypatch.setattr(sys, "argv", command)
        clipping.main()
        record = json.loads(output.read_text())
        assert not record["models"] and record["growth"] == [0]
        return {name: row["ways"] for name, row in record["large"].items()}

    for way in measure("arrays", "shapes", "--compile-only").values():
        assert way["bookkeeping"].keys() == way["non-private"].keys() == {"temp_megabytes"}
    found = measure("arrays", "shapes")
    assert found["arrays"]["bookkeeping"]["milliseconds"] > 0
    assert found["shapes"]["bookkeeping"].keys() == {"temp_megabytes"}


def test_large_models_take_little_memory_on_record():
    rows = _timing.load_record(RESULTS / "clipping.json")["large"]
    for name, most in {"softmax regression, full batch": 1.5, "GPT-2 small": 2.0}.items():
        ours, ordinary = (rows[name]["ways"][way] for way in ("bookkeeping", "non-private"))
        assert ours["temp_megabytes"] <= most * ordinary["temp_megabytes"], name


def test_a_smoke_run_of_effective_clip_norms_goes_on_where_it_stopped(tmp_path, monkeypatch):
    output = tmp_path / "effective_clip_norm.json"
    narrow = {64: (effective_clip_norm.WideDecoder(64, layers=1), 2)}
    monkeypatch.setattr(effective_clip_norm, "DECODERS", narrow)
    monkeypatch.setattr(sys, "argv", ["effective_clip_norm", "--smoke", "--output", str(output)])
    effective_clip_norm.main()
    whole = json.loads(output.read_text())
    found = whole["tpu"].pop("softmax regression")
    output.write_text(json.dumps({**whole, "is_whole": False}))
    effective_clip_norm.main()
    again = json.loads(output.read_text())
    assert again["is_whole"] and again["cpu"] == whole["cpu"]
    lost = again["tpu"]["softmax regression"]
    assert (lost["smallest"], lost["median"]) == (found["smallest"], found["median"])
    assert 0.95 <= found["smallest"] <= found["median"] <= 1


def test_examples_of_the_zoo_get_nearly_the_clip_norm_on_record():
    record = _timing.load_record(RESULTS / "effective_clip_norm.json")
    least = {"cpu": 0.99, "cuda": 0.95, "tpu": 0.95}  # as docs/guarantees.md says
    assert least.keys() == set(effective_clip_norm.PLATFORMS)
    for platform, promised in least.items():
        assert record[platform].keys() == zoo.ZOO.keys()
        for name, row in record[platform].items():
            assert promised <= row["smallest"] <= row["median"] <= 1, f"{name} on {platform}"
