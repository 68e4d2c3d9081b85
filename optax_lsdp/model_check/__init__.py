"""Check a loss before private training: does it mix examples, and is it finite everywhere?"""

from optax_lsdp.model_check._check import ModelReport, check_model

__all__ = ["ModelReport", "check_model"]
