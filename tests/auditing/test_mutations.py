"""The audit of the library that is responsible for a bug rejects it."""

import re

import jax
import pytest

from optax_lsdp.auditing._clipping import EXACT, audit_hard_models, audit_microbatches
from optax_lsdp.auditing._library import AUDITS, run_audit
from tests.auditing import mutations
from tests.auditing._patches import Mutation, StaleMutation, replace, rewrite
from tests.auditing.mutations import MUTATIONS, planted, prepare
from tests.cases import slow

QUICK = (
    "a norm without the third leaf",
    "cross terms counted once",
    "rounding slack dropped",
    "one slack coordinate too many",
    "half of the unit roundoff of weighted rows",
    "overlapping microbatches counted twice",
    "collectives over devices accepted",
    "split parameters clipped part by part",
    "one key for all small leaves",
    "noise that repeats every 1,000 steps",
    "the same noise on all devices",
    "batches that repeat every 1,000 steps",
    "a plan whose optimizer adds less noise",
    "examples of users clipped one by one",
    "columns of correlated noise that are not normalised",
    "a band more than batches are apart",
    "a fixed order that is shuffled again",
)


def audited(mutation):
    """Return the report of the responsible audit, on those hard models that suffice."""
    key, models = jax.random.key(0), mutation.models
    if "on a TPU" in mutation.audit:
        return audit_hard_models("bookkeeping", key, models, "tpu")
    if "hard models" in mutation.audit:
        engine = "vmap" if "vmap" in mutation.audit else "bookkeeping"
        return audit_hard_models(engine, key, models)
    if "microbatches" in mutation.audit:
        return audit_microbatches(key, models)
    return run_audit(mutation.audit, key)


@pytest.mark.parametrize("name", [*QUICK, *slow(*(n for n in MUTATIONS if n not in QUICK))])
def test_a_bug_in_the_library_is_rejected(name):
    with planted(name):
        report = audited(MUTATIONS[name])
    assert not report and "REJECTED" in str(report), str(report)
    crash = re.search(r"(Type|Attribute|Name|Key|Index)Error", str(report))
    assert not crash, f"the mutation {name!r} is stale, as it only raises: {report}"


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_changes_code_that_the_library_has(name):
    prepare(name)


@pytest.mark.parametrize(
    ("patches", "reason"),
    [
        ((replace("optax_lsdp.noise:_gone", None),), "there is no optax_lsdp.noise:_gone"),
        ((replace("optax_lsdp._gone:name", None),), "there is no optax_lsdp._gone:name"),
        (rewrite("optax_lsdp.noise:fresh_key", "gone", ""), "0 times the text 'gone', not once"),
    ],
)
def test_a_stale_mutation_is_named(patches, reason, monkeypatch):
    monkeypatch.setitem(mutations.MUTATIONS, "a bug", Mutation("noise", patches))
    with pytest.raises(StaleMutation, match=rf"The mutation 'a bug' is stale: .*{reason}"):
        prepare("a bug")


@pytest.mark.parametrize("engine", ["bookkeeping", "vmap"])
@pytest.mark.parametrize("models", [("cancelling",), ("tied", "small"), *slow(EXACT)])
def test_hard_models_without_a_bug_pass(engine, models):
    report = audit_hard_models(engine, jax.random.key(1), models)
    assert report, str(report)


@pytest.mark.parametrize("models", [("constant row", "constant rows"), *slow(EXACT)])
def test_hard_models_that_are_rounded_as_on_a_tpu_pass(models):
    report = audit_hard_models("bookkeeping", jax.random.key(1), models, "tpu")
    assert report, str(report)


def test_every_audit_of_the_library_has_a_mutation_to_reject():
    assert {mutation.audit for mutation in MUTATIONS.values()} == set(AUDITS)
