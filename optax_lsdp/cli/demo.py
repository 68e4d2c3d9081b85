"""The command `demo`: compare DP-SGD with DP-LSSGD on scikit-learn's digits at one (ε, δ)."""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from sklearn.datasets import load_digits
from tqdm import tqdm

import optax_lsdp as lsdp
from optax_lsdp._types import PyTree
from optax_lsdp.accounting import SampledGaussian, calibrate_noise_multiplier

SMOOTHINGS = (0.0, 0.3, 1.0, 3.0)
STEP_SIZES = (1.0, 2.0, 4.0, 8.0)
CLIP_NORM = 1.0
TRAIN, VALIDATION = 1257, 180  # the other 360 of the 1,797 images are for testing
BAR = "{desc:20}{percentage:3.0f}%|{bar:30}| {n}/{total}, {remaining} left"

Examples: TypeAlias = tuple[np.ndarray, np.ndarray]  # images and labels
Data: TypeAlias = tuple[Examples, Examples, Examples]  # for training, validation and test
State: TypeAlias = tuple[optax.Params, optax.OptState]


class Result(NamedTuple):
    """Accuracies of one model at one σ, with the step size that is best on validation data."""

    model: str
    smoothing: float
    step_size: float
    validation: float  # the mean accuracy on validation data, in percent
    accuracies: list[float]  # on test data, one for each seed
    optimizer: str
    mean: float  # the mean of `accuracies`, in percent
    deviation: float  # the standard deviation of `accuracies`, in percent


class ConvNet(nn.Module):
    """One convolution and one dense layer, with 2,730 parameters."""

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        """Return ten logits for one image."""
        hidden = nn.relu(nn.Conv(16, (3, 3), strides=2)(image))
        return nn.Dense(10)(hidden.reshape(-1))


class SoftmaxRegression(nn.Module):
    """One dense layer that starts at zero, with 650 parameters; its loss is convex."""

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        """Return ten logits for one image."""
        return nn.Dense(10, kernel_init=nn.initializers.zeros)(image.reshape(-1))


MODELS = {"softmax regression": SoftmaxRegression(), "small CNN": ConvNet()}


def load_data() -> Data:
    """Return the digits in a fixed random order, split into three parts."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.images))
    images = (digits.images[order] / 16).astype(np.float32)[..., None]
    labels = digits.target[order].astype(np.int32)
    cuts = [TRAIN, TRAIN + VALIDATION]
    training, validation, test = zip(np.split(images, cuts), np.split(labels, cuts), strict=True)
    return training, validation, test


def trainer(
    model: nn.Module, data: Data, noise_multiplier: float, steps: int
) -> Callable[[jax.Array, float, float], jax.Array]:
    """Return f(keys, σ, step size): for each key, the accuracies on validation and test data."""
    training, *held_out = data

    def loss(params: optax.Params, example: tuple[jax.Array, jax.Array]) -> jax.Array:
        image, label = example
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, image), label)

    def accuracy(params: optax.Params, examples: Examples) -> jax.Array:
        images, labels = examples
        logits: PyTree = jax.vmap(model.apply, in_axes=(None, 0))(params, images)
        return jnp.mean(jnp.argmax(logits, axis=-1) == labels)

    clipped_grad = lsdp.clipped_grad(loss, clip_norm=CLIP_NORM)

    def train(key: jax.Array, smoothing: jax.Array, step_size: jax.Array) -> jax.Array:
        init_key, noise_key = jax.random.split(key)
        tx = lsdp.dp_lssgd(
            step_size,
            clip_norm=CLIP_NORM,
            noise_multiplier=noise_multiplier,
            expected_batch_size=TRAIN,
            smoothing=smoothing,
            key=noise_key,
        )

        def step(carry: State, _: None) -> tuple[State, None]:
            params, state = carry
            updates, state = tx.update(clipped_grad(params, training), state, params)
            return (optax.apply_updates(params, updates), state), None

        params = model.init(init_key, training[0][0])
        (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), None, length=steps)
        return jnp.stack([accuracy(params, examples) for examples in held_out])

    return jax.jit(jax.vmap(train, in_axes=(0, None, None)))


def compare(steps: int, seeds: int, noise_multiplier: float) -> list[Result]:
    """Train every model at every σ and step size. Keep the step size that validates best."""
    data = load_data()
    keys = jax.vmap(jax.random.key)(jnp.arange(seeds))
    results = []
    total = len(MODELS) * len(SMOOTHINGS) * len(STEP_SIZES)
    with tqdm(total=total, unit="training", bar_format=BAR) as progress:
        for name, model in MODELS.items():
            progress.set_description(name)
            train = trainer(model, data, noise_multiplier, steps)
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
    trainings = len(MODELS) * len(SMOOTHINGS) * len(STEP_SIZES) * seeds
    return f"""\
Privacy of each training run
  Who      each of the {TRAIN:,} training images, against anybody who sees the model or all of its
           {steps} steps.
  What     (ε = {epsilon:g}, δ = {delta:g})-differential privacy: whether an image was in the data
           changes the odds of any conclusion by a factor of at most e^ε = {math.exp(epsilon):.3g},
           except with probability δ.
  How      full batches; each gradient clipped to norm {CLIP_NORM:g}; Gaussian noise on their sum
           with noise multiplier {noise_multiplier:.4g}; exact accounting of the Gaussian mechanism.
  Assumed  neighbouring datasets differ by adding or removing one image; the number of images is
           public; the noise is secret. (Here it comes from the seeds 0 to {seeds - 1}, so that you
           can reproduce the results; for real training, use `lsdp.fresh_key()`.)
  Not      the {VALIDATION} validation images, which choose the step sizes and count as public; nor
           all {trainings} training runs of this comparison together, which spend more than one run.
  Smoothing comes after the noise, so it neither costs nor gains privacy.
"""


def table(results: list[Result], seeds: int) -> str:
    """Return the results as text."""
    title = f"{'model':20}{'optimizer':11}{'σ':>5}{'step size':>11}  test accuracy, {seeds} seeds"
    rows = (
        f"{row.model:20}{row.optimizer:11}{row.smoothing:5g}{row.step_size:11g}"
        f"  {row.mean:.1f} ± {row.deviation:.1f} %"
        for row in results
    )
    return "\n".join([title, *rows])


def verdict(results: list[Result]) -> str:
    """Return how much smoothing gains, with the standard error of the paired differences."""
    lines = []
    for name in MODELS:
        plain, *smoothed = [result for result in results if result.model == name]
        best = max(smoothed, key=lambda result: result.validation)
        gains = 100 * (np.array(best.accuracies) - np.array(plain.accuracies))
        error, chance = "", ""
        if len(gains) > 1:
            deviation = gains.std(ddof=1) / math.sqrt(len(gains))
            error = f" ± {deviation:.1f}"
            chance = "" if abs(gains.mean()) > 2 * deviation else ", which may be chance"
        lines.append(
            f"{name}: σ = {best.smoothing:g}, the best value on validation images, changes the "
            f"test accuracy of DP-SGD by {gains.mean():+.1f}{error} points{chance}."
        )
    return "\n".join(lines)


def draw(results: list[Result], title: str, path: Path) -> None:
    """Draw accuracy against σ, with one panel per model."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(MODELS), sharey=True, layout="constrained")
    figure.set_size_inches(8, 3.2)
    for panel, name in zip(panels, MODELS, strict=True):
        rows = [result for result in results if result.model == name]
        places, means = range(len(rows)), [row.mean for row in rows]
        panel.axhline(rows[0].mean, color="0.6", linewidth=1, linestyle="--")
        panel.errorbar(places, means, [row.deviation for row in rows], fmt="o", capsize=4)
        panel.set_xticks(places, [f"{row.smoothing:g}\n{row.optimizer}" for row in rows])
        panel.set(title=name, xlabel="smoothing σ")
        panel.margins(x=0.15)
    panels[0].set_ylabel("test accuracy [%]")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=160)
    pyplot.close(figure)


def run(args: argparse.Namespace) -> None:
    """Print the statement and the table. Write the figure and, with `--record`, the numbers."""
    epsilon, delta, steps, seeds = args.epsilon, args.delta, args.steps, args.seeds
    noise_multiplier = calibrate_noise_multiplier(
        epsilon=epsilon, delta=delta, sampling_rate=1, steps=steps, sampling="full"
    )
    print(statement(epsilon, delta, steps, seeds, noise_multiplier))
    results = compare(steps, seeds, noise_multiplier)
    print(f"\n{table(results, seeds)}\n\n{verdict(results)}\n")
    title = f"digits, ε = {epsilon:g}, δ = {delta:g}, {steps} full-batch steps"
    draw(results, f"{title}; mean ± deviation of {seeds} seeds", args.output)
    spent = SampledGaussian(noise_multiplier, 1, steps, sampling="full").epsilon(delta)
    print(f"ε spent by each training run: {spent:.6g}. Figure: {args.output}")
    if args.record is not None:
        known = dict(epsilon=epsilon, delta=delta, steps=steps, seeds=seeds, images=TRAIN)
        rows = [result._asdict() for result in results]
        found = {**known, "noise_multiplier": noise_multiplier, "results": rows}
        text = json.dumps(found, indent=1, ensure_ascii=False)
        args.record.write_text(text + "\n", encoding="utf-8")
