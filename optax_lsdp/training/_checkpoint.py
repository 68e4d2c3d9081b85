"""RunFolder: what a run needs to go on goes in, and comes out again, whole or not at all."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from optax_lsdp._keys import is_key
from optax_lsdp._trees import path_name
from optax_lsdp.accounting import Ledger
from optax_lsdp.planning import PrivacyPlan
from optax_lsdp.training._access import make_private_folder
from optax_lsdp.training._files import lock, write_whole
from optax_lsdp.training._hosts import holds_anywhere, wait_for_all
from optax_lsdp.training._journal import Journal, no_room

_KEPT = 2  # checkpoints; the older one is for the day when the newer one cannot be read
_NAME = re.compile(r"\d{4}-\d{9}\.json")  # era and step: what was saved later is sorted later


class Saved(NamedTuple):
    """A checkpoint: `state` holds the noise key and is as secret as the data."""

    state: Any
    step: int
    ledger: Ledger
    nonce: str
    began: dict[str, str]


class RunFolder:
    """A folder for one run at a time: its plan, journal and checkpoints."""

    def __init__(self, path: Path | str, plan: PrivacyPlan) -> None:
        if not (isinstance(path, str | Path) and str(path)):
            raise ValueError(f"`folder` must be the path of a folder, got {path!r}.")
        self.plan = plan
        try:
            self.path = make_private_folder(Path(path))
        except OSError as error:
            raise ValueError(
                f"`folder` must be a folder or a place for one, got {str(path)!r}, where none can "
                f"be made ({error.strerror}); take another."
            ) from error
        self._lock = lock(self.path / f"lock-{jax.process_index()}")
        try:
            self._check_plan()
            self.journal = Journal(self.path, plan.steps)
            logging.getLogger("absl").setLevel(logging.ERROR)
            self._checkpointer = ocp.StandardCheckpointer()
        except BaseException:
            self._lock.close()
            raise

    def _check_plan(self) -> None:
        path = self.path / "plan.json"
        if path.exists():
            try:
                same = PrivacyPlan.from_json(path.read_text()) == self.plan
            except ValueError as error:
                raise ValueError(f"`folder` must hold its plan, got {path}: {error}") from error
            if not same:
                raise ValueError(
                    f"`plan` must be the one of the run in {str(self.path)!r}, got another; read "
                    "it with PrivacyPlan.from_json, or take another folder."
                )
            return
        if self._manifests() or (self.path / "journal.jsonl").exists():
            raise ValueError(
                f"`folder` must hold plan.json, got {str(self.path)!r} without it, but with a run: "
                "what it has spent is not known; take another folder."
            )
        wait_for_all("plan")
        if jax.process_index() == 0:
            write_whole(path, self.plan.to_json())

    def _manifests(self) -> list[Path]:
        """Return the manifests of all checkpoints, the newest last."""
        return sorted(path for path in self.path.iterdir() if _NAME.fullmatch(path.name))

    def save(self, saved: Saved) -> None:
        """Write a checkpoint; it counts as written when its manifest does."""
        name = f"{self.journal.era:04d}-{saved.step:09d}"
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
            "plan": self.plan.digest,
            "step": saved.step,
            "nonce": saved.nonce,
            "began": saved.began,
            "ledger": json.loads(saved.ledger.to_json()),
            "arrays": _arrays(saved.state),
            "files": _hashes(target),
        }
        manifest["digest"] = _digest(manifest)
        write_whole(self.path / f"{target.name}.json", json.dumps(manifest))
        for old in self._manifests()[:-_KEPT]:
            old.unlink()
        kept = {path.stem for path in self._manifests()}
        for folder in target.parent.iterdir():  # they hold keys, and are of no more use
            if folder.name not in kept:
                shutil.rmtree(folder, ignore_errors=True)

    def restore(self, template: Any) -> Saved | None:
        """Return the last checkpoint that is whole, placed as the template is, or None."""
        damaged = []
        for path in reversed(self._manifests()):
            try:
                manifest = self._read_manifest(path)
            except Exception as error:  # whatever is wrong with it, the one before may be whole
                manifest = {}
                warnings.warn(
                    f"checkpoint {path.stem} in {str(self.path)!r} cannot be read "
                    f"({str(error)[:200]}); the one before it is used.",
                    stacklevel=4,
                )
            if holds_anywhere(not manifest):
                damaged.append(path)
                continue
            state = self._read_state(path.stem, manifest["arrays"], template)
            if jax.process_index() == 0:
                for one in damaged:
                    one.rename(one.with_suffix(".damaged"))
            ledger = Ledger.from_json(json.dumps(manifest["ledger"]))
            return Saved(state, manifest["step"], ledger, manifest["nonce"], manifest["began"])
        if damaged:
            raise ValueError(
                f"`folder` must hold a checkpoint that can be read, got none in {str(self.path)!r};"
                " take another folder, and count what this run has spent."
            )
        return None

    def _read_manifest(self, path: Path) -> dict[str, Any]:
        manifest = json.loads(path.read_text())
        if manifest.pop("digest") != _digest(manifest):
            raise ValueError("its manifest is not what was written")
        if _hashes(self.path / "checkpoints" / path.stem) != manifest["files"]:
            raise ValueError("its files are not those that were written")
        if manifest["plan"] != self.plan.digest:
            raise ValueError("it is of another plan")
        return manifest

    def _read_state(self, name: str, there: dict[str, str], template: Any) -> Any:
        here = _arrays(template)
        for place in sorted(here | there):
            if here.get(place) != there.get(place):
                raise ValueError(
                    f"`folder` must hold parameters and an optimizer's state like those of this "
                    f"run, got {there.get(place, 'nothing')} at {place!r} in {str(self.path)!r} "
                    f"instead of {here.get(place, 'nothing')}; go on with the same model, "
                    "optimizer and average, or take another folder."
                )
        like = _unwrapped(template, abstract=True)
        found = self._checkpointer.restore(self.path / "checkpoints" / name, like)
        return _wrapped(found, template)

    def close(self) -> None:
        """Let other runs have the folder."""
        self.journal.close()
        self._checkpointer.close()
        self._lock.close()


def _unwrapped(tree: Any, *, abstract: bool = False) -> Any:
    """Return a tree without typed keys, which checkpoints do not hold."""

    def unwrap(leaf: Any) -> Any:
        if is_key(leaf):
            leaf = jax.random.key_data(leaf)
        if abstract:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        return leaf

    return jax.tree.map(unwrap, tree)


def _arrays(tree: Any) -> dict[str, str]:
    """Return what kind of array is in each place of a tree."""
    return {
        path_name(place): f"{x.dtype}{list(x.shape)}"
        for place, x in jax.tree.leaves_with_path(tree)
    }


def _wrapped(tree: Any, template: Any) -> Any:
    def wrap(leaf: jax.Array, like: jax.Array) -> jax.Array:
        if is_key(like):
            return jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(like))
        return leaf

    return jax.tree.map(wrap, tree, template)


def _hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.blake2b(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
