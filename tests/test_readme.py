"""README: every block of code runs as printed, and every number comes from a results file."""

import dataclasses
import json
import math
import re
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import jax
import pytest

import optax_lsdp as lsdp
from benchmarks import report
from benchmarks._results import RESULTS
from benchmarks._timing import load_record
from benchmarks.paper import _report

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.fixture(autouse=True)
def _strict_promotion():
    """Replace the strict one: README is run as a user would run it."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def test_every_block_runs_as_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(BLOCKS) >= 4
    names = {}
    for block in BLOCKS:
        exec(compile(block, str(README), "exec"), names)
    assert names["params"] is not None


def test_every_name_of_ours_in_prose_and_tables_exists():
    for path in [
        *report.texts(),
        *(README.parent / f"{n}.md" for n in ("SECURITY", "CONTRIBUTING")),
    ]:
        for dotted in re.findall(r"\blsdp((?:\.[A-Za-z_]+)+)", path.read_text()):
            found = lsdp
            for name in dotted.strip(".").split("."):
                found = getattr(found, name)


def test_every_name_of_others_in_the_tables_exists():
    pytest.importorskip("jax_privacy")
    text = README.read_text().partition("## Coming from elsewhere")[2]
    for dotted in set(re.findall(r"`((?:optax\.contrib|jax_privacy)[\w.]+)", text)):
        assert attrgetter(dotted.partition(".")[2])(import_module(dotted.partition(".")[0]))
    for module in ("noise_addition", "batch_selection", "accounting", "auditing"):
        for name in re.findall(rf"`{module}\.(\w+)", text):
            assert hasattr(import_module(f"jax_privacy.{module}"), name)


def test_every_link_leads_somewhere():
    for path in [*report.texts(), *README.parent.glob("*.md")]:
        for link in re.findall(r"\]\(([^)#]+)", path.read_text()):
            assert link.startswith("http") or (path.parent / link).exists(), (path, link)


def test_the_numbers_are_those_of_the_results():
    for path, tables in report.texts().items():
        text = path.read_text()
        assert report.fill(text, tables) == text, f"{path}: run `python -m benchmarks.report`"
    numbers = json.loads((RESULTS / "summary.json").read_text())
    assert numbers == _report.numbers(), "run `python -m benchmarks.report`"


def test_the_epsilons_of_shuffled_and_poisson_batches_are_those_of_the_accountant():
    said = re.search(
        r"at z = (\S+), batches of (\d+) and (\d+) epochs of ([\d,]+)\s+examples, ε at δ = 1e-5 is "
        r"(\S+) for Poisson batches, and nothing below (\d+) is certified for shuffled",
        README.read_text(),
    )
    z, batch, epochs, size, poisson, shuffled = (float(x.replace(",", "")) for x in said.groups())
    steps = int(epochs) * math.ceil(size / batch)
    run = lsdp.accounting.SampledGaussian(z, batch / size, steps)
    assert round(run.epsilon(1e-5), 1) == poisson
    run = dataclasses.replace(
        run, sampling_rate=epochs / steps, sampling="shuffled", neighbouring="zero_out"
    )
    assert round(run.epsilon(1e-5)) == shuffled


def test_the_advice_in_words_follows_from_the_records():
    """What the docstring of `laplacian_smooth` and the paper's README say without a record."""
    numbers = _report.numbers()

    def gain(epsilon, layout):
        return numbers[f"when.mnist.eps={epsilon}.{layout}.gain"]

    for layout in ("grid", "inputs"):
        assert [round(gain(epsilon, layout)) for epsilon in (0.02, 0.1, 1.0)] == [3, 1, 0]
    for epsilon in (0.02, 0.05, 0.1, 0.3, 1.0):
        assert gain(epsilon, "stored") < 0.05
    adult = [v for k, v in numbers.items() if k.startswith("when.adult") and k.endswith(".gain")]
    assert max(map(abs, adult)) < 0.5


def test_what_is_said_of_cnns_follows_from_the_records():
    """In the paper's README, README and the docstring of `laplacian_smooth`."""
    numbers = _report.numbers()

    def short(name, z=10):
        return numbers[f"cnn.z={z}.epochs=15.{name}.test_accuracy"]

    def long(name, what="final_accuracy"):
        return numbers[f"cnn.z=10.{name}.{what}"]

    assert short("lssgd", 2) < short("sgd", 2)
    assert all(short("lssgd", z) > short("sgd", z) for z in (5, 8, 10))
    assert all(short("lsadam", z) < short("adam", z) for z in (2, 5, 8, 10))
    for name in ("lssgd", "lssgd.stored"):
        assert round(long(name) - long("sgd")) == 8
        worst = "worst_validation_accuracy"
        assert 6 < long(name, worst) - long("sgd", worst) < 8
        assert 0.6 < long(name, "largest_fall") / long("sgd", "largest_fall") < 0.83
    assert round(long("adam") - long("lssgd")) == 15
    assert all(long("adam") - long(name) > 3 for name in ("lsadam", "lsadam.stored"))
    smoothed = [short(f"sigma={s}") for s in (0.5, 1, 2, 3)]
    smoothed += [short(f"rate=lssgd.{rate}") for rate in (0.05, 0.3, 0.6)]
    assert short("rate=sgd.0.05") > max(smoothed)
    assert round(short("rate=sgd.0.05") - short("rate=lssgd.0.05")) == 7
    assert all(short(f"rate=lssgd.{r}") > short(f"rate=sgd.{r}") for r in (0.3, 0.6))

    def tuned(name, epsilon):
        return numbers[f"cnn.eps={epsilon}.{name}.test_accuracy"]

    assert all(abs(tuned("lssgd", e) - tuned("sgd", e)) < 0.5 for e in ("0.2", "0.4", "1"))
    assert all(tuned("lsadam", e) < tuned("adam", e) for e in ("0.2", "0.4", "1"))


def test_the_audits_on_record_found_what_they_should():
    record = load_record(RESULTS / "auditing.json")
    assert all(row["passed"] == 0 for row in record["planted"].values())
    assert all(row["passed"] == row["seeds"] == 20 for row in record["sound"].values())
    assert len(record["levels"]) == 20
    for row in record["levels"].values():
        assert row["any_mechanism"] <= row["claimed"]
        assert row["claimed"] / 2 <= row["gaussian"] <= row["claimed"]


def test_runs_that_are_in_two_records_are_the_same_in_both():
    """A second run with the same seed gives the same numbers."""
    once = load_record(RESULTS / "paper" / "cnn.json").get("noise", {})
    again = load_record(RESULTS / "paper" / "cnn_effects.json").get("smoothing", {})
    for name, smoothing in (("sgd 10 seed 0", "0"), ("lssgd 10 seed 0", "1")):
        if name in once and smoothing in again:
            assert once[name]["found"] == again[smoothing]["found"]
