"""Training: a plan, a loss and data go in, private parameters come out, whatever happens."""

try:
    from optax_lsdp.training._fit import fit
    from optax_lsdp.training._report import Report, StopTraining, Trained
except ModuleNotFoundError as error:
    if error.name is None or error.name.split(".")[0] not in ("orbax", "tqdm"):
        raise
    raise ModuleNotFoundError(
        "optax_lsdp.training needs Orbax and tqdm: pip install 'optax-lsdp[training]'."
    ) from error
from optax_lsdp.training._export import export_params, load_params
from optax_lsdp.training._given import DataError
from optax_lsdp.training._losses import average_views, keep_batch_axis, mixed_precision

__all__ = [
    "DataError",
    "Report",
    "StopTraining",
    "Trained",
    "average_views",
    "export_params",
    "fit",
    "keep_batch_axis",
    "load_params",
    "mixed_precision",
]
