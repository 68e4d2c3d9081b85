"""Model check: a loss goes in, what is in the way of training it privately comes out."""

from optax_lsdp.model_check._check import ModelReport, check_model

__all__ = ["ModelReport", "check_model"]
