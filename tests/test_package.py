"""The wheel: it builds, holds what it should, and works from where it was unpacked."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder)]
    subprocess.run([*command, str(ROOT)], check=True, capture_output=True)
    return next(folder.glob("optax_lsdp-*.whl"))


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert "optax_lsdp/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert len(tops) == 2 and "optax_lsdp" in tops  # and its metadata


def test_the_wheel_works_where_it_was_unpacked(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    script = (
        "import jax, jax.numpy as jnp, optax_lsdp as lsdp\n"
        f"assert lsdp.__file__.startswith({str(tmp_path)!r})\n"
        "grad = lsdp.clipped_grad(jnp.vdot, clip_norm=1.0)\n"
        "tx = lsdp.dp_lssgd(0.1, clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=2,\n"
        "                   key=lsdp.fresh_key())\n"
        "w = jnp.zeros(3)\n"
        "updates, _ = tx.update(grad(w, jnp.ones((2, 3))), tx.init(w), w)\n"
        "assert updates.shape == (3,)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path, env=environment)
