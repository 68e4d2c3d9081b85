"""Training in one call: `fit` carries out a `PrivacyPlan`, and resumes interrupted runs."""

try:
    from optax_lsdp.training._fit import fit
except ModuleNotFoundError as error:
    if error.name is None or error.name.split(".")[0] not in ("orbax", "tqdm"):
        raise
    raise ModuleNotFoundError(
        "optax_lsdp.training needs Orbax and tqdm; run pip install '.[training]' in a clone of the "
        "repository."
    ) from error
from optax_lsdp._loss import average_examples, average_views, keep_batch_axis, mixed_precision
from optax_lsdp.training._export import export_params, load_params
from optax_lsdp.training._progress import FitResult, StepReport, StopTraining
from optax_lsdp.training._users import UserBatch, UserData
from optax_lsdp.training._validation import DataError

__all__ = ["DataError", "FitResult", "StepReport", "StopTraining", "UserBatch", "UserData"]
__all__ += ["average_examples", "average_views", "export_params", "fit", "keep_batch_axis"]
__all__ += ["load_params", "mixed_precision"]
