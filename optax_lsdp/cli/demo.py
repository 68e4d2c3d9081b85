"""The command `demo`: where smoothing helps and where it does not, at one (ε, δ).

On spectra, neighbouring weights are similar, so smoothing removes noise. On the digits of
scikit-learn, with 8 × 8 pixels, neighbouring weights differ, so smoothing removes signal.
"""

import argparse
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from sklearn.datasets import load_digits
from tqdm import tqdm

import optax_lsdp as lsdp
from optax_lsdp.accounting import SampledGaussian, calibrate_noise_multiplier

Strength: TypeAlias = float | Literal["auto"]
SMOOTHINGS: tuple[Strength, ...] = (0.0, 0.3, 1.0, 3.0, 10.0, "auto")
STEP_SIZES = (1.0, 2.0, 4.0, 8.0)
CLIP_NORM = 1.0
TRAIN, VALIDATION = 1257, 180  # all other examples of a problem are for testing
BAR = "{desc:20}{percentage:3.0f}%|{bar:30}| {n}/{total}, {remaining} left"

Examples: TypeAlias = tuple[np.ndarray, np.ndarray]  # inputs: (n, d), and labels: (n,)
State: TypeAlias = tuple[optax.Params, optax.OptState]


class Result(NamedTuple):
    """Accuracies on one problem at one σ. The step size is the best on validation data."""

    problem: str
    smoothing: Strength
    step_size: float
    validation: float  # the mean accuracy on validation data, in percent
    accuracies: list[float]  # on test data, one for each seed
    optimizer: str
    mean: float  # the mean of `accuracies`, in percent
    deviation: float  # the standard deviation of `accuracies`, in percent


def digits() -> Examples:
    """Return scikit-learn's 1,797 digits of 8 × 8 pixels, in a fixed random order."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.images))
    images = data.images[order].reshape(len(order), -1) / 16
    return images.astype(np.float32), data.target[order].astype(np.int32)


def spectra(channels: int = 256, substances: int = 5, size: int = 2637) -> Examples:
    """Return random spectra of mixtures. The label of a mixture is its main substance.

    The spectrum of a substance is the sum of four peaks, which are 4 to 12 channels wide. At least
    60 % of a mixture is its main substance. The measurement errors of channels are independent.
    """
    random = np.random.default_rng(0)
    shape = (substances, 4, 1)
    places, widths = random.uniform(0, channels, shape), random.uniform(4, 12, shape)
    heights = random.uniform(0.5, 1, shape)
    distances = (np.arange(channels) - places) / widths
    substance = np.sum(heights * np.exp(-(distances**2) / 2), axis=1)
    labels = random.integers(substances, size=size)
    shares = 0.4 * random.dirichlet(np.full(substances, 0.5), size)
    shares[np.arange(size), labels] += 0.6
    brightness = random.uniform(0.5, 1.5, (size, 1))
    measured = brightness * (shares @ substance) + 0.5 * random.normal(size=(size, channels))
    return (2 / math.sqrt(channels) * measured).astype(np.float32), labels.astype(np.int32)


PROBLEMS = {"spectra, 256 channels": spectra, "digits, 8 × 8 pixels": digits}


def trainer(
    examples: Examples, noise_multiplier: float, steps: int
) -> Callable[[jax.Array, Strength, float], jax.Array]:
    """Return `run(keys, σ, step size)`: accuracies on validation and test data, for each key."""
    cuts = [TRAIN, TRAIN + VALIDATION]
    training, *held_out = zip(*(np.split(part, cuts) for part in examples), strict=True)
    inputs, labels = examples
    start = {
        "kernel": jnp.zeros((inputs.shape[1], labels.max() + 1)),
        "bias": jnp.zeros(labels.max() + 1),
    }

    def logits(params: optax.Params, inputs: jax.Array | np.ndarray) -> jax.Array:
        return inputs @ params["kernel"] + params["bias"]

    def loss(params: optax.Params, example: tuple[jax.Array, jax.Array]) -> jax.Array:
        one, label = example
        return optax.softmax_cross_entropy_with_integer_labels(logits(params, one), label)

    def accuracy(params: optax.Params, examples: Examples) -> jax.Array:
        inputs, labels = examples
        return jnp.mean(jnp.argmax(logits(params, inputs), axis=-1) == labels)

    clipped_grad = lsdp.clipped_grad(loss, clip_norm=CLIP_NORM)

    def train(
        key: jax.Array, step_size: jax.Array, smoothing: jax.Array | Literal["auto"]
    ) -> jax.Array:
        tx = lsdp.privatize(
            optax.sgd(step_size),
            clip_norm=CLIP_NORM,
            noise_multiplier=noise_multiplier,
            expected_batch_size=TRAIN,
            smoothing=smoothing,
            sampling_rate=1.0,
            key=key,
        )

        def step(carry: State, _: None) -> tuple[State, None]:
            params, state = carry
            updates, state = tx.update(clipped_grad(params, training), state, params)
            return (optax.apply_updates(params, updates), state), None

        (params, _), _ = jax.lax.scan(step, (start, tx.init(start)), None, length=steps)
        return jnp.stack([accuracy(params, examples) for examples in held_out])

    fixed = jax.jit(jax.vmap(train, in_axes=(0, None, None)))
    auto = jax.jit(jax.vmap(partial(train, smoothing="auto"), in_axes=(0, None)))

    def run(keys: jax.Array, smoothing: Strength, step_size: float) -> jax.Array:
        return auto(keys, step_size) if smoothing == "auto" else fixed(keys, step_size, smoothing)

    return run


def compare(steps: int, seeds: int, noise_multiplier: float) -> list[Result]:
    """Train on every problem with every σ and step size.

    For each problem and σ, keep the step size with the highest accuracy on validation data.
    """
    keys = jax.vmap(jax.random.key)(jnp.arange(seeds))
    results = []
    total = len(PROBLEMS) * len(SMOOTHINGS) * len(STEP_SIZES)
    with tqdm(total=total, unit="training", bar_format=BAR) as progress:
        for name, examples in PROBLEMS.items():
            progress.set_description(name.partition(",")[0])
            train = trainer(examples(), noise_multiplier, steps)
            for smoothing in SMOOTHINGS:
                runs = {}
                for step_size in STEP_SIZES:
                    runs[step_size] = np.asarray(train(keys, smoothing, step_size))
                    progress.update()
                best = max(STEP_SIZES, key=lambda step_size: runs[step_size][:, 0].mean())
                validation, test = runs[best].T
                validated, accuracies = 100 * float(validation.mean()), test.tolist()
                mean = 100 * float(np.mean(accuracies))
                deviation = 100 * float(np.std(accuracies, ddof=min(1, len(accuracies) - 1)))
                optimizer = "DP-LSSGD" if smoothing else "DP-SGD"
                results.append(
                    Result(name, smoothing, best, validated, accuracies, optimizer, mean, deviation)
                )
    return results


def statement(epsilon: float, delta: float, steps: int, seeds: int, noise_multiplier: float) -> str:
    """Return in plain words who is protected, how much, and under which assumptions."""
    trainings = len(PROBLEMS) * len(SMOOTHINGS) * len(STEP_SIZES) * seeds
    return f"""\
Privacy of each training run
  Who      each of the {TRAIN:,} training examples, which are spectra or images of digits, against
           anybody who sees the model or all of its {steps} steps.
  What     (ε = {epsilon:g}, δ = {delta:g})-differential privacy: whether an example was in the data
           changes the odds of any conclusion by a factor of at most e^ε = {math.exp(epsilon):.3g},
           except with probability δ.
  How      full batches; each gradient clipped to norm {CLIP_NORM:g}; Gaussian noise on their sum
           with noise multiplier {noise_multiplier:.4g}; exact accounting of the Gaussian mechanism.
  Assumed  neighbouring datasets differ by adding or removing one example; the number of examples is
           public; the noise is secret. (Here it comes from the seeds 0 to {seeds - 1}, so that you
           can reproduce the results; for real training, use `lsdp.fresh_key()`.)
  Not      the {VALIDATION} validation examples, which choose step sizes and count as public; nor
           all {trainings} training runs of this comparison together, whose ε is larger.
  Smoothing comes after the noise, so it neither costs nor gains privacy. σ = auto is chosen from
  noisy gradients alone.
"""


def table(results: list[Result], seeds: int) -> str:
    """Return the results as text."""
    title = f"{'problem':24}{'optimizer':11}{'σ':>5}{'step size':>11}  test accuracy, {seeds} seeds"
    rows = (
        f"{row.problem:24}{row.optimizer:11}{_show(row.smoothing):>5}{row.step_size:11g}"
        f"  {row.mean:.1f} ± {row.deviation:.1f} %"
        for row in results
    )
    return "\n".join([title, *rows])


def _show(smoothing: Strength) -> str:
    return smoothing if isinstance(smoothing, str) else f"{smoothing:g}"


def verdict(results: list[Result]) -> str:
    """Return sentences on how much smoothing gains: a mean over seeds and its standard error."""
    lines = []
    for name in PROBLEMS:
        plain, *smoothed = [result for result in results if result.problem == name]
        fixed = [result for result in smoothed if result.smoothing != "auto"]
        best = max(fixed, key=lambda result: result.validation)
        others = [result for result in smoothed if result not in fixed]
        for result in (best, *others):
            gains = 100 * (np.array(result.accuracies) - np.array(plain.accuracies))
            note = ", the best on validation data," if result is best else ""
            error, chance = "", ""
            if len(gains) > 1:
                deviation = gains.std(ddof=1) / math.sqrt(len(gains))
                error = f" ± {deviation:.1f}"
                chance = "" if abs(gains.mean()) > 2 * deviation else ", which may be chance"
            lines.append(
                f"{name}: σ = {_show(result.smoothing)}{note} "
                f"changes the accuracy of DP-SGD by {gains.mean():+.1f}{error} points{chance}."
            )
    return "\n".join(lines)


def draw(results: list[Result], title: str, path: Path) -> None:
    """Draw accuracy against σ, with one panel per problem."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(PROBLEMS), sharey=True, layout="constrained")
    figure.set_size_inches(8.5, 3.4)
    for panel, name in zip(panels, PROBLEMS, strict=True):
        rows = [result for result in results if result.problem == name]
        panel.axhline(rows[0].mean, color="0.6", linewidth=1, linestyle="--")
        for place, row in enumerate(rows):
            color = "C1" if row.smoothing == "auto" else "C0"
            panel.errorbar(place, row.mean, row.deviation, fmt="o", capsize=4, color=color)
        panel.set_xticks(range(len(rows)), [_show(row.smoothing) for row in rows])
        panel.set(title=name, xlabel="smoothing σ (0: DP-SGD)")
        panel.margins(x=0.15)
    panels[0].set_ylabel("test accuracy [%]")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=160)
    pyplot.close(figure)


def run(args: argparse.Namespace) -> None:
    """Print the privacy statement and the results. Write the figure and, if asked, the record."""
    epsilon, delta, steps, seeds = args.epsilon, args.delta, args.steps, args.seeds
    noise_multiplier = calibrate_noise_multiplier(
        epsilon=epsilon, delta=delta, sampling_rate=1, steps=steps, sampling="full"
    )
    print(statement(epsilon, delta, steps, seeds, noise_multiplier))
    results = compare(steps, seeds, noise_multiplier)
    print(f"\n{table(results, seeds)}\n\n{verdict(results)}\n")
    title = f"softmax regression, ε = {epsilon:g}, δ = {delta:g}, {steps} full-batch steps"
    draw(results, f"{title}; mean ± deviation of {seeds} seeds", args.output)
    spent = SampledGaussian(noise_multiplier, 1, steps, sampling="full").epsilon(delta)
    print(f"ε spent by each training run: {spent:.6g}. Figure: {args.output}")
    if args.record is not None:
        known = dict(epsilon=epsilon, delta=delta, steps=steps, seeds=seeds, examples=TRAIN)
        rows = [result._asdict() for result in results]
        found = {**known, "noise_multiplier": noise_multiplier, "results": rows}
        text = json.dumps(found, indent=1, ensure_ascii=False)
        args.record.write_text(text + "\n", encoding="utf-8")
