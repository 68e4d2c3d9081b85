"""Differentially private training for JAX and Optax, with Laplacian smoothing.

A public name is loaded when it is first used. Importing this package, or only
`optax_lsdp.accounting`, therefore does not import JAX.
"""

import tomllib
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

_HOME = {
    "AdaptiveClip": "clipping",
    "Clipped": "clipping",
    "CyclicPoissonSampler": "sampling",
    "FixedSizeSampler": "sampling",
    "FullBatchSampler": "sampling",
    "Grid": "smoothing",
    "NormEstimates": "clipping",
    "PerExample": "clipping",
    "Piecewise": "planning",
    "PoissonSampler": "sampling",
    "PrivacyPlan": "planning",
    "ShuffledSampler": "sampling",
    "TrainingCurve": "watching",
    "accounting": "accounting",
    "auditing": "auditing",
    "auto_smooth": "smoothing",
    "add_correlated_noise": "correlated_noise",
    "add_gaussian_noise": "noise",
    "chosen_smoothing": "smoothing",
    "check_model": "model_check",
    "clip_per_example": "clipping",
    "clipped_grad": "clipping",
    "correlation": "correlation",
    "current_clip_norm": "clipping",
    "discrete": "discrete",
    "dp_adam": "optimizers",
    "dp_lsadam": "optimizers",
    "dp_lssgd": "optimizers",
    "dp_sgd": "optimizers",
    "estimate_norms": "clipping",
    "explain_clipping": "clipping",
    "fresh_key": "noise",
    "laplacian_smooth": "smoothing",
    "low_pass": "filters",
    "norm_estimates": "clipping",
    "privatize": "optimizers",
    "scale_by_debiased_adam": "filters",
    "sensitivity": "clipping",
    "training": "training",
    "training_curve": "watching",
    "value_and_clipped_grad": "clipping",
    "vouch_for_callbacks": "clipping",
    "watch": "watching",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _HOME:
        hint = "; it is in optax_lsdp.training" if name in ("fit", "UserData") else ""
        raise AttributeError(f"{__name__} has no public name {name!r}{hint}")
    home = import_module(f"{__name__}.{_HOME[name]}")
    return home if name == _HOME[name] else getattr(home, name)


def _version() -> str:
    """Return the version of the installed package, or of the checkout if it is not installed."""
    try:
        return metadata.version("optax-lsdp")
    except metadata.PackageNotFoundError:
        project = Path(__file__).parents[1] / "pyproject.toml"
        if not project.exists():
            return "unknown"
        return tomllib.loads(project.read_text())["project"]["version"]


def __dir__() -> list[str]:
    return __all__
