"""The house rules that a machine can check: who imports whom, how long, which words."""

import ast
import importlib
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "optax_lsdp"
FILES = sorted(PACKAGE.rglob("*.py"))
ALL_FILES = [p for d in ("optax_lsdp", "tests", "benchmarks") for p in (ROOT / d).rglob("*.py")]

LIGHT = {"numpy", "scipy"}
JAX = {"jax", "jaxlib", "numpy", "optax"}


def own(*names):
    return {f"optax_lsdp.{name}" for name in names}


FREE = own("_checks", "_schemes", "_types")  # without JAX: every file may import them
SHARED = own("_clipped", "_isolation", "_jaxpr", "_keys", "_loss", "_mesh", "_trees")
STAGES = own(
    "clipping", "discrete", "filters", "noise", "optimizers", "sampling", "smoothing", "watching"
)
STAGES |= own("correlated_noise", "correlation")
# What a file may import besides the standard library, FREE and its own folder; the longest match
# rules. A name stands for the public names of that module or folder.
MAY_IMPORT = {
    "__init__": set(),
    "__main__": own("cli"),
    "_checks": {"numpy"},
    "_schemes": set(),
    "_types": {"numpy"},
    "_jaxpr": {"jax"},
    "_keys": {"jax", "numpy"},
    "_mesh": {"jax"},
    "_trees": {"jax", "numpy"},
    "_clipped": {"jax", "optax"} | own("_trees"),
    "_isolation": {"jax", "optax"} | own("_jaxpr", "_mesh", "_trees"),
    "_loss": {"jax", "optax"} | own("_isolation", "_trees"),
    "accounting": LIGHT | {"dp_accounting"} | own("correlation"),
    "correlation": LIGHT,
    "sampling": {"jax", "numpy", "scipy"} | own("_keys"),
    "clipping": JAX | SHARED,
    "discrete": JAX | SHARED,
    "discrete._sampler": {"numpy"} | own("_keys"),
    "noise": JAX | SHARED,
    "correlated_noise": JAX | SHARED | own("correlation", "noise"),
    "smoothing": JAX | SHARED,
    "smoothing._spectrum": {"numpy"},
    "watching": JAX | SHARED | {"matplotlib"} | own("correlated_noise"),
    "filters": JAX | SHARED | own("smoothing"),
    "optimizers": JAX
    | SHARED
    | own("clipping", "correlated_noise", "correlation", "filters", "noise", "smoothing")
    | own("watching"),
    "model_check": JAX | SHARED | own("clipping"),
    "planning": JAX | SHARED | STAGES | own("accounting"),
    "training": JAX | {"orbax", "tqdm"} | SHARED | STAGES | own("accounting", "planning"),
    "auditing": JAX | {"scipy"} | STAGES | own("accounting", "planning", "training"),
    "cli": {"jax", "matplotlib", "optax_lsdp"} | own("accounting", "auditing", "correlation"),
    "cli.demo": JAX | {"flax", "matplotlib", "sklearn", "tqdm", "optax_lsdp"} | own("accounting"),
}


def module_name(path):
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def rule_for(module):
    parts = module.split(".")
    prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next(MAY_IMPORT[prefix] for prefix in prefixes if prefix in MAY_IMPORT)


def allowed(imported, module):
    top = imported.partition(".")[0]
    if (
        top in sys.stdlib_module_names
        or imported in rule_for(module) | FREE
        or top in rule_for(module) - {"optax_lsdp"}
    ):
        return True
    folder = module.partition(".")[0]
    return (PACKAGE / folder).is_dir() and imported.startswith(f"optax_lsdp.{folder}")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_imports_only_what_its_place_allows(path):
    module = module_name(path)
    strangers = [name for name in imports(path) if not allowed(name, module)]
    assert not strangers, f"{module} must not import {strangers}"


@pytest.mark.parametrize("path", ALL_FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_is_one_idea_with_a_contract(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    assert ast.get_docstring(ast.parse(text)), "a file opens with its contract"


def test_one_file_alone_opens_the_door_to_jaxprs():
    doors = [p for p in FILES if any(n.startswith(("jax.extend", "jax._src")) for n in imports(p))]
    assert [module_name(path) for path in doors] == ["_jaxpr"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_name_says_sigma(path):
    names = {
        node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)
    }
    names |= {
        node.arg for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.arg)
    }
    assert not {name for name in names if "sigma" in name.lower()}


def run(script):
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_accountant_imports_and_answers_without_jax():
    run(
        "import sys\n"
        "sys.modules.update(jax=None, jaxlib=None, optax=None, dp_accounting=None)\n"
        "from optax_lsdp.accounting import SampledGaussian\n"
        "assert SampledGaussian(1.0, 0.01, 10).epsilon(1e-5) > 0\n"
    )


def test_importing_the_package_imports_nothing_else():
    run(
        "import sys; import optax_lsdp; dir(optax_lsdp)\n"
        "assert not {'jax', 'optax', 'numpy', 'scipy'} & set(sys.modules)\n"
    )


def test_every_public_name_can_be_loaded_and_helps():
    import optax_lsdp

    for name in optax_lsdp.__all__:
        assert getattr(optax_lsdp, name).__doc__, name
    with pytest.raises(AttributeError, match=r"no public name 'dpsgd'$"):
        optax_lsdp.dpsgd  # noqa: B018  # the access is the test
    with pytest.raises(AttributeError, match="no public name 'fit'; it is in"):
        optax_lsdp.fit  # noqa: B018  # the access is the test


FOLDERS = ("accounting", "auditing", "clipping", "correlation", "discrete", "model_check")
FOLDERS += ("planning", "sampling", "smoothing", "training")
RESULTS = {  # returned by functions, and not made by users
    *("AddDiscreteNoiseState", "Batch", "DataError", "EpsilonReport", "FitResult", "ModelReport"),
    *("NormEstimates",),
    *("PaperNoise", "PerExample", "QuantizedSum", "Sampler", "SensitivityReport"),
    *("StatisticsReport", "StepReport", "TrainingCurve", "UserBatch"),
}


@pytest.mark.parametrize("folder", ["", *(f".{name}" for name in FOLDERS)])
def test_every_public_name_has_an_example_that_runs(folder):
    module = importlib.import_module(f"optax_lsdp{folder}")
    for name in module.__all__:
        if name not in RESULTS | set(FOLDERS):
            assert ">>>" in getattr(module, name).__doc__, name


def test_any_is_rare():
    text = "\n".join(path.read_text() for path in FILES)
    per_thousand_lines = 1000 * len(re.findall(r"\bAny\b", text)) / len(text.splitlines())
    assert per_thousand_lines <= 12


def test_the_package_stays_small():
    strategies = [path for path in FILES if path.parent.name == "strategies"]  # one file each
    assert len(FILES) - len(strategies) <= 95


def test_a_class_name_means_one_thing():
    classes = [
        node.name
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    assert not {name for name, count in Counter(classes).items() if count > 1}


@pytest.mark.parametrize("path", ALL_FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_says_what_it_is_for(path):
    purpose = ast.get_docstring(ast.parse(path.read_text()))
    assert not re.search(r"\b(goes?|come?s?) (in|out)\b", purpose)
