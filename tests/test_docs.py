"""README and the manual: code runs, links and names lead somewhere, numbers are on record."""

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

ROOT = Path(__file__).parents[1]
MANUAL = sorted(ROOT.glob("docs/**/[!_]*.md"))
PROSE = [*sorted(ROOT.glob("*.md")), *MANUAL, *sorted(ROOT.glob("benchmarks/**/*.md"))]


def blocks(path):
    """Return the blocks of Python code of a page."""
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


def anchors(path):
    """Return the anchors of a page's headings, as code hosts and MyST make them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = [title.lower() for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def relative(path):
    return str(path.relative_to(ROOT))


@pytest.fixture(autouse=True)
def _strict_promotion():
    """Replace the fixture with strict promotion: examples run as a user would run them."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("path", [path for path in PROSE if blocks(path)], ids=relative)
def test_every_block_of_a_page_runs_as_printed(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in blocks(path):
        exec(compile(block, str(path), "exec"), names)


def test_readme_keeps_its_shape():
    """README has at most 180 lines, the claim with its device by line 5, and code by line 15."""
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 180
    assert "times" in lines[4] and "CPU" in lines[4]
    assert "```python" in lines[:15]
    prose = [line for line in lines if not line.startswith(("|", "!["))]
    assert max(map(len, prose)) <= 112


def test_every_name_of_ours_in_prose_and_tables_exists():
    for path in PROSE:
        for dotted in re.findall(r"\blsdp((?:\.[A-Za-z_]+)+)", path.read_text()):
            found = lsdp
            for name in dotted.strip(".").split("."):
                found = getattr(found, name)


def test_every_name_of_others_in_the_tables_exists():
    pytest.importorskip("jax_privacy")
    text = (ROOT / "docs" / "comparison.md").read_text()
    for dotted in set(re.findall(r"`((?:optax\.contrib|jax_privacy)[\w.]+)", text)):
        assert attrgetter(dotted.partition(".")[2])(import_module(dotted.partition(".")[0]))
    for module in ("noise_addition", "batch_selection", "accounting", "auditing"):
        for name in re.findall(rf"`{module}\.(\w+)", text):
            assert hasattr(import_module(f"jax_privacy.{module}"), name)


@pytest.mark.parametrize("path", PROSE, ids=relative)
def test_every_link_leads_somewhere(path):
    links = re.findall(r"\]\(([^)\s#]*)(?:#([^)\s]+))?\)", path.read_text())
    for target, anchor in links:
        if target.startswith("http"):
            continue
        found = (path.parent / target) if target else path
        assert found.exists(), f"{path}: {target}"
        assert not anchor or anchor in anchors(found), f"{path}: {target}#{anchor}"


def test_every_public_name_is_in_the_reference():
    """The reference lists each name once, under the shortest name by which users reach it."""
    text = "\n".join(path.read_text() for path in MANUAL if path.parent.name == "api")
    listed = re.findall(r"^\.\. auto(?:function|class|exception):: optax_lsdp\.(\S+)", text, re.M)
    assert len(listed) == len(set(listed))
    top = {name for name in lsdp.__all__ if not isinstance(getattr(lsdp, name), type(math))}
    public = set(top)
    for path in (ROOT / "optax_lsdp").iterdir():
        is_module = path.suffix == ".py" or (path / "__init__.py").exists()
        if is_module and not path.name.startswith("_") and path.stem != "cli":
            names = set(getattr(import_module(f"optax_lsdp.{path.stem}"), "__all__", top))
            public |= {f"{path.stem}.{name}" for name in names - top}
    assert set(listed) == public


def test_every_file_that_contributing_names_exists():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`([\w./-]+(?:/|\.py|\.md|\.txt|\.toml))`", text))
    assert len(named) > 30
    for name in sorted(named):
        assert any((root / name).exists() for root in (ROOT, ROOT / "optax_lsdp")), name


def test_the_glossary_is_short_and_true():
    """The glossary has at most 30 terms. The name of each term occurs in the file that it names."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.partition("## Glossary")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split("|") for line in table.splitlines() if line.startswith("| ")][2:]
    assert 20 <= len(rows) <= 30
    for term, _, names, _, where in rows:
        home = ROOT / "optax_lsdp" / where.strip(" `")
        source = home.read_text()
        assert any(name in source for name in re.findall(r"`(\w+)`", names)), f"{term}: {where}"


def test_the_numbers_are_those_of_the_results():
    for path, tables in report.texts().items():
        text = path.read_text()
        assert report.fill(text, tables) == text, f"{path}: run `python -m benchmarks.report`"
    numbers = json.loads((RESULTS / "summary.json").read_text())
    assert numbers == _report.numbers(), "run `python -m benchmarks.report`"


def test_the_epsilons_of_shuffled_and_poisson_batches_are_those_of_the_accountant():
    said = re.search(
        r"Take z = (\S+), batches of (\d+), (\d+) epochs of ([\d,]+) examples and δ = 1e-5\. "
        r"Poisson batches then give ε = (\S+)\. For shuffled batches \(`\"zero_out\"`\), the "
        r"accountant certifies no ε below (\d+)\.",
        " ".join((ROOT / "docs" / "accounting.md").read_text().split()),
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
    """README and the README of the paper's experiments give the advice."""
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
    """docs/smoothing.md and the README of the paper's experiments make the statements."""
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
    """A second run with the same seed has the same results."""
    once = load_record(RESULTS / "paper" / "cnn.json").get("noise", {})
    again = load_record(RESULTS / "paper" / "cnn_effects.json").get("smoothing", {})
    for name, smoothing in (("sgd 10 seed 0", "0"), ("lssgd 10 seed 0", "1")):
        if name in once and smoothing in again:
            assert once[name]["found"] == again[smoothing]["found"]
