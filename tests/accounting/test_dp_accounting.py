"""Answers agree with dp-accounting where it is sound, and exceed it where it reports too little."""

import dp_accounting as dp
import pytest
from dp_accounting import pld, rdp

from optax_lsdp.accounting import SampledGaussian

AddRemove, ReplaceOne = dp.NeighboringRelation.ADD_OR_REMOVE_ONE, dp.NeighboringRelation.REPLACE_ONE
FINE = 1e-4  # the mesh of dp-accounting


def pld_epsilon(phase, delta, relation=AddRemove, mesh=FINE):
    accountant = pld.PLDAccountant(relation, mesh)
    return accountant.compose(phase.to_dp_event()).get_epsilon(delta)


@pytest.mark.parametrize(
    ("noise", "rate", "steps", "delta"),
    [(1.1, 256 / 60_000, 1000, 1e-5), (0.7, 0.01, 500, 1e-6), (3.0, 0.05, 2000, 1e-5)],
)
def test_their_fine_mesh_is_just_above_our_answer(noise, rate, steps, delta):
    phase = SampledGaussian(noise, rate, steps)
    low, high = phase.epsilon_bounds(delta)
    theirs = pld_epsilon(phase, delta)
    assert low <= theirs <= 1.03 * high


@pytest.mark.parametrize(("noise", "rate", "steps"), [(1.1, 0.004, 10_000), (4.0, 0.02, 3000)])
def test_their_renyi_accountant_is_looser(noise, rate, steps):
    phase = SampledGaussian(noise, rate, steps)
    accountant = rdp.RdpAccountant().compose(phase.to_dp_event())
    epsilon = phase.epsilon(1e-5)
    assert epsilon <= accountant.get_epsilon(1e-5) <= 1.5 * epsilon


def test_full_batches_are_their_gaussian_mechanism():
    phase = SampledGaussian(20.0, 1, 1000, sampling="full")
    assert phase.epsilon(1e-5) == pytest.approx(pld_epsilon(phase, 1e-5), rel=1e-3)


def test_truncated_batches_agree():
    phase = SampledGaussian(2.0, 0.01, 500, max_batch_size=15, dataset_size=1000)
    assert SampledGaussian(2.0, 0.01, 500).epsilon(1e-5) < phase.epsilon(1e-5)
    assert phase.epsilon(1e-5) <= pld_epsilon(phase, 1e-5) <= 1.2 * phase.epsilon(1e-5)


def test_replacing_one_costs_no_more_than_they_report():
    phase = SampledGaussian(2.0, 0.01, 500, neighbouring="replace_one")
    assert phase.epsilon(1e-5) <= 1.001 * pld_epsilon(phase, 1e-5, ReplaceOne)


def test_they_report_too_little_at_a_small_delta():
    phase = SampledGaussian(1.0, 0.01, 10**4)
    low, _ = phase.epsilon_bounds(1e-12)
    assert pld_epsilon(phase, 1e-12) < low
    assert phase.epsilon(1e-12) >= low


def test_an_event_contains_the_sampling_scheme():
    fixed = SampledGaussian(
        2.0,
        0.01,
        5,
        sampling="without_replacement",
        neighbouring="replace_one",
        dataset_size=1000,
    )
    event = fixed.to_dp_event()
    assert event.count == 5
    assert (event.event.source_dataset_size, event.event.sample_size) == (1000, 10)
    assert SampledGaussian(2.0, 0.01, 5).to_dp_event().event.sampling_probability == 0.01


@pytest.mark.parametrize(
    ("phase", "message"),
    [
        (
            SampledGaussian(1.0, 0.1, 1, sampling="shuffled", neighbouring="zero_out"),
            "`sampling` must be 'poisson', .* for to_dp_event, got 'shuffled'",
        ),
        (SampledGaussian(1.0, 0.1, 1).group(2), "`group_size` must be 1 .* got 2"),
        (
            SampledGaussian(
                1.0, 0.1, 1, sampling="without_replacement", neighbouring="replace_one"
            ),
            "`dataset_size` must be a number",
        ),
    ],
)
def test_a_phase_without_an_event_is_refused(phase, message):
    with pytest.raises(ValueError, match=message):
        phase.to_dp_event()
