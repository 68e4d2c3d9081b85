"""Datasets: a name goes in, arrays come out, from a folder, a cache, or their public homes."""

import gzip
import hashlib
import os
import urllib.request
from pathlib import Path
from typing import NamedTuple

import numpy as np

MNIST_HOME = "https://ossci-datasets.s3.amazonaws.com/mnist/"
MNIST_FILES = {  # and their MD5
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}


class Dataset(NamedTuple):
    """Images (n, height, width, channels), float32, of mean 0 and deviation 1, and labels (n,)."""

    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]


def cache_folder() -> Path:
    """Return where downloads are kept."""
    home = os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")
    return Path(home) / "optax-lsdp"


def mnist(folder: Path | None = None) -> Dataset:
    """Return MNIST; without a folder, from the cache, into which it is downloaded at first."""
    arrays = [_read_idx(_file("mnist", name, folder)) for name in MNIST_FILES]
    images, labels, test_images, test_labels = arrays

    def normal(pixels: np.ndarray) -> np.ndarray:
        return ((pixels[..., None] / np.float32(255) - 0.1307) / 0.3081).astype(np.float32)

    return Dataset(
        (normal(images), labels.astype(np.int32)),
        (normal(test_images), test_labels.astype(np.int32)),
    )


def _file(dataset: str, name: str, folder: Path | None) -> Path:
    """Return a file whose checksum is right; raise one sentence if there is none."""
    path = (folder or cache_folder()) / dataset / name
    if not path.exists():
        if folder is not None:
            raise SystemExit(f"--data-dir must hold {dataset}/{name}, got {folder} without it.")
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".draft")
        try:
            urllib.request.urlretrieve(MNIST_HOME + name, draft)
        except OSError as error:
            raise SystemExit(
                f"{name} must be downloaded, got {error}; name a folder that has it: --data-dir."
            ) from error
        draft.replace(path)
    if hashlib.md5(path.read_bytes()).hexdigest() != MNIST_FILES[name]:
        raise SystemExit(f"{path} must have the checksum {MNIST_FILES[name]}; remove the file.")
    return path


def _read_idx(path: Path) -> np.ndarray:
    """Read IDX: a magic number whose last byte counts the dimensions, their sizes, then bytes."""
    content = gzip.decompress(path.read_bytes())
    dimensions = content[3]
    shape = np.frombuffer(content, ">u4", dimensions, 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
