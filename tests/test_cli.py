"""Tests of the command line, as a person uses it."""

import functools
import json
import re
import struct
import subprocess
import sys
from functools import partial

import jax
import numpy as np
import pytest

import optax_lsdp as lsdp
from optax_lsdp.accounting import (
    CorrelatedGaussian,
    SampledGaussian,
    calibrate_noise_multiplier,
)
from optax_lsdp.cli import demo, main
from optax_lsdp.correlation import optimize_banded
from tests import oracles

SETTING = "--dataset-size 60000 --batch-size 256 --steps 14100"


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ("demo --bogus 1", "unrecognized arguments: --bogus 1"),
        ("demo --epsilon -1", "--epsilon: must be positive and finite, got -1.0"),
        ("demo --epsilon much", "'much' is not a number"),
        ("demo --delta 2", "--delta: must be above 0 and below 1, got 2.0"),
        ("demo --steps 1.5", "'1.5' is not a whole number"),
        ("demo --output picture.pdf", "must end in .png, got 'picture.pdf'"),
        ("demo --output nowhere/picture.png", "no such folder: 'nowhere'"),
        ("demo --record .", "must be a file, got the folder '.'"),
        (f"epsilon {SETTING}", "required: --noise-multiplier"),
        (f"epsilon {SETTING} --noise-multiplier 0", "--noise-multiplier: must be positive"),
        (f"epsilon {SETTING} --noise-multiplier 1 --epochs 3", "not allowed with"),
        ("epsilon --batch-size 10 --noise-multiplier 1 --steps 1", "required: --dataset-size"),
        (
            "epsilon --dataset-size 9 --batch-size 10 --noise-multiplier 1 --steps 1",
            "--batch-size 10 must be at most --dataset-size 9",
        ),
        (
            f"epsilon {SETTING} --noise-multiplier 1 --sampling shuffled",
            "--neighbouring must be 'zero_out' or 'replace_one' with --sampling shuffled, got none",
        ),
        (
            f"epsilon {SETTING} --noise-multiplier 1 --sampling full",
            "--batch-size must be 60000, the whole dataset, with --sampling full",
        ),
        (f"calibrate {SETTING} --epsilon nan", "--epsilon: must be positive and finite, got nan"),
        (
            f"epsilon {SETTING} --noise-multiplier 1 --bands 8 --sampling full",
            "--sampling full does not go with --bands",
        ),
        (
            f"calibrate {SETTING} --epsilon 1 --bands 1000",
            "at most 60, because --bands splits the data into 1000 parts of this size, got",
        ),
        ("audit --seed -1", "--seed: must be a whole number, 0 or more, got -1;"),
        (
            "epsilon --dataset-size 9 --batch-size 3 --noise-multiplier 1 --epochs 1e300",
            "--epochs must be low enough for at most 1e+09 steps, got 1e+300; lower --epochs or",
        ),
        (f"calibrate {SETTING} --epsilon 1 --plot e.gif", "must end in .png, got 'e.gif'"),
        ("dmo", "invalid choice: 'dmo'"),
        ("", "required: COMMAND"),
    ],
)
def test_a_mistake_is_answered_with_one_line(arguments, answer, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments.split())
    lines = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2
    assert len(lines) == 1 and answer in lines[0] and "--help" in lines[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--help", "smoothing"),
        ("demo --help", "smoothing"),
        ("epsilon --help", "How to read the answer"),
        ("calibrate --help", "the ε that may be spent"),
    ],
)
def test_every_command_has_help(arguments, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments.split())
    assert stopped.value.code == 0
    assert words in capsys.readouterr().out


def test_epsilon_prints_the_guarantee_in_words_and_its_alternatives(capsys):
    main(f"epsilon {SETTING} --noise-multiplier 1.1 --delta 1e-5".split())
    said = " ".join(capsys.readouterr().out.split())
    for words in (
        "ε = 2.386 at δ = 1e-05.",
        "whether any one example was in the data",
        "with probability 0.004267, independently",
        "Gaussian noise of standard deviation 1.1·C",
        "Poisson, one example replaced ε = 4.229",
        "fixed size without replacement, one example replaced",
        "shuffled, one example blanked out ε = 54.71 at most, in any order",  # 61 uses
    ):
        assert words in said


def test_epsilon_does_not_load_jax():
    script = (
        "import sys; sys.modules.update(jax=None, jaxlib=None, optax=None)\n"
        "from optax_lsdp.cli import main\n"
        "main('calibrate --dataset-size 9 --batch-size 9 --steps 5 --epsilon 1'.split()"
        " + ['--sampling', 'full'])"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)


def test_epochs_are_converted_to_steps(capsys):
    options = "--dataset-size 60000 --batch-size 256 --noise-multiplier 1.1 --json"
    answers = []
    for length in ("--epochs 60", "--steps 14063"):
        main(f"epsilon {options} {length}".split())
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0] == answers[1]
    assert answers[0]["delta"] == 1e-6


@pytest.mark.parametrize("length", ["--epochs 2", "--steps 6", "--steps 8"])
def test_epsilon_of_shuffled_batches_covers_how_often_the_sampler_uses_an_example(length, capsys):
    """An epoch has ⌊10/3⌋ = 3 batches, so that 8 steps belong to three epochs."""
    options = "--dataset-size 10 --batch-size 3 --noise-multiplier 2 --delta 1e-3"
    main(f"epsilon {options} {length} --json --sampling shuffled --neighbouring zero_out".split())
    epsilon = json.loads(capsys.readouterr().out)["epsilon"]
    name, count = length.removeprefix("--").split()
    plan = lsdp.PrivacyPlan(
        **{name: int(count)},
        dataset_size=10,
        expected_batch_size=3,
        noise_multiplier=2.0,
        delta=1e-3,
        sampling="shuffled",
        neighbouring="zero_out",
    )
    assert epsilon == pytest.approx(plan.epsilon, rel=1e-6)
    sampler = plan.sampler(jax.random.key(0))
    used = np.concatenate([sampler.batch(step).indices for step in range(plan.steps)])
    most = np.bincount(used).max()
    once = SampledGaussian(2.0, 1.0, int(most), sampling="full", neighbouring="zero_out")
    assert epsilon >= once.epsilon(1e-3) * (1 - 1e-9)


def test_bands_calibrate_correlated_noise_and_compare_it_with_independent_noise(capsys):
    run = "--dataset-size 1000 --batch-size 50 --steps 60 --delta 1e-5 --bands 4"
    main(f"calibrate {run} --epsilon 6 --json".split())
    found = json.loads(capsys.readouterr().out)
    z, matrix = found["noise_multiplier"], optimize_banded(60, 4)
    mechanism = CorrelatedGaussian(z, matrix, sampling_rate=0.05)
    assert found["epsilon"] == mechanism.epsilon(1e-5) <= 6
    alone = calibrate_noise_multiplier(
        epsilon=found["epsilon"], delta=1e-5, sampling_rate=0.05, steps=60
    )
    noises = [z * matrix.noise_column(), np.eye(60)[0] * alone]
    left = [np.mean([np.sum(np.cumsum(n)[: t + 1] ** 2) for t in range(60)]) for n in noises]
    ratio = found["noise_in_parameters_against_independent"]
    np.testing.assert_allclose(ratio, np.sqrt(left[0] / left[1]), rtol=1e-9)
    main(f"epsilon {run} --noise-multiplier {z}".split())
    words = " ".join(capsys.readouterr().out.split())
    assert "matrix with 4 bands" in words
    assert f"leaves {1 / ratio:.3g} times as much noise in the parameters" in words


@pytest.mark.parametrize("noise", ["300", "1e9", "1e-5", "1e-160"])
def test_an_epsilon_of_zero_or_far_too_large_is_printed_without_a_comparison(noise, capsys):
    run = "epsilon --dataset-size 1000000 --batch-size 10 --steps 10 --bands 2"
    main(f"{run} --noise-multiplier {noise} --json".split())
    found = json.loads(capsys.readouterr().out)
    assert found["epsilon"] == 0 if float(noise) > 1 else found["epsilon"] > 1e5
    assert found["independent_noise_multiplier"] is None
    assert found["noise_in_parameters_against_independent"] is None
    main(f"{run} --noise-multiplier {noise}".split())
    said = capsys.readouterr().out
    assert said.startswith("ε = ") and "Independent noise" not in said


def test_the_printed_noise_multiplier_suffices(capsys):
    size = "--dataset-size 9 --batch-size 9"
    main(f"calibrate {size} --steps 50 --epsilon 1 --delta 1e-5 --sampling full".split())
    said = capsys.readouterr().out
    for noise in re.findall(r"(?:z = |deviation )([\d.]+\d)", " ".join(said.split())):
        run = SampledGaussian(float(noise), 1.0, 50, sampling="full")
        assert run.epsilon(1e-5) <= 1.0
    assert said.count(noise) == 2


def test_calibrate_prints_json_and_words_and_draws_a_figure(tmp_path, capsys):
    path = tmp_path / "spent.png"
    options = "--dataset-size 1000 --batch-size 20 --steps 300 --epsilon 2 --delta 1e-4"
    main(f"calibrate {options} --json --plot {path}".split())
    answer = json.loads(capsys.readouterr().out)
    assert answer["epsilon_lower_bound"] <= answer["epsilon"] <= 2 <= 1.001 * answer["epsilon"]
    assert [row["sampling"] for row in answer["otherwise"]].count("shuffled") == 2
    assert path.read_bytes().startswith(b"\x89PNG")
    main(f"calibrate {options} --sampling without_replacement --neighbouring replace_one".split())
    said = capsys.readouterr().out
    assert said.startswith("Noise multiplier z = ") and "ε = 2.000 at" in said
    main(
        f"epsilon {options.replace('--epsilon', '--noise-multiplier')} --max-batch-size 30".split()
    )
    assert "of a larger batch, 30 examples are kept" in " ".join(capsys.readouterr().out.split())


def test_the_demo_prints_its_guarantee_and_writes_its_results(tmp_path, capsys, monkeypatch):
    # CI runs the whole demo as `make demo`. Here one small problem stands for two.
    train = functools.cache(partial(demo.trainer, demo.spectra(16, 2, 1500)))
    monkeypatch.setattr(demo, "trainer", lambda examples, *settings: train(*settings))
    monkeypatch.setattr(demo, "PROBLEMS", {"one": demo.digits, "two": demo.digits})
    monkeypatch.setattr(demo, "SMOOTHINGS", (0.0, 1.0, "auto"))
    picture, record = tmp_path / "demo.png", tmp_path / "demo.json"
    options = f"--steps 2 --seeds 2 --epsilon 1.5 --output {picture} --record {record}"
    with jax.numpy_dtype_promotion("standard"):
        main(["demo", *options.split()])
    said = capsys.readouterr().out
    for words in (
        "1,257 training examples",
        "ε = 1.5",
        "adding or removing one example",
        "two: σ = auto changes the accuracy",
        "full batches",
    ):
        assert words in said
    found = json.loads(record.read_text())
    assert len(found["results"]) == 6
    assert all(0 <= accuracy <= 1 for row in found["results"] for accuracy in row["accuracies"])
    head = picture.read_bytes()[:24]
    width, height = struct.unpack(">II", head[16:24])
    assert head.startswith(b"\x89PNG") and width > 800 and height > 300


def test_curvature_says_where_smoothing_helps_in_the_demo():
    """Length counts noise alike in all directions, so the rule of "auto" smooths digits too."""
    line, side = oracles.second_difference(256), oracles.second_difference(8)
    square = np.kron(side, np.eye(8)) + np.kron(np.eye(8), side)
    best = []
    for problem, laplacian in ((demo.spectra, line), (demo.digits, square)):
        inputs, labels = (x[: demo.TRAIN].astype(float) for x in problem())
        signal = inputs.T @ ((labels[:, None] == np.unique(labels)) - 1 / len(np.unique(labels)))
        signal -= signal.mean(axis=0)
        gains = []
        for smoothing in (0.0, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0):
            matrix = np.linalg.inv(np.eye(len(laplacian)) - smoothing * laplacian)
            progress = np.sum(signal * (matrix @ signal)) ** 2
            gains.append([progress / np.sum(x**2) for x in (matrix, inputs @ matrix)])
        best.append(np.argmax(gains, axis=0))
    assert best[0][0] > 4 and best[0][1] == 4  # spectra: σ = 10, which is the best in the record
    assert best[1][0] > 0 and best[1][1] == 0  # digits: no smoothing


def test_the_problems_of_the_demo_have_smooth_and_rough_weights():
    """The class means of spectra hardly change from channel to channel; those of digits do."""
    jumps = []
    for problem in (demo.spectra, demo.digits):
        inputs, labels = problem()
        assert len(inputs) > demo.TRAIN + demo.VALIDATION and inputs.dtype == np.float32
        means = np.stack([inputs[labels == one].mean(axis=0) for one in range(labels.max() + 1)])
        means -= means.mean(axis=0)
        jumps.append(np.square(np.diff(means, axis=1)).mean() / means.var())
    assert jumps[0] < 0.1 < 0.5 < jumps[1]
