"""Bugs planted in correlated noise, its plans and its runs; see `mutations.py`."""

from types import SimpleNamespace

import numpy as np

from optax_lsdp.correlated_noise import restart_noise, with_noise_key
from tests.auditing._patches import Mutation, Patch, replace, rewrite, wrap

NOISE, MATRICES = "optax_lsdp.correlated_noise", "optax_lsdp.correlation"
SAMPLERS, RESUME = "optax_lsdp.sampling", "optax_lsdp.training._resume"
PLANS, NOISES = "plans with correlated noise", "correlated noise"
RUNS = "resumed runs with correlated noise"


def _with_norm(module):
    norm = SimpleNamespace(norm=lambda *args: 0.9 * np.linalg.norm(*args))
    return SimpleNamespace(**{**vars(np), "linalg": norm})


def _one_band_less(bands):
    return property(lambda self: max(bands.fget(self) - 1, 1))


def _half_of_the_second(subtract, coefficients, *args):
    changed = np.array(coefficients)
    changed[1] /= 2
    return subtract(changed, *args)


def _without_the_last(subtract, coefficients, *args):
    changed = np.array(coefficients)
    changed[-1] = 0
    return subtract(changed, *args)


def _whole_cycles_only(uses):
    def counted(self):
        steps = np.arange(1, self.steps + 1)
        return steps // self.cycle if self.cycle else uses(self)

    return counted


def _of_one_use(uses):
    return lambda self: uses(self) if self.cycle else np.ones(self.steps)


def _any_part(batch):
    return lambda self, step: self._candidates.batch(step)


def _shuffled_again(init):
    def changed(self, *args, **options):
        init(self, *args, **{**options, "reshuffle": True})

    return changed


MUTATIONS_OF_CORRELATION = {
    "columns of correlated noise that are not normalised": Mutation(
        PLANS, (Patch(f"{MATRICES}:np", _with_norm),)
    ),
    "a band more than batches are apart": Mutation(
        PLANS, (Patch(f"{MATRICES}:Correlation.bands", _one_band_less),)
    ),
    "a part of a cycle that does not count": Mutation(
        PLANS, (Patch("optax_lsdp.accounting:CorrelatedGaussian.uses", _whole_cycles_only),)
    ),
    "epochs after the first that do not count": Mutation(
        PLANS, (Patch("optax_lsdp.accounting:CorrelatedGaussian.uses", _of_one_use),)
    ),
    "batches of any part of the data": Mutation(
        PLANS, (Patch(f"{SAMPLERS}:CyclicPoissonSampler.batch", _any_part),)
    ),
    "a fixed order that is shuffled again": Mutation(
        PLANS, (Patch(f"{SAMPLERS}:ShuffledSampler.__init__", _shuffled_again),)
    ),
    "new noise that continues an old count": Mutation(
        PLANS,
        (replace("optax_lsdp._schemes:Scheme.keeps_order", property(lambda self: False)),),
    ),
    "a training curve of correlated noise": Mutation(
        PLANS,
        (
            replace("optax_lsdp.planning._settings:check_watch", lambda *args: None),
            replace("optax_lsdp.optimizers:_check_constant", lambda *args: None),
        ),
    ),
    "noise that is correlated too little": Mutation(
        NOISES, (wrap(f"{NOISE}:_subtract_past", _half_of_the_second),)
    ),
    "noise without its last band": Mutation(
        NOISES, (wrap(f"{NOISE}:_subtract_past", _without_the_last),)
    ),
    "past noises with a wrong sign": Mutation(
        NOISES, rewrite(f"{NOISE}:_subtract_rows", "rest - weights", "rest + weights")
    ),
    "earlier draws that are drawn anew": Mutation(
        NOISES,
        rewrite(f"{NOISE}:_combine_draws", "jnp.maximum(state.step - lag, start)", "state.step"),
    ),
    "a resumed run that forgets its past noises": Mutation(
        RUNS, (replace(f"{RESUME}:with_noise_key", restart_noise),)
    ),
    "a restart that remembers its past noises": Mutation(
        RUNS, (replace(f"{RESUME}:restart_noise", with_noise_key),)
    ),
    "a restart that continues an old cycle": Mutation(
        RUNS,
        rewrite(
            f"{RESUME}:count_steps", "continues=order_start < step < plan.steps", "continues=True"
        ),
    ),
}
