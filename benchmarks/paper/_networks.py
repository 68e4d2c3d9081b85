"""Train the paper's networks privately with `fit`.

A run keeps a folder in the cache until it ends, so a killed run can resume.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lsdp as lsdp
from benchmarks import _data
from benchmarks.paper import _record
from benchmarks.paper._tasks import Task
from optax_lsdp import training
from optax_lsdp.smoothing import Grid

EVALUATED = 1000  # images at a time


@dataclass(frozen=True)
class Setting:
    """One run; the defaults are the paper's.

    Attributes:
        optimizer: "sgd" or "adam".
        smoothing: σ.
        layout: "inputs", "stored", or "grid" for the height and width of convolution kernels.
        noise_multiplier: z.
        learning_rate: a tenth of it from step 10,000 on; None for the paper's.
        epochs: of Poisson batches.
        batch: their expected size.
        clip_norm: C.
        momentum: of SGD.
        average: as in `fit`; an average is what is then judged.
        views: how many random shifts of each image are averaged; 1 for the image as it is.
        sampling: "poisson"; or "shuffled", for public examples, which need no guarantee.
        seed: of parameters, batches and noise. It is known to all, as a real run's must not be.
    """

    optimizer: str = "sgd"
    smoothing: float = 0.0
    layout: str = "inputs"
    noise_multiplier: float = 10.0
    learning_rate: float | None = None
    epochs: float = 15
    batch: int = 256
    clip_norm: float = 1.0
    momentum: float = 0.0
    average: float | str | None = None
    views: int = 1
    sampling: str = "poisson"
    seed: int = 0

    def make_optimizer(self) -> optax.GradientTransformation:
        """Return the optimizer that the plan makes private."""
        usual = {"sgd": 0.15, "adam": 0.001}[self.optimizer]
        rate = optax.piecewise_constant_schedule(self.learning_rate or usual, {10_000: 0.1})
        if self.optimizer == "adam":
            return optax.adam(rate)
        return optax.sgd(rate, momentum=self.momentum or None)

    def plan(self, size: int) -> lsdp.PrivacyPlan:
        """Return the plan. It does not contain σ, so batches and noise are the same for all σ."""
        return lsdp.PrivacyPlan(
            dataset_size=size,
            expected_batch_size=min(self.batch, size),
            epochs=self.epochs,
            noise_multiplier=self.noise_multiplier,
            clip_norm=self.clip_norm,
            sampling=self.sampling,
            neighbouring="zero_out" if self.sampling == "shuffled" else None,
            delta=_record.DELTA,
        )


def run(task: Task, setting: Setting) -> Any:
    """Train, and return accuracies in percent and ε after every epoch."""
    plan = setting.plan(len(task.data.private[1]))
    folder = _folder(task, setting)
    curve = _Curve(task, plan, setting, folder / "curve.json")
    folder.mkdir(parents=True, exist_ok=True)
    done = training.fit(
        plan,
        _loss(task.model, setting.views),
        first_params(task, setting.seed),
        task.data.private,
        optimizer=setting.make_optimizer(),
        smoothing=lsdp.laplacian_smooth(setting.smoothing, layout=_layout(setting.layout)),
        average=setting.average,
        microbatch_size=max(1, task.microbatch_size // setting.views),
        folder=folder / "run",
        save_every=max(1, plan.steps // 10),
        callbacks=[curve],
        key=jax.random.key(setting.seed),
    )
    if done.stopped == "signal":
        raise SystemExit(f"Stopped at step {done.steps}; the same command goes on from there.")
    shutil.rmtree(folder)
    if done.stopped == "budget":  # code or versions changed during the run: start again
        return run(task, setting)
    return {**asdict(setting), "steps": done.steps, **curve.columns()}


def rehearse(task: Task, setting: Setting, seeds: tuple[int, ...]) -> Any:
    """Train on four fifths of the public examples, test on the rest; each seed has its own split.

    The mean gradient has the noise of the final run on all private examples. But there are fewer
    examples here, so techniques against overfitting gain more than in the final run.
    """
    found = [_rehearse_once(task, replace(setting, seed=seed)) for seed in seeds]
    return {**asdict(setting), "accuracies": found, "accuracy": float(np.mean(found))}


def _rehearse_once(task: Task, setting: Setting) -> float:
    size = len(task.data.public[1])
    order = np.roll(np.arange(size), (setting.seed % 5) * (size // 5))
    kept, held_out = (
        (task.data.public[0][part], task.data.public[1][part])
        for part in np.split(order, [size - size // 5])
    )
    share = len(kept[1]) / len(task.data.private[1])
    found = run(
        task._replace(name=f"{task.name}, rehearsed", data=_record.Split(kept, held_out, held_out)),
        replace(
            setting,
            batch=max(1, round(setting.batch * share)),
            noise_multiplier=setting.noise_multiplier * share,
            sampling="shuffled",
        ),
    )
    return found["validation_accuracies"][-1]


def first_params(task: Task, seed: int) -> Any:
    """Return random parameters."""
    return task.model.init(jax.random.key(seed), jnp.asarray(task.data.private[0][0]))


@partial(jax.jit, static_argnums=0)
def _count_right(model: nn.Module, params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    logits = jax.vmap(lambda image: model.apply(params, image))(images)
    return (logits.argmax(-1) == labels).sum()


def accuracy(model: nn.Module, params: Any, examples: _record.Examples) -> float:
    """Return the accuracy in percent."""
    size = len(examples[1])
    cuts = range(0, size, EVALUATED)
    right = (_count_right(model, params, *(x[i : i + EVALUATED] for x in examples)) for i in cuts)
    return 100 * int(sum(right)) / size


class _Curve:
    """A callback that evaluates the model once per epoch and appends the result to a file."""

    def __init__(self, task: Task, plan: lsdp.PrivacyPlan, setting: Setting, path: Path) -> None:
        self.task, self.path, self.is_averaged = task, path, setting.average is not None
        count = max(1, round(setting.epochs))
        self.due = {round(plan.steps * (i + 1) / count): i + 1 for i in range(count)}
        known = json.loads(path.read_text()) if path.exists() else {}
        self.seen = {int(step): row for step, row in known.items()}

    def __call__(self, report: training.StepReport) -> None:
        if report.step not in self.due:
            return
        params = report.average if self.is_averaged else report.params
        private, public, test = self.task.data
        del private  # the accuracy on private images would be private
        found = [accuracy(self.task.model, params, part) for part in (public, test)]
        self.seen[report.step] = [report.epsilon, *found]
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps(self.seen))
        draft.replace(self.path)

    def columns(self) -> dict[str, list[Any]]:
        """Return the evaluations as columns, by name."""
        names = ("epsilons", "validation_accuracies", "test_accuracies")
        columns = zip(*(self.seen[step] for step in self.due), strict=True)
        return {name: _record.rounded(column) for name, column in zip(names, columns, strict=True)}


def _folder(task: Task, setting: Setting) -> Path:
    words = json.dumps([task.name, asdict(setting)])
    return _data.cache_folder() / "runs" / hashlib.sha256(words.encode()).hexdigest()[:16]


def _loss(model: nn.Module, views: int) -> Callable[..., jax.Array]:
    def loss(params: Any, example: Any) -> jax.Array:
        image, label = example
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, image), label)

    return loss if views == 1 else training.average_views(loss, _shift, views)


def _shift(key: jax.Array, example: Any) -> Any:
    """Return an image shifted by up to two pixels in each direction."""
    image, label = example
    padded = jnp.pad(image, ((2, 2), (2, 2), (0, 0)))
    row, column = jax.random.randint(key, (2,), 0, 5)
    return jax.lax.dynamic_slice(padded, (row, column, 0), image.shape), label


def _layout(name: str) -> Any:
    def grid(path: str, shape: tuple[int, ...]) -> Any:
        return Grid((0, 1)) if len(shape) == 4 else "inputs"

    return grid if name == "grid" else name
