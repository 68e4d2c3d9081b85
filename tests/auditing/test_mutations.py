"""Bugs in the library's own code: the audit that is responsible rejects each of them."""

import jax
import pytest

from optax_lsdp.auditing import _clipping, _self
from tests.auditing.mutations import MUTATIONS
from tests.cases import slow

QUICK = (
    "a norm without the third leaf",
    "cross terms counted once",
    "rounding slack dropped",
    "an overlap of microbatches counted twice",
    "collectives that are not refused",
    "split parameters clipped part by part",
    "small leaves that share one key",
    "noise that repeats every 1,000 steps",
    "the same noise on all devices",
    "batches that repeat every 1,000 steps",
    "a plan whose optimizer adds less noise",
)


def audited(audit, models, seed=0):
    """Return the report of an audit, on few models where these are enough."""
    key = jax.random.key(seed)
    if "hard models" in audit:
        engine = "vmap" if "vmap" in audit else "bookkeeping"
        return _clipping.audit_hard_models(engine, key, models)
    if "microbatches" in audit:
        return _clipping.audit_microbatches(key, models)
    return _self.run_audit(audit, key)


@pytest.mark.parametrize("name", [*QUICK, *slow(*(n for n in MUTATIONS if n not in QUICK))])
def test_a_bug_in_the_library_is_found(name):
    mutation = MUTATIONS[name]
    with mutation.planted():
        report = audited(mutation.audit, mutation.models)
    assert not report and "REJECTED" in str(report), str(report)


@pytest.mark.parametrize("engine", ["bookkeeping", "vmap"])
@pytest.mark.parametrize("models", [("cancelling",), ("tied", "small"), *slow(_clipping.EXACT)])
def test_models_that_are_hard_to_clip_pass(engine, models):
    report = _clipping.audit_hard_models(engine, jax.random.key(1), models)
    assert report, str(report)


def test_every_audit_of_the_library_has_a_bug_that_it_must_find():
    assert {mutation.audit for mutation in MUTATIONS.values()} == set(
        _self.AUDITS | _self.AUDITS_APART
    )
