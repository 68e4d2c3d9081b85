"""Our own pipeline, broken in one way at a time: an audit rejects each, and nothing else."""

import jax
import pytest

import optax_lsdp as lsdp
from benchmarks._pipeline import CLIP, COUNT, RATE, SOUND, clipped, loss, sensitivity, tied_loss
from benchmarks._planted import PLANTED
from optax_lsdp.auditing import audit_sampler
from tests.conftest import FULL

SEEDS = range(20 if FULL else 1)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name):
    for seed in SEEDS:
        report = PLANTED[name].run(seed)
        assert not report, str(report)
    assert "REJECTED" in str(report) or report is False


@pytest.mark.parametrize("name", SOUND)
def test_what_is_sound_passes(name):
    for seed in SEEDS:
        report = SOUND[name].run(seed)
        assert report, str(report)


@pytest.mark.parametrize("engine", ["bookkeeping", "vmap"])
@pytest.mark.parametrize("loss_fn", [loss, tied_loss])
@pytest.mark.parametrize(
    ("neighbouring", "declared"),
    [("add_remove", CLIP), pytest.param("replace_one", 2 * CLIP, marks=pytest.mark.full)],
)
def test_clipping_has_the_sensitivity_that_it_declares(engine, loss_fn, neighbouring, declared):
    def release(batch, mask):
        return clipped(batch, mask, engine, loss_fn)

    report = sensitivity(release, declared, seed=0, neighbouring=neighbouring)
    assert report, str(report)
    assert report.largest > 0.5 * declared  # it sees something


@pytest.mark.parametrize("seed", range(3))
def test_a_sampler_passes_as_nothing_but_what_it_is(seed):
    key = jax.random.key(seed)
    facts = {"dataset_size": COUNT, "sampling_rate": RATE}
    fixed = lsdp.FixedSizeSampler(COUNT, round(RATE * COUNT), key)
    poisson = lsdp.PoissonSampler(COUNT, RATE, key)
    assert not audit_sampler(fixed, **facts, sampling="poisson")
    assert not audit_sampler(poisson, **facts, sampling="without_replacement")
    assert not audit_sampler(lsdp.PoissonSampler(COUNT, 1.1 * RATE, key), **facts)
