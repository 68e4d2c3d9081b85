"""Datasets: a name goes in, arrays come out, from a folder, a cache, or their public homes."""

import gzip
import hashlib
import os
import urllib.request
from pathlib import Path
from typing import NamedTuple

import numpy as np

HOMES = {
    "mnist": "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "adult": "https://archive.ics.uci.edu/ml/machine-learning-databases/adult/",
}
MNIST_FILES = {  # and their MD5
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}
ADULT_FILES = {
    "adult.data": "5d7c39d7b8804f071cdd1f2a7c460872",
    "adult.test": "35238206dfdf7f1fe215bbb874adecdc",
}
ADULT_RANGES = {  # of numbers, from their meaning alone: no example is looked at for them
    0: lambda age: age / 100,
    4: lambda years_of_education: years_of_education / 16,
    10: lambda gain: np.log1p(gain) / np.log1p(100_000),
    11: lambda loss: np.log1p(loss) / np.log1p(100_000),
    12: lambda hours_a_week: hours_a_week / 100,
}
ADULT_NAMES = (1, 3, 5, 6, 7, 8, 9, 13)  # columns of categories, whose names are public


class Dataset(NamedTuple):
    """Features, float32, and labels (n,).

    Images are (n, height, width, channels), of mean 0 and deviation 1; rows of a table are (n, d),
    between 0 and 1.
    """

    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]


def cache_folder() -> Path:
    """Return where downloads are kept."""
    home = os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")
    return Path(home) / "optax-lsdp"


def mnist(folder: Path | None = None) -> Dataset:
    """Return MNIST; without a folder, from the cache, into which it is downloaded at first."""
    arrays = [_read_idx(_read("mnist", name, md5, folder)) for name, md5 in MNIST_FILES.items()]
    images, labels, test_images, test_labels = arrays

    def normal(pixels: np.ndarray) -> np.ndarray:
        return ((pixels[..., None] / np.float32(255) - 0.1307) / 0.3081).astype(np.float32)

    return Dataset(
        (normal(images), labels.astype(np.int32)),
        (normal(test_images), test_labels.astype(np.int32)),
    )


def adult(folder: Path | None = None) -> Dataset:
    """Return UCI Adult, likewise: numbers by their ranges, categories as one of each."""
    tables = []
    for name, md5 in ADULT_FILES.items():
        lines = _read("adult", name, md5, folder).decode().splitlines()
        tables.append([line.rstrip(".").split(", ") for line in lines if line.count(",") == 14])
    domains = {i: sorted({row[i] for table in tables for row in table}) for i in ADULT_NAMES}

    def encode(table: list[list[str]]) -> tuple[np.ndarray, np.ndarray]:
        columns = [
            scale(np.array([float(row[i]) for row in table]))[:, None]
            for i, scale in ADULT_RANGES.items()
        ]
        columns += [
            np.array([row[i] for row in table])[:, None] == np.array(domain)
            for i, domain in domains.items()
        ]
        labels = np.array([row[14] == ">50K" for row in table])
        return np.concatenate(columns, axis=1).astype(np.float32), labels.astype(np.int32)

    train, test = map(encode, tables)
    return Dataset(train, test)


def _read(dataset: str, name: str, md5: str, folder: Path | None) -> bytes:
    """Return a file whose checksum is right; raise one sentence if there is none.

    A folder may hold it compressed.
    """
    path = (folder or cache_folder()) / dataset / name
    packed = path.with_name(name + ".gz")
    if not (path.exists() or packed.exists()):
        if folder is not None:
            raise SystemExit(f"--data-dir must hold {dataset}/{name}, got {folder} without it.")
        _download(HOMES[dataset] + name, path)
    content = path.read_bytes() if path.exists() else gzip.decompress(packed.read_bytes())
    if hashlib.md5(content).hexdigest() != md5:
        raise SystemExit(f"{path} must have the checksum {md5}; remove the file.")
    return content


def _download(address: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    try:
        urllib.request.urlretrieve(address, draft)
    except OSError as error:
        raise SystemExit(
            f"{path.name} must be downloaded, got {error}; name a folder that has it: --data-dir."
        ) from error
    draft.replace(path)


def _read_idx(packed: bytes) -> np.ndarray:
    """Read IDX: a magic number whose last byte counts the dimensions, their sizes, then bytes."""
    content = gzip.decompress(packed)
    dimensions = content[3]
    shape = np.frombuffer(content, ">u4", dimensions, 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
