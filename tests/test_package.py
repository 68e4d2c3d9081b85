"""Wheel and sdist build, hold the right files, and work with their declared dependencies alone."""

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.cases import slow
from tests.test_docs import blocks

ROOT = Path(__file__).parents[1]
SHIPPED = ("optax_lsdp/", "tests/", "benchmarks/", "docs/", "notebooks/")
SETTING = {"noise-multiplier": 1, "dataset-size": 10_000, "batch-size": 100, "steps": 100}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run(*command, **options):
    """Run a command. If it fails, show its output."""
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
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


def with_dependencies(requirements):
    """Return the installed distributions that these requirements need, directly or not."""
    found, needed = {}, [Requirement(line) for line in requirements]
    while needed:
        requirement = needed.pop()
        package = distribution(requirement.name)
        for extra in {"", *requirement.extras} - found.setdefault(package.name, set()):
            found[package.name].add(extra)
            lines = map(Requirement, package.requires or ())
            needed += [x for x in lines if x.marker is None or x.marker.evaluate({"extra": extra})]
    return [distribution(name) for name in found]


def link_installed(requirements, site_packages):
    """Link the installed distributions that are required, and no others, into `site_packages`."""
    for package in with_dependencies(requirements):
        for top in {path.parts[0] for path in package.files} - {"..", "__pycache__"}:
            link = site_packages / top
            if not link.exists():
                link.symlink_to(package.locate_file(top))


@pytest.mark.parametrize("versions", ["installed", *slow("newest", "oldest")])
def test_the_wheel_works_with_its_declared_dependencies_alone(versions, built, tmp_path):
    """README's first example and the accountant's command run. Errors name missing extras."""
    required = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["training"]
    venv = tmp_path / "venv"
    python = venv / "bin" / "python"
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    pip += ("install", "--quiet")
    wheel = only(built, "*.whl")
    if versions == "installed":  # downloads nothing
        run(*pip, "--no-deps", "--no-index", wheel)
        link_installed(required, only(venv / "lib", "python*") / "site-packages")
    else:
        constraints = tmp_path / "constraints.txt"
        pins = [line.replace(">=", "==") for line in required] if versions == "oldest" else []
        constraints.write_text("\n".join(pins))
        run(*pip, "--constraint", constraints, f"optax-lsdp[training] @ {wheel.as_uri()}")
    (tmp_path / "example.py").write_text(blocks(ROOT / "README.md")[0])
    assert "Assumed" in run(python, "example.py", cwd=tmp_path)
    command = venv / "bin" / "optax-lsdp"
    options = [f"--{name}={value}" for name, value in SETTING.items()]
    assert "Assumed" in run(command, "epsilon", *options, cwd=tmp_path)
    done = subprocess.run([command, "demo"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode and "pip install '.[demo]' in a clone" in done.stderr


@pytest.mark.parametrize("has_project", [True, False])
def test_a_copy_that_is_not_installed_has_a_version(has_project, tmp_path):
    (tmp_path / "optax_lsdp").mkdir()
    for name in ("optax_lsdp/__init__.py", *(["pyproject.toml"] if has_project else [])):
        (tmp_path / name).write_text((ROOT / name).read_text())
    script = f"import sys; sys.path[:0] = [{str(tmp_path)!r}]; import optax_lsdp as lsdp; "
    script += "print(lsdp.__file__, lsdp.__version__)"
    said = run(sys.executable, "-I", "-S", "-c", script)  # without site-packages
    version = PROJECT["version"] if has_project else "unknown"
    assert said.split() == [str(tmp_path / "optax_lsdp" / "__init__.py"), version]
