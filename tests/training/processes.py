"""One of two processes that train together: `python processes.py PORT RANK FOLDER`."""

import json
import sys
from pathlib import Path

import jax
import numpy as np


def stop(report):
    """End the run after its next step."""
    from optax_lsdp import training

    raise training.StopTraining


def main(port, rank, folder):
    """Train with the other process, and write down which examples this one has read."""
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
    from optax_lsdp import training  # after the processes have met
    from tests.training.problem import fit, make_data
    from tests.training.test_faults import Faulty, raising
    from tests.training.test_fit import Source

    source = Source(make_data())
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    done = fit(data=source, mesh=mesh, folder=folder / "run", save_every=20)
    training.export_params(folder / "model.npz", done.params)
    secret = fit(data=make_data(), mesh=mesh, key=None, folder=folder / "secret", save_every=20)
    local = [np.asarray(leaf.addressable_data(0)) for leaf in jax.tree.leaves(secret.params)]
    np.savez(folder / f"secret-{rank}.npz", *local)
    # A run of one process goes on in two, which need not have journals of their own.
    before = json.loads((folder / "before.json").read_text())
    after = fit(mesh=mesh, folder=folder / "single")
    assert after.steps + before["counted"] - before["steps"] == after.ledger.steps
    # What only one of them can read stops both, and both can go on.
    try:
        fit(data=Faulty(make_data(), raising), mesh=mesh, folder=folder / "faulty")
        raise AssertionError("the fault was not noticed")
    except (training.DataError, RuntimeError) as error:
        (folder / f"error-{rank}.txt").write_text(str(error))
    # So does a callback of one of them, without an error.
    options = {"data": Source(make_data()), "mesh": mesh, "folder": folder / "faulty"}
    assert fit(**options, callbacks=[stop] * rank).stopped == "callback"
    assert fit(**options).stopped == "done"
    read = sorted(set(source.read[1:]))  # the first one is looked at for its shape
    (folder / f"read-{rank}.json").write_text(json.dumps(read))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
