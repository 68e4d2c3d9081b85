"""Planning: a budget goes in, the parts of a private training run come out, and they agree."""

from optax_lsdp.planning._piecewise import Piecewise
from optax_lsdp.planning._plan import PrivacyPlan

__all__ = ["Piecewise", "PrivacyPlan"]
