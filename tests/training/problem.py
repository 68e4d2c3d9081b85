"""A small training run that is the same in every process: `python problem.py FOLDER RESULT`."""

import os
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lsdp as lsdp
from optax_lsdp import training


def make_plan(**changes):
    """Return a plan with what a test does not care about filled in."""
    chosen = {
        "dataset_size": 400,
        "expected_batch_size": 40,
        "steps": 60,
        "noise_multiplier": 1.0,
        "delta": 1e-5,
    }
    return lsdp.PrivacyPlan(**{**chosen, **changes})


PLAN = make_plan(smoothing=0.5)
SHORT = make_plan(steps=5)


def make_data(size=400):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(size, 16)).astype(np.float32)
    return {"x": x, "y": (x.sum(1) > 0).astype(np.int32)}


def make_params():
    return {"kernel": jnp.zeros((16, 2)), "bias": jnp.zeros(2)}


def loss(params, example):
    logits = example["x"] @ params["kernel"] + params["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, example["y"])


def fit(plan=PLAN, data=None, **options):
    """Train with what a test does not care about filled in."""
    chosen = {
        "optimizer": optax.sgd(0.1, momentum=0.9),
        "key": jax.random.key(5),
        "progress": False,
    }
    data = make_data(plan.dataset_size) if data is None else data
    function = options.pop("loss_fn", loss)
    params = options.pop("params", None)
    params = make_params() if params is None else params
    return training.fit(plan, function, params, data, **{**chosen, **options})


def bits(tree):
    """Return all numbers of a tree, to be compared to the bit."""
    return b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))


def assert_as_if_alone(folder, **options):
    """Finish the run in a folder, and hold it to one that was never interrupted, to the bit."""
    done = fit(folder=folder, **options)
    alone = fit(folder=folder / "alone", **options)
    assert done.stopped == "done"
    assert bits(done.params) == bits(alone.params) and done.ledger == alone.ledger


if __name__ == "__main__":
    pause = float(os.environ.get("PAUSE", "0"))
    done = fit(folder=sys.argv[1], save_every=7, callbacks=[lambda report: time.sleep(pause)])
    training.export_params(sys.argv[2], done.params)
    Path(sys.argv[2]).with_suffix(".ledger").write_text(done.ledger.to_json())
