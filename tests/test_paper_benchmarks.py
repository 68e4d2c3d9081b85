"""The paper's experiments read their data, and go on from their records."""

import argparse
import functools
import gzip
import hashlib
import importlib
import io
import json
import sys
import tarfile

import jax
import numpy as np
import pytest
from PIL import Image

from benchmarks import _data, zoo
from benchmarks.paper import _networks, _record, _regression, _search, _tasks, _wavelets, when
from tests.cases import slow

CONVEX = ("denoising", "table1")
SLOW = ("best", "degradation", "errors", "step_sizes", "theory", "when")
STACKED = ("correlated", "records", "tournament")
NETWORKS = ("cnn", "cnn_effects", "cnn_budgets", "cnn_best", "cifar", "cnn_tournament")


def write_idx(path, array):
    sizes = np.array(array.shape, ">u4").tobytes()
    path.write_bytes(gzip.compress(bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()))
    return hashlib.md5(path.read_bytes()).hexdigest()


def test_mnist_is_read_and_checked(tmp_path, monkeypatch):
    folder = tmp_path / "mnist"
    folder.mkdir()
    pixels = np.arange(3 * 28 * 28, dtype=np.uint8).reshape(3, 28, 28)
    arrays = [pixels, np.array([1, 2, 3], np.uint8)] * 2
    sums = {
        name: write_idx(folder / name, array)
        for name, array in zip(_data.MNIST_FILES, arrays, strict=True)
    }
    monkeypatch.setattr(_data, "MNIST_FILES", sums)
    data = _data.mnist(tmp_path)
    images, labels = data.train
    assert images.shape == (3, 28, 28, 1) and labels.tolist() == [1, 2, 3]
    np.testing.assert_allclose(images[..., 0] * 0.3081 + 0.1307, pixels / 255, atol=1e-6)
    (folder / "t10k-labels-idx1-ubyte.gz").write_bytes(b"something else")
    with pytest.raises(SystemExit, match="must have the checksum"):
        _data.mnist(tmp_path)
    with pytest.raises(SystemExit, match="--data-dir must hold"):
        _data.mnist(tmp_path / "elsewhere")


def test_adult_is_read_and_encoded(tmp_path, monkeypatch):
    folder = tmp_path / "adult"
    folder.mkdir()
    words = "Private, 77516, HS-grad, 8, Never-married, Sales, Husband, White, Male"
    rows = [f"39, {words}, 2174, 0, 40, Peru, <=50K", f"50, {words}, 0, 0, 13, ?, >50K", ""]
    texts = {"adult.data": "\n".join(rows), "adult.test": "|skip\n" + rows[1] + ".\n"}
    for name, text in texts.items():
        (folder / name).write_text(text)
    sums = {name: hashlib.md5(text.encode()).hexdigest() for name, text in texts.items()}
    monkeypatch.setattr(_data, "ADULT_FILES", sums)
    data = _data.adult(tmp_path)
    assert data.train[1].tolist() == [0, 1] and data.test[1].tolist() == [1]
    features = data.train[0]
    gains = np.log1p([2174, 0]) / np.log1p(100_000)
    numbers = [[0.39, 0.5], [0.5, 0.5], gains, [0, 0], [0.4, 0.13]]
    np.testing.assert_allclose(features[:, :5], np.transpose(numbers), rtol=1e-6)
    assert features[:, 5:].sum(axis=1).tolist() == [8, 8]  # one of each category, "?" among them
    np.testing.assert_array_equal(data.test[0], features[1:])


def test_a_record_runs_again_what_is_asked_for_otherwise(tmp_path):
    path, ran = tmp_path / "record.json", []

    def search(data, size):
        ran.append(f"search {size}")
        return size

    def final(record, data):
        ran.append("final")
        return 2 * json.loads(record.read_text())["search"]["all"]["found"]

    def alone(folder):
        ran.append("alone")

    def measure(size):
        data = np.zeros(3)
        first = {"all": functools.partial(search, data, size)}
        last = {"of it": functools.partial(final, path, data)}
        rest = {"too": functools.partial(alone, tmp_path)}
        _record.measure(path, {"search": first, "final": last, "alone": rest})
        return json.loads(path.read_text())["final"]["of it"]["found"]

    assert measure(2) == 4 and ran == ["search 2", "final", "alone"]
    assert measure(2) == 4 and len(ran) == 3
    assert measure(5) == 10 and ran[3:] == ["search 5", "final"]


def test_a_search_draws_other_noise_than_what_it_chooses_for(monkeypatch):
    drawn = []

    def record(protocol, data, looked_at, settings, seeds, classes):
        drawn.append(set(seeds))
        shape = (len(seeds), len(settings.step_size), 1)
        return _regression.Curves({}, {name: np.zeros(shape) for name in looked_at})

    monkeypatch.setattr(_search, "train", record)
    data = _record.mnist(argparse.Namespace(smoke=True))
    rows = _search.search(data, 1.0, _search.Variant(3), (0.0,), (1.0,))
    _search.final(data, 1.0, rows[0], when.SEEDS)
    *searched, final = drawn
    assert len(searched) == _search.FOLDS and final.isdisjoint(set.union(*searched))


def test_cifar10_is_read_from_mosaics_as_from_its_archive(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (36, 32, 32, 3), np.uint8)  # six batches of 2 × 3 images
    labels = rng.integers(0, 10, 36, np.uint8)
    digest = hashlib.md5(images.tobytes() + labels.tobytes()).hexdigest()
    monkeypatch.setattr(_data, "CIFAR10_CONTENT", digest)

    mosaics, packed = tmp_path / "mosaics" / "cifar10", tmp_path / "packed" / "cifar10"
    mosaics.mkdir(parents=True), packed.mkdir(parents=True)
    archive = packed / _data.CIFAR10_FILE[0]
    with tarfile.open(archive, "w:gz") as tar:
        for i, name in enumerate(_data.CIFAR10_BATCHES):
            batch = images[6 * i : 6 * i + 6]
            picture = batch.reshape(2, 3, 32, 32, 3).swapaxes(1, 2).reshape(64, 96, 3)
            Image.fromarray(picture).save(mosaics / f"{name}.webp", lossless=True)
            planes = batch.transpose(0, 3, 1, 2).reshape(6, -1)
            rows = np.concatenate([labels[6 * i : 6 * i + 6, None], planes], axis=1).tobytes()
            about = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            about.size = len(rows)
            tar.addfile(about, io.BytesIO(rows))
    np.savez(mosaics / "labels.npz", y_train=labels[:30], y_test=labels[30:])
    md5 = hashlib.md5(archive.read_bytes()).hexdigest()
    monkeypatch.setattr(_data, "CIFAR10_FILE", (archive.name, md5))

    one, other = _data.cifar10(mosaics.parent), _data.cifar10(packed.parent)
    for got, want in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(got, want)
    assert [len(part[1]) for part in one] == [30, 6]
    pixels = one.test[0] * (0.2470, 0.2435, 0.2616) + (0.4914, 0.4822, 0.4465)
    np.testing.assert_allclose(255 * pixels, images[30:], atol=1e-3)
    np.savez(mosaics / "labels.npz", y_train=labels[6:], y_test=labels[:6])
    with pytest.raises(SystemExit, match="must have the content"):
        _data.cifar10(mosaics.parent)


def test_the_network_that_is_fast_on_a_cpu_is_the_papers():
    image = jax.random.uniform(jax.random.key(0), (28, 28, 1))
    params = zoo.MnistCNN().init(jax.random.key(1), image)
    fast = zoo.MnistCNN(zoo.max_pool_by_slices, zoo.conv_by_blocks)
    logits = zoo.MnistCNN().apply(params, image)
    np.testing.assert_allclose(fast.apply(params, image), logits, atol=1e-6)


def test_wavelets_are_those_of_the_definition():
    """One coefficient of each order, by sums over the pixels of an image on a ring."""
    image = np.random.default_rng(0).uniform(size=(28, 28))
    padded = np.pad(image, 2)
    found = _wavelets.scatter(image[None, ..., None])[0]
    assert found.shape == (7, 7, 81)

    def convolve(x, kernel):
        shifts = np.ndindex(kernel.shape)
        return sum(kernel[shift] * np.roll(x, shift, axis=(0, 1)) for shift in shifts)

    def wavelet(scale, angle):
        x, y = np.meshgrid(*2 * [np.arange(-64, 64)], indexing="ij")
        along = x * np.cos(angle) + y * np.sin(angle)
        across = y * np.cos(angle) - x * np.sin(angle)
        width = 0.8 * 2**scale
        envelope = np.exp(-(along**2 + across**2 / 4) / (2 * width**2))
        wave = envelope * np.exp(0.75j * np.pi / 2**scale * along)
        wave -= envelope * wave.sum() / envelope.sum()
        wave /= 4 * np.pi * width**2
        return wave.reshape(4, 32, 4, 32).sum(axis=(0, 2))  # wound around the ring

    def blurred(x, row, column):
        near = [np.exp(-((np.arange(32) - 4 * (i + 1)) ** 2) / (2 * 1.6**2)) for i in (row, column)]
        return near[0] @ x @ near[1] / (near[0].sum() * near[1].sum())

    fine = abs(convolve(padded, wavelet(0, 3 * np.pi / 8)))
    coarse = abs(convolve(padded, wavelet(1, 5 * np.pi / 8)))
    both = abs(convolve(fine, wavelet(1, 2 * np.pi / 8)))
    for channel, x in {0: padded, 1 + 3: fine, 9 + 5: coarse, 17 + 3 * 8 + 2: both}.items():
        assert found[2, 5, channel] == pytest.approx(blurred(x, 2, 5), rel=1e-4)


@pytest.mark.full
@jax.numpy_dtype_promotion("standard")  # which Optax needs
def test_a_network_that_is_interrupted_has_the_same_curve(tmp_path, monkeypatch):
    arguments = argparse.Namespace(smoke=True, data_dir=None)
    task, setting = _tasks.mnist(arguments), _networks.Setting(smoothing=1.0, epochs=3)
    look = _networks.accuracy
    looks = []

    def fail_once(*words):
        looks.append(words)
        if len(looks) == 4:
            raise OSError("the power is gone")
        return look(*words)

    monkeypatch.setattr(_networks, "accuracy", fail_once)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "fails"))
    with pytest.raises(OSError, match="the power is gone"):
        _networks.run(task, setting)
    found = _networks.run(task, setting)
    assert 6 < len(looks) < 4 + 6  # it went on, where the second epoch was looked at again
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "alone"))
    assert found == _networks.run(task, setting)
    assert len(found["test_accuracies"]) == 3 and not any((tmp_path / "fails").rglob("*.json"))


@pytest.mark.parametrize(
    "script",
    [*CONVEX, *slow(*SLOW, *STACKED, *NETWORKS)],
)
@jax.numpy_dtype_promotion("standard")  # which Optax needs
def test_a_smoke_run_of_the_paper_goes_on_where_it_stopped(script, tmp_path, monkeypatch):
    """And the part that was lost comes out the same: seeds decide everything."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    output = tmp_path / f"{script}.json"
    monkeypatch.setattr(sys, "argv", [script, "--smoke", "--output", str(output)])
    main = importlib.import_module(f"benchmarks.paper.{script}").main
    main()
    whole = json.loads(output.read_text())
    assert whole["is_whole"]
    part = list(whole)[-3]  # two more say what it is
    lost, found = list(whole[part].items())[-1]
    rest = {**whole, part: {name: row for name, row in whole[part].items() if name != lost}}
    rest["is_whole"] = False
    output.write_text(json.dumps(rest))
    main()
    again = json.loads(output.read_text())
    assert again[part].pop(lost)["found"] == found["found"]
    said = {"circumstances": 0, "is_whole": True}
    assert {**again, **said} == {**rest, **said} and again["is_whole"]
    assert str(tmp_path) not in output.read_text()
