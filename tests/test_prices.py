"""Prices of compilers: largest batches, records that grow, and tables that say what is missing."""

import functools
import json

import jax
import pytest

from benchmarks import _batches, _compilers, _exchanged, _priced, accelerators, chips


@pytest.mark.parametrize("saving", [1.0, 1.5])  # what XLA saves by computing values twice
@pytest.mark.parametrize("limit", [1, 7, 8, 9, 100, 1000])
def test_the_largest_batch_is_found_within_a_part_of_it(limit, saving):
    capacity, trials = 1000 + 10 * limit / saving, {}
    while size := _batches.next_size(trials, 8, capacity):
        assert size not in trials
        fits = size <= limit
        trials[size] = _batches.Trial(fits, min(1000 + 10 * size, capacity) if fits else None)
    low, high = _batches.bounds(trials)
    assert low <= limit < high
    assert high - low <= max(1, limit // 32)
    assert len(trials) <= 12


def test_not_even_one_example_may_fit():
    trials = {}
    while size := _batches.next_size(trials, 8, 100):
        trials[size] = _batches.Trial(False, None)
    assert _batches.bounds(trials) == (0, 1)


def test_a_refusal_tells_how_much_memory_is_missing():
    trial = _batches.Trial(False, 400)
    assert _batches.next_size({64: trial}, 64, 100) == 16
    error = "RESOURCE_EXHAUSTED: the total memory required for HLO temporaries (29.5G) exceeds"
    assert accelerators.read_trial({"error": error}) == (False, int(29.5 * 2**30))
    assert accelerators.read_trial({"error": "RESOURCE_EXHAUSTED: too large"}) == (False, None)


@pytest.mark.parametrize("excess", [0, 1])
def test_an_accepted_program_must_fit_the_chip_as_well(excess):
    needed = accelerators.CHIP_BYTES + excess
    row = {"temp_bytes": needed - 3, "argument_bytes": 1, "output_bytes": 2}
    assert accelerators.read_trial(row) == (not excess, needed)


@jax.numpy_dtype_promotion("standard")  # which Flax needs
def test_only_want_of_memory_refuses_a_batch(monkeypatch, tmp_path):
    tried = []

    def price(target, model, way, size):
        tried.append(size)
        if size <= 100:
            return {"temp_bytes": 1, "argument_bytes": 0, "output_bytes": 0}
        return {"error": error}

    monkeypatch.setattr(accelerators, "price", price)
    record = accelerators.Record(tmp_path / "accelerators.json", "tpu")
    model, way = "GPT-2, bfloat16", "non-private"
    error = "did not compile in 600 seconds"
    accelerators.search_batch(record, model, way, anew=False)
    found = record.read()["largest_batch"][model][way]
    assert "did not compile" in found["error"] and found["refused"] is None
    error = "XlaRuntimeError: RESOURCE_EXHAUSTED: Ran out of memory"
    accelerators.search_batch(record, model, way, anew=False)
    found = record.read()["largest_batch"][model][way]
    assert found["largest"] <= 100 < found["refused"] and found["how"] == _compilers.PRICED
    assert "error" not in found
    count = len(tried)
    assert count == len(set(tried)) + 1  # the timeout alone was tried again
    accelerators.search_batch(record, model, way, anew=False)
    assert len(tried) == count


def test_a_record_keeps_what_another_target_wrote(tmp_path):
    path = tmp_path / "accelerators.json"
    for target in ("tpu", "gpu"):
        record = accelerators.Record(path, target)
        record.write("models", "MLP", "vmap", {"cycles": 1})
        record.write("models", "softmax regression", "vmap", {"cycles": 2})
        record.write("models", "MLP", "Optax", {"error": "does not fit"})
    found = json.loads(path.read_text())
    assert list(found["tpu"]["models"]) == ["softmax regression", "MLP"]
    assert found["tpu"]["models"] == found["gpu"]["models"]
    assert set(found["gpu"]["models"]["MLP"]) == {"vmap", "Optax"}


def test_only_what_is_missing_is_priced(tmp_path, monkeypatch):
    priced = []

    def price(target, model, way, batch_size=None):
        priced.append((model, way))
        return {"cycles": 1}

    monkeypatch.setattr(accelerators, "price", price)
    record = accelerators.Record(tmp_path / "accelerators.json", "gpu")
    run = functools.partial(accelerators.run, record, parts=["models"])
    run(["MLP"], ["vmap"], only_missing=True)
    run(["MLP", "LSTM"], ["vmap"], only_missing=True)
    assert priced == [("MLP", "vmap"), ("LSTM", "vmap")]
    run(["MLP"], ["vmap"], only_missing=False)
    assert len(priced) == 3


@jax.numpy_dtype_promotion("standard")  # which Optax needs
def test_where_there_is_a_device_the_row_is_measured():
    cpu = _compilers.Target("CPU", ("null",), {}, lambda: None, lambda text: {})
    assert cpu.is_here  # /dev/null
    row = _compilers.row(cpu, "softmax regression", "bookkeeping", 4)
    assert row["how"] == _compilers.MEASURED and row["milliseconds"] > 0
    absent = cpu._replace(files=("no such device",))
    assert not absent.is_here


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"cycles": 30}, "3"),
        ({"cycles": 30, "unknown_loops": 1}, "unknown"),
        ({"milliseconds": 30}, "–"),  # a measurement and a price do not compare
        ({"error": "XlaRuntimeError: RESOURCE_EXHAUSTED: Ran out of memory"}, "too large"),
        ({"error": "did not compile in 600 seconds"}, "too slow"),
        ({"error": "TypeError: no"}, "fails"),
        ({}, "–"),
    ],
)
def test_a_table_says_why_a_price_is_missing(row, text):
    assert _priced._cell({"non-private": {"cycles": 10}, "vmap": row}, "vmap") == text


def test_parameters_are_split_by_an_axis_that_all_chips_divide():
    assert chips.split((50_257, 768), 4) == jax.P(None, "chips")
    assert chips.split((768, 3072), 64) == jax.P(None, "chips")
    assert chips.split((3,), 4) == jax.P()


def test_the_recorded_steps_exchange_what_the_manual_promises():
    """No array of the size of per-example gradients crosses, and replicas exchange only sums."""
    private = [step for step in _exchanged.steps() if step.way == "bookkeeping"]
    assert {step.chips for step in private} == {*chips.GRIDS}
    for _, layout, count, row in private:
        assert row["largest_bytes"] < chips.EXAMPLES * row["parameter_bytes"] / 4
        if layout == "fully sharded":
            assert row["largest_bytes"] <= row["parameter_bytes"]
        if layout == "data-parallel" and count > 1:
            assert list(row["collectives"]) == ["all-reduce"]
            loss = 4  # bytes
            assert row["collectives"]["all-reduce"]["bytes"] == row["parameter_bytes"] + loss


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({}, "–"),
        ({"largest": 1_024, "refused": 1_050}, "1,024"),
        ({"largest": 1_024, "refused": 1_090}, "1,024 to 1,089"),
        ({"largest": 64, "refused": None}, "at least 64"),
    ],
)
def test_a_search_that_is_not_over_shows_its_bounds(row, text):
    assert _priced._batch(row) == text


def test_the_ratio_of_two_batches_is_as_certain_as_their_searches():
    found, ours = {"largest": 200, "refused": 201}, {"largest": 150, "refused": 151}
    assert _priced._share(found, ours) == "0.75"
    assert _priced._share(found, {"largest": 150, "refused": 181}) == "0.75 to 0.90"
    assert _priced._share({"largest": 200, "refused": None}, ours) == "–"
    assert _priced._share(found, {}) == "–"
