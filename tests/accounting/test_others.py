"""Held to dp-accounting, where that is sound, and shown where it is not."""

import dp_accounting as dp
import pytest
from dp_accounting import pld, rdp

from optax_lsdp.accounting import SampledGaussian

AddRemove, ReplaceOne = dp.NeighboringRelation.ADD_OR_REMOVE_ONE, dp.NeighboringRelation.REPLACE_ONE
FINE = 1e-4


def pld_epsilon(run, delta, relation=AddRemove, mesh=FINE):
    accountant = pld.PLDAccountant(relation, mesh)
    return accountant.compose(run.to_dp_event()).get_epsilon(delta)


@pytest.mark.parametrize(
    ("noise", "rate", "steps", "delta"),
    [(1.1, 256 / 60_000, 1000, 1e-5), (0.7, 0.01, 500, 1e-6), (3.0, 0.05, 2000, 1e-5)],
)
def test_a_fine_mesh_of_theirs_is_just_above_ours(noise, rate, steps, delta):
    run = SampledGaussian(noise, rate, steps)
    low, high = run.epsilon_bounds(delta)
    theirs = pld_epsilon(run, delta)
    assert low <= theirs <= 1.03 * high


@pytest.mark.parametrize(("noise", "rate", "steps"), [(1.1, 0.004, 10_000), (4.0, 0.02, 3000)])
def test_renyi_divergence_is_looser(noise, rate, steps):
    run = SampledGaussian(noise, rate, steps)
    accountant = rdp.RdpAccountant().compose(run.to_dp_event())
    epsilon = run.epsilon(1e-5)
    assert epsilon <= accountant.get_epsilon(1e-5) <= 1.5 * epsilon


def test_a_run_of_full_batches_is_their_gaussian():
    run = SampledGaussian(20.0, 1, 1000, sampling="full")
    assert run.epsilon(1e-5) == pytest.approx(pld_epsilon(run, 1e-5), rel=1e-3)


def test_cut_batches_are_accounted_alike():
    run = SampledGaussian(2.0, 0.01, 500, max_batch_size=15, dataset_size=1000)
    assert SampledGaussian(2.0, 0.01, 500).epsilon(1e-5) < run.epsilon(1e-5)
    assert run.epsilon(1e-5) <= pld_epsilon(run, 1e-5) <= 1.2 * run.epsilon(1e-5)


def test_replacing_one_is_no_worse_than_they_say():
    run = SampledGaussian(2.0, 0.01, 500, neighbouring="replace_one")
    assert run.epsilon(1e-5) <= 1.001 * pld_epsilon(run, 1e-5, ReplaceOne)


def test_they_report_too_little_at_small_delta_and_we_do_not():
    run = SampledGaussian(1.0, 0.01, 10**4)
    low, _ = run.epsilon_bounds(1e-12)
    assert pld_epsilon(run, 1e-12) < low
    assert run.epsilon(1e-12) >= low


def test_events_say_how_batches_are_drawn():
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
    ("run", "message"),
    [
        (
            SampledGaussian(1.0, 0.1, 1, sampling="shuffled", neighbouring="zero_out"),
            "`sampling` must not be 'shuffled'",
        ),
        (SampledGaussian(1.0, 0.1, 1).group(2), "`group_size` must be 1 .* got 2"),
        (
            SampledGaussian(
                1.0, 0.1, 1, sampling="without_replacement", neighbouring="replace_one"
            ),
            "`dataset_size` must be given",
        ),
    ],
)
def test_what_has_no_event_is_refused(run, message):
    with pytest.raises(ValueError, match=message):
        run.to_dp_event()
