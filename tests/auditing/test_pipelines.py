"""Audits of whole pipelines: an audit rejects each broken one, and passes each sound one."""

import jax
import pytest

from benchmarks import _pipeline
from benchmarks._pipeline import SOUND
from benchmarks._planted import PLANTED
from optax_lsdp.accounting import SampledGaussian
from tests.cases import FULL, slow

SEEDS = range(20 if FULL else 1)


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # Adam in Optax needs it
        yield


SLOW_BUGS = (
    "norms in float16",
    "division by the number of examples that came",
    "clipping at the median of a batch",
    "a search for NaN in the first number only",
    "a NaN example that is left in",
    "padding that is not masked",
    "a tied weight that is counted once",
    "batch normalisation",
    "an odd example that changes how others are clipped",
)


@pytest.mark.parametrize("name", [*(n for n in PLANTED if n not in SLOW_BUGS), *slow(*SLOW_BUGS)])
def test_a_broken_pipeline_is_rejected(name):
    for seed in SEEDS:
        report = PLANTED[name].run(seed)
        assert not report, str(report)
    assert "REJECTED" in str(report) or report is False


SLOW = (
    "a run that goes on with other data",
    "dp_sgd, engine 'bookkeeping'",
    "dp_sgd, engine 'vmap'",
    "dp_lssgd, engine 'bookkeeping'",
    "dp_lssgd, engine 'vmap'",
    "a tied weight",
)


@pytest.mark.parametrize("name", [*(n for n in SOUND if n not in SLOW), *slow(*SLOW)])
def test_a_sound_pipeline_passes(name):
    for seed in SEEDS:
        report = SOUND[name].run(seed)
        assert report, str(report)


def test_a_canary_reveals_more_than_half_of_the_claimed_epsilon_behind_adam():
    claimed = SampledGaussian(_pipeline.NOISE, 1.0, 3, sampling="full").epsilon(_pipeline.DELTA)
    report = SOUND["dp_lsadam, engine 'vmap'"].run(0)
    assert report.gaussian_epsilon > claimed / 2
