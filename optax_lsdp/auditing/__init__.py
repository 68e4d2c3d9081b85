"""Audit claims of differential privacy: refute a wrong ε, sensitivity, noise or sampler.

An audit attacks a step, a sampler or a training function and returns a report with a verdict. An
audit can refute a claim, but cannot prove it. `audit_library` audits this installation.
"""

from optax_lsdp.auditing._epsilon import EpsilonReport, audit_epsilon, audit_one_run, audit_scores
from optax_lsdp.auditing._library import audit_library
from optax_lsdp.auditing._report import StatisticsReport
from optax_lsdp.auditing._sensitivity import SensitivityReport, audit_sensitivity
from optax_lsdp.auditing._statistics import audit_noise, audit_sampler

__all__ = ["EpsilonReport", "SensitivityReport", "StatisticsReport", "audit_epsilon"]
__all__ += ["audit_library", "audit_noise", "audit_one_run", "audit_sampler"]
__all__ += ["audit_scores", "audit_sensitivity"]
