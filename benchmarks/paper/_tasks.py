"""The tasks of the networks: MNIST or CIFAR-10, with a part treated as public."""

import argparse
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import numpy as np

from benchmarks import _data
from benchmarks.paper import _record, _wavelets
from benchmarks.zoo import CifarCNN, MnistCNN, conv_by_blocks, half_by_slices, max_pool_by_slices


class Task(NamedTuple):
    """A named task: a model, and labelled images (n, height, width, channels)."""

    name: str
    model: nn.Module
    data: _record.Split
    microbatch_size: int  # processors are fastest at this size


def mnist(args: argparse.Namespace) -> Task:
    """Return MNIST for the paper's network, with pixels between 0 and 1; digits for a smoke run."""
    data = _record.mnist(args)
    side = 8 if args.smoke else 28
    images = _changed(data, lambda x: x.reshape(-1, side, side, 1))
    if args.smoke:
        images = _changed(images, lambda x: np.pad(_thrice(x), ((0, 0), (2, 2), (2, 2), (0, 0))))
    return Task("mnist", MnistCNN(max_pool_by_slices, conv_by_blocks), images, 32)


class Softmax(nn.Module):
    """Softmax regression on features (row, column, channel), with zero initial weights."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the logits of one image."""
        return nn.DenseGeneral(10, axis=(-3, -2, -1), kernel_init=nn.initializers.zeros)(x)


def on_wavelets(task: Task) -> Task:
    """Return softmax regression on scattering coefficients, standardised on public images."""
    features = _changed(task.data, _wavelets.scatter)
    public = features.public[0]
    mean = public.mean(axis=0)
    deviation = (public - mean).std(axis=(0, 1, 2))
    data = _changed(features, lambda x: (x - mean) / deviation)
    return Task(f"{task.name}, wavelets", Softmax(), data, 256)


def cifar10(args: argparse.Namespace) -> Task:
    """Return CIFAR-10 for TensorFlow's network, cropped; digits for a smoke run."""
    if args.smoke:
        digits = _changed(_record.mnist(args), lambda x: x.reshape(-1, 8, 8, 1))
        data = _changed(digits, lambda x: np.repeat(_thrice(x), 3, axis=3))
    else:
        found = _data.cifar10(args.data_dir)
        data = _changed(_record.cut(found.train, found.test, 10_000), lambda x: x[:, 4:28, 4:28])
    return Task("cifar10", CifarCNN(half_by_slices), data, 16)


def _changed(data: _record.Split, change: Callable[[np.ndarray], np.ndarray]) -> _record.Split:
    return _record.Split(*((change(features), labels) for features, labels in data))


def _thrice(images: np.ndarray) -> np.ndarray:
    return images.repeat(3, axis=1).repeat(3, axis=2)
