"""A small training run that is the same in every process, and a script that kills it.

`python problem.py FOLDER KILLS` trains in FOLDER/alone without interruption, and in FOLDER/killed
with KILLS kills at random moments and once without being able to write. It writes the parameters
and the ledger of both.
"""

import atexit
import functools
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lsdp as lsdp
from optax_lsdp import training


def make_plan(**changes):
    """Return a small plan with some settings changed."""
    settings = {
        "dataset_size": 400,
        "expected_batch_size": 40,
        "steps": 60,
        "noise_multiplier": 1.0,
        "delta": 1e-5,
    }
    return lsdp.PrivacyPlan(**{**settings, **changes})


PLAN = make_plan(smoothing=0.5)
SHORT = make_plan(steps=5)
TWENTY = make_plan(steps=20, smoothing=0.5)
SEED = 5  # no key: keys start JAX's threads, which do not survive a fork


def make_data(size=400):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(size, 16)).astype(np.float32)
    return {"x": x, "y": (x.sum(1) > 0).astype(np.int32)}


class Source:
    """A data source such as Grain's, which remembers the indices that were read."""

    def __init__(self, data):
        self.data, self.read = data, []

    def __len__(self):
        return len(self.data["y"])

    def __getitem__(self, index):
        self.read.append(index)
        return jax.tree.map(lambda leaf: leaf[index], self.data)


def make_params():
    return {"kernel": jnp.zeros((16, 2)), "bias": jnp.zeros(2)}


def loss(params, example):
    logits = example["x"] @ params["kernel"] + params["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, example["y"])


def fit(plan=PLAN, data=None, **options):
    """Train with defaults for everything that a test does not set."""
    defaults = {
        "optimizer": optax.sgd(0.1, momentum=0.9),
        "key": jax.random.key(SEED),
        "progress": False,
    }
    data = make_data(plan.dataset_size) if data is None else data
    function = options.pop("loss_fn", loss)
    params = options.pop("params", None)
    params = make_params() if params is None else params
    return training.fit(plan, function, params, data, **{**defaults, **options})


@functools.cache
def reference(plan=PLAN):
    """Return the result of a run with all defaults, which no test may change."""
    return fit(plan)


def bits(tree):
    """Return all bits of a tree's arrays."""
    return b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))


def assert_close(tree, expected, atol=1e-6):
    for got, want in zip(*map(jax.tree.leaves, (tree, expected)), strict=True):
        np.testing.assert_allclose(got, want, atol=atol)


def assert_ends_as_uninterrupted(folder, plan=PLAN, *, data=None, optimizer=None, **options):
    """Finish the run in a folder; it must equal an uninterrupted run to the bit."""
    changes = {} if optimizer is None else {"optimizer": optimizer}
    done = fit(plan, data, folder=folder, **changes, **options)
    expected = fit(plan, **changes) if changes else reference(plan)
    assert done.stopped == "done"
    assert bits(done.params) == bits(expected.params) and done.ledger == expected.ledger


class Crash(Exception):
    """Raised in place of a crash."""


def raise_at(step, error=Crash):
    """Return a callback that raises after a step."""

    def callback(report):
        if report.step == step:
            raise error

    return callback


def crash(folder, step, **options):
    """Train until a step is taken, with a checkpoint every seven steps, and crash."""
    try:
        fit(folder=folder, save_every=7, callbacks=[raise_at(step)], **options)
    except Crash:
        return
    raise AssertionError("the run did not crash")


@functools.cache
def _crashed(step):
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    crash(folder, step)
    return folder


def copy_crashed(folder, step):
    """Fill a folder with a run that has crashed after a step; the run is made once."""
    shutil.copytree(_crashed(step), folder, dirs_exist_ok=True)


def train(folder, pause=0.0):
    """Train in a folder and write the result beside it."""
    done = fit(folder=folder, save_every=7, callbacks=[lambda report: time.sleep(pause)])
    training.export_params(f"{folder}.npz", done.params)
    Path(f"{folder}.ledger").write_text(done.ledger.to_json())


def train_without_writing(folder):
    """Train in a folder while no file may exceed 300 bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
    train(folder)


def fork(function, *arguments):
    """Call a function in a child process, which has imported everything already."""
    child = os.fork()
    if child == 0:
        try:
            function(*arguments)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return child


def wait(child):
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def train_and_kill(folder, kills):
    """Train once without interruption, and once with kills and a failure to write."""
    alone = fork(train, folder / "alone")
    chance, journal = random.Random(kills), folder / "killed" / "examples-0.jsonl"
    for kill in range(kills):
        child = fork(train, folder / "killed", 0.2)
        if kill:
            time.sleep(chance.uniform(0, 3))  # at any moment: in compilation, reading or a step
        else:
            while not (journal.exists() and journal.read_bytes().count(b"\n") > 10):
                time.sleep(0.05)
        os.kill(child, signal.SIGKILL)
        if wait(child) != -signal.SIGKILL:
            raise RuntimeError("the run ended before it was killed")
    if not wait(fork(train_without_writing, folder / "killed")):
        raise RuntimeError("the run did not notice that it cannot write")
    last = fork(train, folder / "killed")
    if wait(alone) or wait(last):
        raise RuntimeError("a run has failed")


if __name__ == "__main__":
    train_and_kill(Path(sys.argv[1]), int(sys.argv[2]))
