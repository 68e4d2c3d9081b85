"""The demo: scikit-learn's digits go in, DP-SGD against DP-LSSGD at one (ε, δ) comes out."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from sklearn.datasets import load_digits
from tqdm import tqdm

import optax_lsdp as lsdp
from optax_lsdp.accounting import SampledGaussian, calibrate_noise_multiplier

SMOOTHINGS = (0.0, 0.3, 1.0, 3.0)
STEP_SIZES = (1.0, 2.0, 4.0, 8.0)
CLIP_NORM = 1.0
TRAIN, VALIDATION = 1257, 180  # the remaining 360 of the 1,797 images test
BAR = "{desc:20}{percentage:3.0f}%|{bar:30}| {n}/{total}, {remaining} left"


class Settings(NamedTuple):
    """What the command line decides."""

    epsilon: float
    delta: float
    steps: int
    seeds: int


class Result(NamedTuple):
    """Test accuracies of one model at one σ, with the step size that validation chose."""

    model: str
    smoothing: float
    step_size: float
    validation: float
    accuracies: list[float]

    @property
    def optimizer(self) -> str:
        """The name of the optimizer at this σ."""
        return "DP-LSSGD" if self.smoothing else "DP-SGD"

    @property
    def mean(self) -> float:
        """The mean over seeds, in percent."""
        return 100 * float(np.mean(self.accuracies))

    @property
    def deviation(self) -> float:
        """The standard deviation over seeds, in percent."""
        return 100 * float(np.std(self.accuracies, ddof=min(1, len(self.accuracies) - 1)))


class ConvNet(nn.Module):
    """One convolution and one dense layer: 2,730 parameters."""

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        """Return ten logits for one image."""
        hidden = nn.relu(nn.Conv(16, (3, 3), strides=2)(image))
        return nn.Dense(10)(hidden.reshape(-1))


class SoftmaxRegression(nn.Module):
    """One dense layer that starts at zero: 650 parameters, a convex loss."""

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        """Return ten logits for one image."""
        return nn.Dense(10, kernel_init=nn.initializers.zeros)(image.reshape(-1))


MODELS = {"softmax regression": SoftmaxRegression(), "small CNN": ConvNet()}


def load_data() -> tuple[Any, Any, Any]:
    """Return (images, labels) for training, validation and test."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.images))
    images = (digits.images[order] / 16).astype(np.float32)[..., None]
    labels = digits.target[order].astype(np.int32)
    cuts = [TRAIN, TRAIN + VALIDATION]
    training, validation, test = zip(np.split(images, cuts), np.split(labels, cuts), strict=True)
    return training, validation, test


def trainer(model: nn.Module, data: Any, noise_multiplier: float, steps: int) -> Any:
    """Return `train(keys, smoothing, step_size)`: each key's validation and test accuracy."""
    training, *held_out = data

    def loss(params: Any, example: Any) -> jax.Array:
        image, label = example
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, image), label)

    def accuracy(params: Any, examples: Any) -> jax.Array:
        images, labels = examples
        logits: Any = jax.vmap(model.apply, in_axes=(None, 0))(params, images)
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

        def step(run: Any, _: None) -> tuple[Any, None]:
            params, state = run
            updates, state = tx.update(clipped_grad(params, training), state, params)
            return (optax.apply_updates(params, updates), state), None

        params = model.init(init_key, training[0][0])
        (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), None, length=steps)
        return jnp.stack([accuracy(params, examples) for examples in held_out])

    return jax.jit(jax.vmap(train, in_axes=(0, None, None)))


def compare(settings: Settings, noise_multiplier: float) -> list[Result]:
    """Train every model at every σ and step size; keep the step size that validates best."""
    data = load_data()
    keys = jax.vmap(jax.random.key)(jnp.arange(settings.seeds))
    results = []
    total = len(MODELS) * len(SMOOTHINGS) * len(STEP_SIZES)
    with tqdm(total=total, unit="training", bar_format=BAR) as progress:
        for name, model in MODELS.items():
            progress.set_description(name)
            train = trainer(model, data, noise_multiplier, settings.steps)
            for smoothing in SMOOTHINGS:
                runs = {}
                for step_size in STEP_SIZES:
                    runs[step_size] = np.asarray(train(keys, smoothing, step_size))
                    progress.update()
                best = max(STEP_SIZES, key=lambda step_size: runs[step_size][:, 0].mean())
                validation, test = runs[best].T
                validated = 100 * float(validation.mean())
                results.append(Result(name, smoothing, best, validated, test.tolist()))
    return results


def statement(settings: Settings, noise_multiplier: float) -> str:
    """Say in plain words who is protected, how much, and what was assumed."""
    epsilon, delta, steps, seeds = settings
    trainings = len(MODELS) * len(SMOOTHINGS) * len(STEP_SIZES) * seeds
    return f"""\
Privacy of each training
  Who      every one of the {TRAIN:,} training images, against anybody who sees the model,
           or all of its {steps} steps.
  What     (ε = {epsilon:g}, δ = {delta:g})-differential privacy: whether an image was there or not
           changes the odds of anything they may conclude by at most e^ε = {math.exp(epsilon):.3g},
           but for events of probability δ.
  How      full batches; each gradient clipped to norm {CLIP_NORM:g}; Gaussian noise on their sum
           with noise multiplier {noise_multiplier:.4g}; exact accounting of the Gaussian mechanism.
  Assumed  neighbouring datasets differ by adding or removing one image, their number
           is public, and the noise is secret. (Here it comes from the seeds 0 to {seeds - 1}, so
           that you see what we saw; real training takes `lsdp.fresh_key()`.)
  Not      the {VALIDATION} validation images, which chose the step sizes and count as public; nor
           all {trainings} trainings of this comparison together, which spend more than one.
  Smoothing comes after the noise: it neither costs privacy nor buys any.
"""


def table(results: list[Result], seeds: int) -> str:
    """Return the results as text."""
    lines = [f"{'model':20}{'optimizer':11}{'σ':>5}{'step size':>11}  test accuracy, {seeds} seeds"]
    for result in results:
        lines.append(
            f"{result.model:20}{result.optimizer:11}{result.smoothing:5g}{result.step_size:11g}"
            f"  {result.mean:.1f} ± {result.deviation:.1f} %"
        )
    return "\n".join(lines)


def verdict(results: list[Result]) -> str:
    """Say what smoothing was worth, with its standard error over the seeds, pair by pair."""
    lines = []
    for name in MODELS:
        plain, *smoothed = [result for result in results if result.model == name]
        best = max(smoothed, key=lambda result: result.validation)
        gains = 100 * (np.array(best.accuracies) - np.array(plain.accuracies))
        change = f"{gains.mean():+.1f} points"
        if len(gains) > 1:
            error = gains.std(ddof=1) / math.sqrt(len(gains))
            change = f"{gains.mean():+.1f} ± {error:.1f} points"
            change += "" if abs(gains.mean()) > 2 * error else ", which may be chance"
        lines.append(
            f"{name}: σ = {best.smoothing:g}, the best on validation images, changes the test "
            f"accuracy of DP-SGD by {change}."
        )
    return "\n".join(lines)


def draw(results: list[Result], settings: Settings, path: Path) -> None:
    """Draw accuracy against σ, one panel for each model."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(MODELS), figsize=(8, 3.2), sharey=True, layout="constrained"
    )
    for panel, name in zip(panels, MODELS, strict=True):
        rows = [result for result in results if result.model == name]
        places = range(len(rows))
        panel.axhline(rows[0].mean, color="0.6", linewidth=1, linestyle="--")
        panel.errorbar(
            places, [r.mean for r in rows], [r.deviation for r in rows], fmt="o", capsize=4
        )
        labels = [f"{r.smoothing:g}\n{r.optimizer}" for r in rows]
        panel.set_xticks(places, labels)
        panel.set(title=name, xlabel="smoothing σ")
        panel.margins(x=0.15)
    panels[0].set_ylabel("test accuracy [%]")
    figure.suptitle(
        f"digits, ε = {settings.epsilon:g}, δ = {settings.delta:g}, {settings.steps} full-batch "
        f"steps; mean ± deviation of {settings.seeds} seeds",
        fontsize=10,
    )
    figure.savefig(path, dpi=160)
    pyplot.close(figure)


def run(settings: Settings, output: Path, record: Path | None = None) -> None:
    """Run the demo: print the statement and the table, write the figure and the record."""
    noise_multiplier = calibrate_noise_multiplier(
        epsilon=settings.epsilon,
        delta=settings.delta,
        sampling_rate=1,
        steps=settings.steps,
        sampling="full",
    )
    mechanism = SampledGaussian(noise_multiplier, 1, settings.steps, sampling="full")
    print(statement(settings, noise_multiplier))
    results = compare(settings, noise_multiplier)
    print(f"\n{table(results, settings.seeds)}\n\n{verdict(results)}\n")
    draw(results, settings, output)
    print(f"ε spent by each training: {mechanism.epsilon(settings.delta):.6g}. Figure: {output}")
    if record is not None:
        derived = ("optimizer", "mean", "deviation")
        rows = [{**r._asdict(), **{name: getattr(r, name) for name in derived}} for r in results]
        known = {**settings._asdict(), "images": TRAIN, "noise_multiplier": noise_multiplier}
        text = json.dumps({**known, "results": rows}, indent=1, ensure_ascii=False)
        record.write_text(text + "\n", encoding="utf-8")
