"""The command line, as a person uses it."""

import json
import struct

import jax
import pytest

from optax_lsdp import demo
from optax_lsdp.__main__ import main


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ("demo --bogus 1", "unrecognized arguments: --bogus 1"),
        ("demo --epsilon -1", "`epsilon` must be positive and finite, got -1.0"),
        ("demo --epsilon much", "'much' is not a number"),
        ("demo --delta 2", "`delta` must be above 0 and below 1, got 2.0"),
        ("demo --steps 1.5", "'1.5' is not a whole number"),
        ("demo --output picture.pdf", "must end in .png, got 'picture.pdf'"),
        ("demo --output nowhere/picture.png", "no such folder: 'nowhere'"),
        ("demo --record .", "is a folder: '.'"),
        ("dmo", "invalid choice: 'dmo'"),
        ("", "required: COMMAND"),
    ],
)
def test_a_mistake_gets_one_clear_line(arguments, answer, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments.split())
    lines = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2
    assert len(lines) == 1 and answer in lines[0] and "--help" in lines[0]


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"]])
def test_help_is_given(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 0
    assert "smoothing" in capsys.readouterr().out


def test_the_demo_tells_who_is_protected_and_writes_what_it_found(tmp_path, capsys, monkeypatch):
    # The whole demo runs in CI as `make demo`; here one model, twice, at two values of σ.
    regression = demo.SoftmaxRegression()
    monkeypatch.setattr(demo, "MODELS", {"one": regression, "two": regression})
    monkeypatch.setattr(demo, "SMOOTHINGS", (0.0, 1.0))
    picture, record = tmp_path / "demo.png", tmp_path / "demo.json"
    options = f"--steps 2 --seeds 2 --epsilon 1.5 --output {picture} --record {record}"
    with jax.numpy_dtype_promotion("standard"):
        main(["demo", *options.split()])
    said = capsys.readouterr().out
    for words in (
        "1,257 training images",
        "ε = 1.5",
        "adding or removing one image",
        "full batches",
    ):
        assert words in said
    found = json.loads(record.read_text())
    assert len(found["results"]) == 4
    assert all(0 <= accuracy <= 1 for row in found["results"] for accuracy in row["accuracies"])
    head = picture.read_bytes()[:24]
    width, height = struct.unpack(">II", head[16:24])
    assert head.startswith(b"\x89PNG") and width > 800 and height > 300
