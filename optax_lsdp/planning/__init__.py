"""Privacy plans: one set of settings gives a matching sampler, gradient, optimizer and ε."""

from optax_lsdp.planning._plan import PrivacyPlan
from optax_lsdp.planning._settings import Piecewise

__all__ = ["Piecewise", "PrivacyPlan"]
