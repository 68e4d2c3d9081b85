"""Wheel and sdist: they build, hold what they should, and work in an empty environment."""

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.cases import slow
from tests.test_docs import blocks

ROOT = Path(__file__).parents[1]
SHIPPED = ("optax_lsdp/", "tests/", "benchmarks/", "docs/", "notebooks/")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run(*command, **options):
    """Run a command, and show what it said if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    return folder


def only(folder, pattern):
    (path,) = folder.glob(pattern)
    return path


def test_the_index_would_take_them(built):
    run(sys.executable, "-m", "twine", "check", "--strict", *built.iterdir())


def test_the_wheel_holds_the_package_and_nothing_else(built):
    with zipfile.ZipFile(only(built, "*.whl")) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert "optax_lsdp/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert len(tops) == 2 and "optax_lsdp" in tops  # and its metadata


def test_the_sdist_holds_what_is_tracked_and_nothing_else(built):
    with tarfile.open(only(built, "*.tar.gz")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = set(run("git", "ls-files", cwd=ROOT).splitlines())
    needed = {name for name in tracked if name.startswith(SHIPPED)}
    assert needed <= names
    assert names - tracked <= {"PKG-INFO", ".gitignore"}


@pytest.mark.parametrize("versions", ["newest", *slow("oldest")])
def test_the_wheel_works_in_an_empty_environment(versions, built, tmp_path):
    """README's first example and the accountant's command run; missing extras are named."""
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    constraints = tmp_path / "constraints.txt"
    training = PROJECT["optional-dependencies"]["training"]
    pins = [line.replace(">=", "==") for line in (*PROJECT["dependencies"], *training)]
    constraints.write_text("\n".join(pins if versions == "oldest" else []))
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    wheel = f"optax-lsdp[training] @ {only(built, '*.whl').as_uri()}"
    run(*pip, "--constraint", constraints, wheel)
    (tmp_path / "example.py").write_text(blocks(ROOT / "README.md")[0])
    assert "Assumed" in run(python, "example.py", cwd=tmp_path)
    command = tmp_path / "venv" / "bin" / "optax-lsdp"
    options = [
        "--noise-multiplier",
        "1",
        "--dataset-size",
        "10000",
        "--batch-size",
        "100",
        "--steps",
        "100",
    ]
    assert "Assumed" in run(command, "epsilon", *options, cwd=tmp_path)
    done = subprocess.run([command, "demo"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode and "optax-lsdp[demo]" in done.stderr
