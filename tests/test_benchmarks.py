"""Benchmarks run, and write a record from which they go on."""

import json
import subprocess
import sys

import pytest


@pytest.mark.full
def test_a_smoke_run_writes_a_record(tmp_path):
    output = tmp_path / "clipping.json"
    command = [sys.executable, "-m", "benchmarks.clipping", "--smoke", "--output", str(output)]
    subprocess.run(command, check=True, capture_output=True)
    ways = json.loads(output.read_text())["models"]["softmax regression"]["ways"]
    assert ways["bookkeeping"]["milliseconds"] > 0


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
