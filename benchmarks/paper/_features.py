"""Features of whole datasets: scattering coefficients, kept in the cache, and low frequencies."""

import argparse
from collections.abc import Callable

import numpy as np
from scipy.fft import dctn

from benchmarks import _data
from benchmarks.paper import _record, _wavelets

PUBLIC = 10_000
LENGTH = 10  # well above 1, which is what the bias adds to an example


def _cached(name: str, compute: Callable[[], np.ndarray]) -> np.ndarray:
    """Return an array from the cache, or compute and store it as float16."""
    path = _data.cache_folder() / "features" / f"{name}.npy"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".draft.npy")
        np.save(draft, compute().astype(np.float16))
        draft.replace(path)
    return np.load(path, mmap_mode="r")


def _split(name: str, dataset: _data.Dataset, compute: Callable[..., np.ndarray]) -> _record.Split:
    """Return the features of a dataset, cut into private, public and test examples."""
    parts = {
        part: (_cached(f"{name}-{part}", lambda x=images: compute(x)), labels)
        for part, (images, labels) in zip(("train", "test"), dataset, strict=True)
    }
    return _record.cut(parts["train"], parts["test"], PUBLIC)


def cifar10(args: argparse.Namespace) -> _record.Split:
    """Return mirror-symmetric coefficients of CIFAR-10: (n, 8, 4, 81, 3).

    Mirroring changes no class. So weights may be equal for an image and its mirror image, which is
    the same as adding up the coefficients of both. The right half is then redundant.
    """

    def compute(images: np.ndarray) -> np.ndarray:
        found = _wavelets.scatter_colours(images)
        return (found + _wavelets.mirrored(found))[:, :, :4] / 2

    return _split("cifar10", _data.cifar10(args.data_dir), compute)


def mnist(args: argparse.Namespace) -> _record.Split:
    """Return coefficients of MNIST, with pixels between 0 and 1: (n, 7, 7, 81)."""
    data = _data.mnist(args.data_dir)
    pixels = _data.Dataset(*((x * 0.3081 + 0.1307, labels) for x, labels in data))
    return _split("mnist", pixels, _wavelets.scatter)


def low_frequencies(args: argparse.Namespace, count: int, smoothing: float) -> _record.Split:
    """Return the smoothed low frequencies of MNIST: (n, count, count, 1)."""
    images = ((x.reshape(-1, 28, 28), labels) for x, labels in _record.mnist(args))
    return _record.Split(*((lowest_cosines(x, count, smoothing), y) for x, y in images))


def lowest_cosines(images: np.ndarray, count: int, smoothing: float) -> np.ndarray:
    """Return the lowest cosine coefficients of square images, smoothed: (n, count, count, 1).

    With the eigenvalues λ of −L on a grid with reflecting ends, a coefficient is multiplied by
    (1 + σλ)^(−1/2). So inner products of all coefficients are ⟨x, (I − σL)⁻¹ x′⟩. This is a fixed
    linear map of the pixels: the model is softmax regression on pixels whose weights have low
    frequencies only. Smoothing *before* the clip spends the clip norm on the frequencies that
    matter, and noise is drawn in fewer dimensions.
    """
    found = dctn(images, axes=(1, 2), norm="ortho")[:, :count, :count]
    row = 2 - 2 * np.cos(np.pi * np.arange(count) / images.shape[-1])
    smoothed = found / np.sqrt(1 + smoothing * (row[:, None] + row))
    return smoothed[..., None].astype(np.float32)


def digits(args: argparse.Namespace) -> _record.Split:
    """Return scikit-learn's digits for a smoke run: (n, 8, 8, 1)."""
    return _record.Split(*((x.reshape(-1, 8, 8, 1), y) for x, y in _record.mnist(args)))


def unit_length(data: _record.Split) -> _record.Split:
    """Standardise every channel on public examples, and give all examples the norm `LENGTH`.

    The last axes are channels, and the first two are rows and columns. The length of an example
    depends on no other example.
    """
    public = np.asarray(data.public[0], np.float32)
    mean = public.mean(axis=0)
    deviation = (public - mean).std(axis=(0, 1, 2)) + np.float32(1e-6)

    def change(features: np.ndarray) -> np.ndarray:
        flat = ((features.astype(np.float32) - mean) / deviation).reshape(len(features), -1)
        flat *= LENGTH / np.linalg.norm(flat, axis=1, keepdims=True)
        return flat

    return _record.Split(*((change(features), labels) for features, labels in data))
