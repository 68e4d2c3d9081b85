"""The benchmark of clipping runs, and writes a record from which it goes on."""

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
