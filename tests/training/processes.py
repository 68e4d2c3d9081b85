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
    """Train with the other process; write the examples that this process has read."""
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
    from optax_lsdp import training  # after the processes are connected
    from tests.training.problem import TWENTY, Source, fit, make_data
    from tests.training.test_resume import Faulty, raising

    source = Source(make_data())
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    done = fit(TWENTY, source, mesh=mesh, folder=folder / "run", save_every=10)
    training.export_params(folder / "model.npz", done.params)
    # Two processes restart a run of one process, and the second has no journal yet.
    before = json.loads((folder / "before.json").read_text())
    after = fit(TWENTY, mesh=mesh, folder=folder / "single", callbacks=[stop])
    assert after.steps + before["counted"] - before["steps"] == after.ledger.steps
    # An example that one process cannot read stops both, and the run can be resumed. Both
    # processes share its fresh key.
    options = {"plan": TWENTY, "mesh": mesh, "folder": folder / "faulty", "key": None}
    try:
        fit(data=Faulty(make_data(), raising), **options)
        raise AssertionError("the broken example was not noticed")
    except (training.DataError, RuntimeError) as error:
        (folder / f"error-{rank}.txt").write_text(str(error))
    # A callback of one process stops both, without an error.
    options["data"] = Source(make_data())
    assert fit(**options, callbacks=[stop] * rank).stopped == "callback"
    done = fit(**options)
    assert done.stopped == "done"
    local = [np.asarray(leaf.addressable_data(0)) for leaf in jax.tree.leaves(done.params)]
    np.savez(folder / f"fresh-key-{rank}.npz", *local)
    # Each process reads the examples of its own users.
    from tests.training.test_users import PLAN, USERS

    done = fit(PLAN, USERS, mesh=mesh, microbatch_size=16)
    training.export_params(folder / "users.npz", done.params)
    read = sorted(set(source.read[1:]))  # the first one was read for its shape
    (folder / f"read-{rank}.json").write_text(json.dumps(read))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
