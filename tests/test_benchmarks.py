"""Benchmarks run, and write a record from which they go on."""

import gzip
import hashlib
import importlib
import json
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import _data


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


@pytest.mark.full
def test_a_smoke_run_of_scaling_writes_a_record(tmp_path):
    output = tmp_path / "scaling.json"
    command = [sys.executable, "-m", "benchmarks.scaling", "--smoke", "--output", str(output)]
    subprocess.run(command, check=True, capture_output=True)
    assert json.loads(output.read_text())["overhead"]["MNIST CNN"]["fit"] > 0


def write_idx(path, array):
    sizes = np.array(array.shape, ">u4").tobytes()
    path.write_bytes(gzip.compress(bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()))
    return hashlib.md5(path.read_bytes()).hexdigest()


def test_mnist_is_read_and_checked(tmp_path, monkeypatch):
    folder = tmp_path / "mnist"
    folder.mkdir()
    pixels = np.arange(3 * 28 * 28, dtype=np.uint8).reshape(3, 28, 28)
    arrays = [pixels, np.array([1, 2, 3], np.uint8)] * 2
    sums = {
        name: write_idx(folder / name, array)
        for name, array in zip(_data.MNIST_FILES, arrays, strict=True)
    }
    monkeypatch.setattr(_data, "MNIST_FILES", sums)
    data = _data.mnist(tmp_path)
    images, labels = data.train
    assert images.shape == (3, 28, 28, 1) and labels.tolist() == [1, 2, 3]
    np.testing.assert_allclose(images[..., 0] * 0.3081 + 0.1307, pixels / 255, atol=1e-6)
    (folder / "t10k-labels-idx1-ubyte.gz").write_bytes(b"something else")
    with pytest.raises(SystemExit, match="must have the checksum"):
        _data.mnist(tmp_path)
    with pytest.raises(SystemExit, match="--data-dir must hold"):
        _data.mnist(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    "script", ["best", "degradation", "errors", "step_sizes", "table1", "theory", "when"]
)
def test_a_smoke_run_of_the_paper_goes_on_where_it_stopped(script, tmp_path, monkeypatch):
    """And the part that was lost comes out the same: seeds decide everything."""
    output = tmp_path / f"{script}.json"
    monkeypatch.setattr(sys, "argv", [script, "--smoke", "--output", str(output)])
    main = importlib.import_module(f"benchmarks.paper.{script}").main
    main()
    whole = json.loads(output.read_text())
    assert whole["is_whole"]
    part = list(whole)[-3]  # two more say what it is
    lost, found = list(whole[part].items())[-1]
    rest = {**whole, part: {name: row for name, row in whole[part].items() if name != lost}}
    rest["is_whole"] = False
    output.write_text(json.dumps(rest))
    main()
    again = json.loads(output.read_text())
    assert again[part].pop(lost)["found"] == found["found"]
    said = {"circumstances": 0, "is_whole": True}
    assert {**again, **said} == {**rest, **said} and again["is_whole"]
    assert str(tmp_path) not in output.read_text()
