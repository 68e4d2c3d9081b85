"""Bugs planted in the library itself: each is a patch that the audit command must notice.

`benchmarks/_planted.py` breaks pipelines that were written for the purpose. Here the library's own
functions are patched, and `optax_lsdp.auditing` is asked what it sees.
"""

import os
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lsdp import _keys, noise, optimizers
from optax_lsdp.discrete import _quantized as discrete
from optax_lsdp.planning import PrivacyPlan, _accounts, _guards, _plan, _spending
from optax_lsdp.sampling import PoissonSampler, UnamplifiedShuffle, _samplers, _subsets
from optax_lsdp.smoothing import ring_beta
from optax_lsdp.training import _journal, _run, _step
from tests.auditing._wrong_sums import WRONG_SUMS, replaced, rewritten, wrapped


class Mutation(NamedTuple):
    """A bug: how it is planted, which audit must reject, and which hard models are enough."""

    patch: Any
    audit: str
    models: tuple[str, ...] = ()

    @contextmanager
    def planted(self):
        """Plant the bug; nothing that was compiled before or meanwhile is used."""
        jax.clear_caches()
        with self.patch():
            yield
        jax.clear_caches()


def _of_step(change):
    """Return a patch of what is folded into keys where it may be a step, which is int32."""
    fold_in = jax.random.fold_in

    def folded(key, data):
        is_step = getattr(data, "dtype", None) == jnp.int32 and jnp.ndim(data) == 0
        return fold_in(key, change(data) if is_step else data)

    return replaced(jax.random, "fold_in", folded)


def _one_key_for_small(draw, keys, leaves, *others):
    firsts = {}
    for index, leaf in enumerate(leaves):
        firsts.setdefault(leaf.size > 1000, index)
    chosen = [firsts[leaf.size > 1000] for leaf in leaves]
    return draw(keys[np.asarray(chosen)], leaves, *others)


def _first_half_twice(normal, keys, shape, dtype):
    drawn = normal(keys, shape, dtype)
    half = shape[0] // 2 if shape else 0
    if drawn.ndim != len(shape) or half < 40:
        return drawn
    return jnp.concatenate([drawn[:half], drawn[: shape[0] - half]])


def _smoothed_first(chain, *links):
    clip, gaussian, scale, smooth, *rest = links
    return chain(clip, smooth, gaussian, scale, *rest)


@contextmanager
def _smoothing_before_noise():
    """Less noise is added, as much as smoothing would have left of it."""
    left, stddev = float(np.sqrt(ring_beta(1.0, 4))), optimizers._stddev
    reordered = SimpleNamespace(**{**vars(optax), "chain": partial(_smoothed_first, optax.chain)})
    with (
        mock.patch.object(optimizers, "optax", reordered),
        mock.patch.object(optimizers, "_stddev", lambda z, c: left * stddev(z, c)),
    ):
        yield


def _counts_at(factor):
    counts = PoissonSampler._counts.func

    def changed(self):
        return counts(replace(self, sampling_rate=factor * self.sampling_rate))

    return replaced(PoissonSampler, "_counts", property(changed))


def _shuffler(dataset_size, rate, key, **options):
    return UnamplifiedShuffle(dataset_size, round(rate * dataset_size), key)


def _padded_with_the_first(subset, *args):
    indices, mask = subset(*args)
    return _subsets.Batch(np.where(mask, indices, 0), mask)


def _with_repeats(subset, words, dataset_size, count, room, size):
    found = subset(words, dataset_size, count, room, size)
    return found._replace(indices=words.indices(dataset_size, size))


def _at_step(change):
    begin = _subsets.Words.__init__

    def changed(self, key, step):
        begin(self, key, change(step))

    return replaced(_subsets.Words, "__init__", changed)


def _a_tenth_less(privatize, *args, noise_multiplier, **options):
    return privatize(*args, noise_multiplier=0.9 * noise_multiplier, **options)


def _half_of_epsilon(noise_and_epsilon, plan):
    multiplier, epsilon = noise_and_epsilon(plan)
    return multiplier, epsilon / 2 if plan.epsilon is None else epsilon


def _of_half_the_steps(mechanism_of, plan, multiplier):
    found = mechanism_of(plan, multiplier)
    runs = tuple(replace(run, steps=-(-run.steps // 2)) for run in found.runs)
    return type(found)(runs)


_derive_key = PrivacyPlan.derive_key


def _nonce(make):
    return replaced(_journal, "secrets", SimpleNamespace(token_hex=make))


@contextmanager
def _unnoticed():
    with (
        mock.patch.object(_run, "circumstances", return_value={}),
        mock.patch.object(_journal.Journal, "differs", return_value=False),
    ):
        yield


SMALL, LARGE, CANARY = (
    "noise",
    "noise of large leaves",
    "a step of DP-LSSGD, with and without a canary",
)
PLAN, PLAN_NOISE, RUNS = "a plan", "noise of a plan's optimizer", "resumed runs"
POISSON, FIXED, SPREAD = "Poisson sampler", "fixed-size sampler", "noise on several devices"
_less = wrapped(noise, "_normal", lambda normal, *a, **k: 0.9 * normal(*a, **k))
_cut = wrapped(noise, "_quantile", lambda quantile, p: jnp.maximum(quantile(p), -3.0))
OTHERS = {
    "nine tenths of the noise": (_less, SMALL),
    "noise without its tails": (_cut, SMALL),
    "small leaves that share one key": (wrapped(noise, "_draw", _one_key_for_small), SMALL),
    "steps that are not folded into the key": (_of_step(lambda step: 0 * step), SMALL),
    "noise that repeats every 1,000 steps": (_of_step(lambda step: step % 1000), SMALL),
    "steps that are rounded to float32": (
        _of_step(lambda step: step.astype(jnp.float32).astype(jnp.int32)),
        SMALL,
    ),
    "large leaves whose halves share noise": (wrapped(noise, "_normal", _first_half_twice), LARGE),
    "the same noise on all devices": (
        wrapped(
            noise,
            "_draw",
            lambda draw, keys, leaves, axes, step: draw(keys, leaves, [()] * len(axes), step),
        ),
        SPREAD,
    ),
    "shards that share noise and are not refused": (
        replaced(noise, "_check_shards", lambda *args: None),
        "collectives on several devices",
    ),
    "the noise of the mean on the sum": (
        wrapped(optimizers, "_stddev", lambda stddev, z, c: stddev(z, c) / 16),
        CANARY,
    ),
    "smoothing before the noise, which is less then": (_smoothing_before_noise, CANARY),
    "a rate that is a tenth too large": (_counts_at(1.1), POISSON),
    "batches that are cut too early": (
        replaced(_plan, "room_for_batch", lambda n, b, *args, **options: round(b) + 4),
        POISSON,
    ),
    "a shuffler in place of Poisson batches": (
        replaced(_plan, "PoissonSampler", _shuffler),
        POISSON,
    ),
    "the same batch in every step": (_at_step(lambda step: 0 * step), POISSON),
    "batches that repeat every 1,000 steps": (_at_step(lambda step: step % 1000), FIXED),
    "padding that repeats an example": (
        wrapped(_samplers, "subset", _padded_with_the_first),
        "likely mistakes",
    ),
    "leaves told apart by how they are written": (
        replaced(
            noise,
            "leaf_addresses",
            lambda tree: [
                jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)
            ],
        ),
        "likely mistakes",
    ),
    "a state that moves beyond the plan": (
        rewritten(_guards, "guarded", "jax.tree.map(keep, after, state)", "after", _plan),
        PLAN,
    ),
    "examples that come twice": (wrapped(_samplers, "subset", _with_repeats), FIXED),
    "a plan whose optimizer adds less noise": (
        wrapped(_plan, "privatize", _a_tenth_less),
        PLAN_NOISE,
    ),
    "a plan that claims half of its ε": (
        wrapped(_plan, "noise_and_epsilon", _half_of_epsilon),
        PLAN,
    ),
    "an accountant of half the steps": (
        wrapped(_accounts, "mechanism_of", _of_half_the_steps),
        PLAN,
    ),
    "steps beyond the plan": (replaced(_guards, "steps_taken", lambda state: 0), PLAN),
    "a budget that covers too many steps": (
        replaced(_spending.Spending, "remaining_steps", lambda self, ledger, step=0: self.steps),
        PLAN,
    ),
    "one key for sampler and noise": (
        replaced(PrivacyPlan, "derive_key", lambda self, key, label: _derive_key(self, key, "")),
        PLAN,
    ),
    "fresh keys that are made of the time": (
        replaced(_keys, "os", SimpleNamespace(urandom=lambda n: time.time_ns().to_bytes(n))),
        PLAN,
    ),
    "a plan that takes batches without their mask": (
        replaced(_plan, "with_mask", lambda gradient, *args: gradient),
        PLAN,
    ),
    "nine tenths of the discrete noise": (
        wrapped(
            discrete,
            "discrete_gaussian",
            lambda draw, stream, scale, size: draw(stream, round(0.9 * scale), size),
        ),
        "noise on a grid",
    ),
    "the last microbatch of a step counted twice": (
        rewritten(
            _step,
            "make_steps",
            "add(state.params, sums, chunk)",
            "add(state.params, add(state.params, sums, chunk)[0], chunk)",
            _run,
        ),
        "runs on neighbouring data",
    ),
    "a nonce that is no random number": (_nonce(lambda size: "00" * size), RUNS),
    "a nonce that is the time": (_nonce(lambda size: f"{time.time_ns():016x}"), RUNS),
    "a nonce that is the process": (_nonce(lambda size: f"{os.getpid():016x}"), RUNS),
    "a resumed run that uses its noise again": (_unnoticed, RUNS),
}
MUTATIONS = {name: Mutation(*facts) for name, facts in (WRONG_SUMS | OTHERS).items()}
