"""Auditing: a step, a sampler or a training function goes in, a verdict on its claims comes out."""

from optax_lsdp.auditing._canaries import (
    EpsilonReport,
    audit_epsilon,
    audit_one_run,
    audit_scores,
)
from optax_lsdp.auditing._noise import audit_noise
from optax_lsdp.auditing._report import StatisticsReport
from optax_lsdp.auditing._samplers import audit_sampler
from optax_lsdp.auditing._self import audit_library
from optax_lsdp.auditing._sensitivity import SensitivityReport, audit_sensitivity

__all__ = ["EpsilonReport", "SensitivityReport", "StatisticsReport", "audit_epsilon"]
__all__ += ["audit_library", "audit_noise", "audit_one_run", "audit_sampler"]
__all__ += ["audit_scores", "audit_sensitivity"]
