"""Privacy plans: one set of settings gives a sampler, gradient, optimizer and ε that agree."""

from optax_lsdp.planning._plan import PrivacyPlan
from optax_lsdp.planning._settings import Piecewise

__all__ = ["Piecewise", "PrivacyPlan"]
