"""Load MNIST, Adult and CIFAR-10 from a folder, from the cache, or from the web."""

import gzip
import hashlib
import io
import os
import tarfile
import urllib.request
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

HOMES = {
    "mnist": "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "adult": "https://archive.ics.uci.edu/ml/machine-learning-databases/adult/",
    "cifar10": "https://www.cs.toronto.edu/~kriz/",
}
MNIST_FILES = {  # and their MD5
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}
CIFAR10_FILE = ("cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530")
CIFAR10_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
CIFAR10_CONTENT = "a13ba352d84d7bad5539143bee5695a2"  # MD5 of all pixels, then all labels
ADULT_FILES = {
    "adult.data": "5d7c39d7b8804f071cdd1f2a7c460872",
    "adult.test": "35238206dfdf7f1fe215bbb874adecdc",
}
ADULT_RANGES = {  # chosen from what the columns mean, without looking at any example
    0: lambda age: age / 100,
    4: lambda years_of_education: years_of_education / 16,
    10: lambda gain: np.log1p(gain) / np.log1p(100_000),
    11: lambda loss: np.log1p(loss) / np.log1p(100_000),
    12: lambda hours_a_week: hours_a_week / 100,
}
ADULT_NAMES = (1, 3, 5, 6, 7, 8, 9, 13)  # columns of categories; the names of categories are public


class Dataset(NamedTuple):
    """Float32 features and labels (n,).

    Images are (n, height, width, channels), standardised to mean 0 and deviation 1. Rows of a
    table are (n, d), scaled to the range from 0 to 1.
    """

    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]


def cache_folder() -> Path:
    """Return the folder for downloads."""
    home = os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")
    return Path(home) / "optax-lsdp"


def mnist(folder: Path | None = None) -> Dataset:
    """Return MNIST from `folder`, or from the cache, downloading it once."""
    arrays = [_read_idx(_read("mnist", name, md5, folder)) for name, md5 in MNIST_FILES.items()]
    images, labels, test_images, test_labels = arrays

    def normal(pixels: np.ndarray) -> np.ndarray:
        return ((pixels[..., None] / np.float32(255) - 0.1307) / 0.3081).astype(np.float32)

    return Dataset(
        (normal(images), labels.astype(np.int32)),
        (normal(test_images), test_labels.astype(np.int32)),
    )


def adult(folder: Path | None = None) -> Dataset:
    """Return UCI Adult, as `mnist` does: scaled numbers, and one-hot categories."""
    tables = _adult_tables(folder)
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


def adult_columns(folder: Path | None, columns: tuple[int, ...]) -> np.ndarray:
    """Return some columns of each training row of Adult, joined to one text."""
    table, _ = _adult_tables(folder)
    return np.array([", ".join(row[i] for i in columns) for row in table])


def _adult_tables(folder: Path | None) -> list[list[list[str]]]:
    """Return the training and the test rows of Adult as text."""
    tables = []
    for name, md5 in ADULT_FILES.items():
        lines = _read("adult", name, md5, folder).decode().splitlines()
        tables.append([line.rstrip(".").split(", ") for line in lines if line.count(",") == 14])
    return tables


def cifar10(folder: Path | None = None) -> Dataset:
    """Return CIFAR-10, as `mnist` does; a folder may hold WebP mosaics of its batches instead."""
    mosaics = folder is not None and (folder / "cifar10" / "labels.npz").exists()
    images, labels = (_read_mosaics if mosaics else _read_cifar10_archive)(folder)
    found = hashlib.md5(images.tobytes() + labels.tobytes()).hexdigest()
    if found != CIFAR10_CONTENT:
        raise SystemExit(f"cifar10 must have the content {CIFAR10_CONTENT}, got {found}.")
    mean, deviation = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    normal = ((images / np.float32(255) - mean) / deviation).astype(np.float32)
    cut = len(labels) * 5 // 6
    labels = labels.astype(np.int32)
    return Dataset((normal[:cut], labels[:cut]), (normal[cut:], labels[cut:]))


def _read_mosaics(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read images of 32 × 32 pixels from one mosaic per batch."""

    def tiles(name: str) -> np.ndarray:
        with Image.open(folder / "cifar10" / f"{name}.webp") as picture:
            pixels = np.asarray(picture.convert("RGB"))
        rows, columns = pixels.shape[0] // 32, pixels.shape[1] // 32
        return pixels.reshape(rows, 32, columns, 32, 3).swapaxes(1, 2).reshape(-1, 32, 32, 3)

    with np.load(folder / "cifar10" / "labels.npz") as labels:
        both = np.concatenate([labels["y_train"], labels["y_test"]])
    return np.concatenate([tiles(name) for name in CIFAR10_BATCHES]), both.astype(np.uint8)


def _read_cifar10_archive(folder: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Read CIFAR-10's binary archive: rows of a label and 32 × 32 reds, greens and blues."""
    content = _read("cifar10", *CIFAR10_FILE, folder)
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        files = [
            archive.extractfile(f"cifar-10-batches-bin/{name}.bin") for name in CIFAR10_BATCHES
        ]
        rows = np.frombuffer(b"".join(file.read() for file in files if file), np.uint8)
    rows = rows.reshape(-1, 1 + 3 * 32 * 32)
    return rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), rows[:, 0]


def _read(dataset: str, name: str, md5: str, folder: Path | None) -> bytes:
    """Return the content of a file with the right checksum, or raise an error.

    The file may be gzip-compressed.
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
    """Read the IDX format: a magic number ending in the rank, the shape, then the bytes."""
    content = gzip.decompress(packed)
    dimensions = content[3]
    shape = np.frombuffer(content, ">u4", dimensions, 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
