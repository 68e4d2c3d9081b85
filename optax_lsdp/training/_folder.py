"""RunFolder: what a run needs to go on goes in, and comes out again, whole or not at all."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from optax_lsdp.accounting import Ledger
from optax_lsdp.planning import PrivacyPlan
from optax_lsdp.training._hosts import wait_for_all
from optax_lsdp.training._journal import Journal, no_room

_KEPT = 2  # checkpoints; the older one is for the day when the newer one cannot be read


class Saved(NamedTuple):
    """A checkpoint: `state` holds the noise key and is as secret as the data."""

    state: Any
    step: int
    ledger: Ledger
    nonce: str


class RunFolder:
    """A folder for one run at a time: its plan, journal and checkpoints."""

    def __init__(self, path: Path | str, plan: PrivacyPlan) -> None:
        self.path = Path(path).absolute()
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = (self.path / f"lock-{jax.process_index()}").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise ValueError(
                f"`folder` must belong to one run at a time, got {str(self.path)!r}, in which "
                "another one is under way; wait for it or take another folder."
            ) from error
        self._check_plan(plan)
        self.journal = Journal(self.path / f"journal-{jax.process_index()}.jsonl", plan.steps)
        logging.getLogger("absl").setLevel(logging.ERROR)
        self._checkpointer = ocp.StandardCheckpointer()

    def _check_plan(self, plan: PrivacyPlan) -> None:
        path = self.path / "plan.json"
        if path.exists() and PrivacyPlan.from_json(path.read_text()) != plan:
            self._lock.close()
            raise ValueError(
                f"`plan` must be the one of the run in {str(self.path)!r}, got another; read it "
                "with PrivacyPlan.from_json, or take another folder."
            )
        if jax.process_index() == 0 and not path.exists():
            _write_whole(path, plan.to_json())

    def save(self, saved: Saved) -> None:
        """Write a checkpoint; it counts as written when its manifest does."""
        name = f"{saved.step:09d}-{self.journal.era:04d}"
        target = self.path / "checkpoints" / name
        if (self.path / f"{name}.json").exists():
            return
        if jax.process_index() == 0 and target.exists():  # begun, and never finished
            shutil.rmtree(target)
        wait_for_all("clean")
        try:
            self._checkpointer.save(target, _unwrapped(saved.state))
            self._checkpointer.wait_until_finished()
            if jax.process_index() == 0:
                self._write_manifest(target, saved)
        except Exception as error:  # Orbax has many ways to say so
            raise no_room(self.path, error) from error
        wait_for_all("saved")

    def _write_manifest(self, target: Path, saved: Saved) -> None:
        manifest = {
            "step": saved.step,
            "nonce": saved.nonce,
            "ledger": json.loads(saved.ledger.to_json()),
            "files": _hashes(target),
        }
        _write_whole(self.path / f"{target.name}.json", json.dumps(manifest))
        for old in sorted(self.path.glob("[0-9]*.json"))[:-_KEPT]:
            old.unlink()
            shutil.rmtree(self.path / "checkpoints" / old.stem, ignore_errors=True)

    def restore(self, template: Any) -> Saved | None:
        """Return the last checkpoint that is whole, placed as the template is, or None."""
        for path in sorted(self.path.glob("[0-9]*.json"), reverse=True):
            target = self.path / "checkpoints" / path.stem
            try:
                manifest = json.loads(path.read_text())
                if _hashes(target) != manifest["files"]:
                    raise ValueError("its files are not those that were written")
                found = self._checkpointer.restore(target, _unwrapped(template, abstract=True))
                return Saved(
                    _wrapped(found, template),
                    manifest["step"],
                    Ledger.from_json(json.dumps(manifest["ledger"])),
                    manifest["nonce"],
                )
            except Exception as error:  # whatever is wrong with it, the one before may be whole
                warnings.warn(
                    f"checkpoint {target} cannot be read ({str(error)[:200]}); the one before it "
                    "is used.",
                    stacklevel=4,
                )
        if any(self.path.glob("[0-9]*.json")):
            raise ValueError(
                f"`folder` must hold a checkpoint that can be read, got none in {str(self.path)!r};"
                " take another folder, and count what this run has spent."
            )
        return None

    def close(self) -> None:
        """Let other runs have the folder."""
        self.journal.close()
        self._checkpointer.close()
        self._lock.close()


def export_params(path: Path | str, params: Any) -> None:
    """Write parameters that may be released, as an .npz file of arrays by path; no key, no state.

    What the guarantee covers is what a run returns: its parameters and their average.
    """
    leaves = jax.tree.leaves_with_path(params)
    if any(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for _, leaf in leaves):
        raise ValueError("`params` must hold no key, got one; pass the parameters alone.")
    named = {jax.tree_util.keystr(p, simple=True, separator="/"): leaf for p, leaf in leaves}
    whole = {
        name: np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
        if not leaf.is_fully_addressable
        else np.asarray(leaf)
        for name, leaf in named.items()
    }
    if jax.process_index() == 0:
        np.savez(path, allow_pickle=False, **whole)


def _unwrapped(tree: Any, *, abstract: bool = False) -> Any:
    """Return a tree without typed keys, which checkpoints do not hold."""

    def unwrap(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if abstract:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        return leaf

    return jax.tree.map(unwrap, tree)


def _wrapped(tree: Any, template: Any) -> Any:
    def wrap(leaf: jax.Array, like: jax.Array) -> jax.Array:
        if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(like))
        return leaf

    return jax.tree.map(wrap, tree, template)


def _hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.blake2b(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _write_whole(path: Path, text: str) -> None:
    """Write a file so that it is there in full or not at all, also when the power fails."""
    draft = path.with_suffix(".draft")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
