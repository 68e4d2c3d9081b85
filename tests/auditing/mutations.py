"""The table of bugs planted in the library's own code: each has an audit that must reject it.

`MUTATIONS` maps what is broken to the audit and the place; see `Mutation`. Bugs in clipping are in
`mutations_of_clipping.py`, and bugs in correlated noise in `mutations_of_correlation.py`.
`benchmarks/_planted.py` breaks pipelines that are built for the purpose instead.
"""

import os
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace as with_changes
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lsdp.sampling import ShuffledSampler
from optax_lsdp.smoothing import ring_beta
from tests.auditing._patches import Mutation, Patch, StaleMutation, replace, rewrite, wrap
from tests.auditing.mutations_of_clipping import MUTATIONS_OF_CLIPPING
from tests.auditing.mutations_of_correlation import MUTATIONS_OF_CORRELATION

NOISE, KEYS, OPTIMIZERS = "optax_lsdp.noise", "optax_lsdp._keys", "optax_lsdp.optimizers"
SAMPLERS = "optax_lsdp.sampling"
PLANNING, TRAINING = "optax_lsdp.planning", "optax_lsdp.training"


def fold_in_of_step(change):
    """Change the step before it is folded into a key; steps are int32 scalars."""

    def folded(fold_in, key, data):
        is_step = getattr(data, "dtype", None) == jnp.int32 and jnp.ndim(data) == 0
        return fold_in(key, change(data) if is_step else data)

    return wrap("jax.random:fold_in", folded)


def _nine_tenths(draw, *args, **options):
    return 0.9 * draw(*args, **options)


def _cut_at_three(quantile, p):
    return jnp.maximum(quantile(p), -3.0)


_ONE_KEY_FOR_SMALL = "keys[np.asarray(members) * (first.size > 1000)]"


def _first_half_twice(normal, keys, shape, dtype):
    drawn = normal(keys, shape, dtype)
    half = shape[0] // 2 if shape else 0
    if drawn.ndim != len(shape) or half < 40:
        return drawn
    return jnp.concatenate([drawn[:half], drawn[: shape[0] - half]])


def _without_axes(draw, state, total):
    return draw(state, total._replace(axes=[()] * len(total.axes)))


def _paths_as_text(tree):
    return [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]


def _with_smoothing_first(module):
    def chain(clip, noise, scale, smooth, *rest):
        return module.chain(clip, smooth, noise, scale, *rest)

    return SimpleNamespace(**{**vars(optax), "chain": chain})


def _as_small_as_smoothed(stddev, *args):
    return float(np.sqrt(ring_beta(1.0, 4))) * stddev(*args)


def _rate_times(factor):
    def change(counts):  # a cached property
        return property(
            lambda self: counts.func(with_changes(self, sampling_rate=factor * self.sampling_rate))
        )

    return Patch(f"{SAMPLERS}:PoissonSampler._cumulative", change)


def _shuffler(dataset_size, rate, key, **options):
    return ShuffledSampler(dataset_size, round(rate * dataset_size), key)


def _padded_with_the_first(subset, *args):
    batch = subset(*args)
    return batch._replace(indices=np.where(batch.mask, batch.indices, 0))


def _with_repeats(subset, bits, dataset_size, count, room, size):
    found = subset(bits, dataset_size, count, room, size)
    return found._replace(indices=bits.indices(dataset_size, size))


def bits_of_step(change):
    """Change the step before a sampler draws random bits for it."""

    def change_init(init):
        return lambda self, key, step: init(self, key, change(step))

    return Patch(f"{SAMPLERS}:RandomBits.__init__", change_init)


def _with_less_noise(privatize, *args, noise_multiplier, **options):
    return privatize(*args, noise_multiplier=0.9 * noise_multiplier, **options)


def _half_of_epsilon(noise_and_epsilon, *args, epsilon, **options):
    multiplier, found = noise_and_epsilon(*args, epsilon=epsilon, **options)
    return multiplier, found / 2 if epsilon is None else found


def _of_half_the_steps(with_noise, unit, multiplier):
    found = with_noise(unit, multiplier)
    return type(found)(tuple(with_changes(p, steps=-(-p.steps // 2)) for p in found.phases))


def _without_label(derive_key):
    return lambda self, key, label: derive_key(self, key, "")


def _one_user_per_example(value_and_clipped_grad, *args, **options):
    gradient = value_and_clipped_grad(*args, **options)

    def flat(params, users, mask):
        present = (users.mask & mask[:, None]).reshape(-1)
        slots = jax.tree.map(lambda x: x.reshape(-1, 1, *x.shape[2:]), users[:2])
        return gradient(params, slots, present)

    return flat


def _drawn_as(token_hex):
    return replace(f"{TRAINING}._journal:secrets", SimpleNamespace(token_hex=token_hex))


SMALL, LARGE, ON_DEVICES = "noise", "noise of large leaves", "noise on several devices"
CANARY = "a step of DP-LSSGD with and without a canary"
POISSON, FIXED, MISTAKES = "Poisson sampler", "fixed-size sampler", "likely mistakes"
PLAN, PLAN_NOISE, RUNS = "a plan", "noise of a plan's optimizer", "resumed runs"
USERS = "a step of fit with and without a user"
MUTATIONS = (
    MUTATIONS_OF_CLIPPING
    | MUTATIONS_OF_CORRELATION
    | {
        "nine tenths of the noise": Mutation(
            SMALL, (wrap(f"{NOISE}:standard_normal", _nine_tenths),)
        ),
        "noise without its lower tail": Mutation(
            SMALL, (wrap(f"{KEYS}:_quantile", _cut_at_three),)
        ),
        "one key for all small leaves": Mutation(
            SMALL, rewrite(f"{NOISE}:draw_noise", "keys[np.asarray(members)]", _ONE_KEY_FOR_SMALL)
        ),
        "the same noise in every step": Mutation(SMALL, (fold_in_of_step(lambda step: 0 * step),)),
        "noise that repeats every 1,000 steps": Mutation(
            SMALL, (fold_in_of_step(lambda step: step % 1000),)
        ),
        "steps rounded to float32": Mutation(
            SMALL, (fold_in_of_step(lambda step: step.astype(jnp.float32).astype(jnp.int32)),)
        ),
        "the same noise in both halves of large leaves": Mutation(
            LARGE, (wrap(f"{NOISE}:standard_normal", _first_half_twice),)
        ),
        "the same noise on all devices": Mutation(
            ON_DEVICES, (wrap(f"{NOISE}:draw_noise", _without_axes),)
        ),
        "shards that share noise accepted": Mutation(
            "collectives on several devices",
            (replace(f"{NOISE}:_check_shards", lambda *args: None),),
        ),
        "noise keys from paths as text": Mutation(
            MISTAKES, (replace(f"{NOISE}:leaf_addresses", _paths_as_text),)
        ),
        "noise for the mean added to the sum": Mutation(
            CANARY, (wrap(f"{OPTIMIZERS}:_product", lambda stddev, *args: stddev(*args) / 16),)
        ),
        "smoothing before less noise": Mutation(
            CANARY,
            (
                Patch(f"{OPTIMIZERS}:optax", _with_smoothing_first),
                wrap(f"{OPTIMIZERS}:_product", _as_small_as_smoothed),
            ),
        ),
        "nine tenths of the discrete noise": Mutation(
            "discrete noise",
            (
                wrap(
                    "optax_lsdp.discrete._quantized:discrete_gaussian",
                    lambda draw, stream, scale, size: draw(stream, round(0.9 * scale), size),
                ),
            ),
        ),
        "a sampling rate that is 10 % too large": Mutation(POISSON, (_rate_times(1.1),)),
        "Poisson batches that are cut too early": Mutation(
            POISSON,
            (
                replace(
                    f"{PLANNING}._plan:room_for_batch", lambda n, b, *args, **options: round(b) + 4
                ),
            ),
        ),
        "shuffled batches in place of Poisson batches": Mutation(
            POISSON, (replace(f"{PLANNING}._plan:samplers.PoissonSampler", _shuffler),)
        ),
        "the same batch in every step": Mutation(POISSON, (bits_of_step(lambda step: 0 * step),)),
        "batches that repeat every 1,000 steps": Mutation(
            FIXED, (bits_of_step(lambda step: step % 1000),)
        ),
        "batches with repeated examples": Mutation(
            FIXED, (wrap(f"{SAMPLERS}:subset", _with_repeats),)
        ),
        "padding that repeats an example": Mutation(
            MISTAKES, (wrap(f"{SAMPLERS}:subset", _padded_with_the_first),)
        ),
        "a plan whose optimizer adds less noise": Mutation(
            PLAN_NOISE, (wrap(f"{PLANNING}._plan:privatize", _with_less_noise),)
        ),
        "a plan that claims half of its ε": Mutation(
            PLAN, (wrap(f"{PLANNING}._plan:noise_and_epsilon", _half_of_epsilon),)
        ),
        "an accountant that counts half of the steps": Mutation(
            PLAN, (wrap(f"{PLANNING}._budget:with_noise", _of_half_the_steps),)
        ),
        "steps beyond the plan accepted": Mutation(
            PLAN, (replace(f"{PLANNING}._guards:steps_taken", lambda state: 0),)
        ),
        "an optimizer state that changes beyond the plan": Mutation(
            PLAN,
            rewrite(
                f"{PLANNING}._guards:_if_planned",
                "jax.tree.map(_cast, state, like_state)",
                "take_step()[1]",
            ),
        ),
        "a budget that covers too many steps": Mutation(
            PLAN,
            (
                replace(
                    f"{PLANNING}:PrivacyPlan.remaining_steps",
                    lambda self, ledger, step=0, **options: self.steps,
                ),
            ),
        ),
        "one key for sampler and noise": Mutation(
            PLAN, (Patch(f"{PLANNING}:PrivacyPlan.derive_key", _without_label),)
        ),
        "fresh keys made from the time": Mutation(
            PLAN,
            (
                replace(
                    "optax_lsdp._keys:os",
                    SimpleNamespace(urandom=lambda n: time.time_ns().to_bytes(n)),
                ),
            ),
        ),
        "a plan that accepts batches without a mask": Mutation(
            PLAN, (replace(f"{PLANNING}._plan:require_mask", lambda gradient, *args: gradient),)
        ),
        "the last microbatch of a step counted twice": Mutation(
            "a step of fit on neighbouring data",
            rewrite(
                f"{TRAINING}._step:make_step",
                "(total, loss_sum), _ = add_microbatch(state, sums, microbatch)",
                "(total, loss_sum), _ = add_microbatch(state, "
                "add_microbatch(state, sums, microbatch)[0], microbatch)",
            ),
        ),
        "a constant nonce": Mutation(RUNS, (_drawn_as(lambda size: "00" * size),)),
        "a nonce made from the time": Mutation(
            RUNS, (_drawn_as(lambda size: f"{time.time_ns():016x}"),)
        ),
        "a nonce made from the process number": Mutation(
            RUNS, (_drawn_as(lambda size: f"{os.getpid():016x}"),)
        ),
        "examples of users clipped one by one": Mutation(
            USERS, (wrap(f"{PLANNING}._plan:value_and_clipped_grad", _one_user_per_example),)
        ),
        "gradients of users summed and not averaged": Mutation(
            USERS,
            rewrite(
                "optax_lsdp._loss:average_examples",
                " / jnp.maximum(mask.sum(dtype=wide.dtype), 1)",
                "",
                f"{TRAINING}._fit",
            ),
        ),
        "averages of users that count padding": Mutation(
            USERS,
            rewrite(
                "optax_lsdp._loss:average_examples",
                "jnp.maximum(mask.sum(dtype=wide.dtype), 1)",
                "len(mask)",
                f"{TRAINING}._fit",
            ),
        ),
        "a resumed run that reuses noise on other data": Mutation(
            RUNS,
            (
                replace(f"{TRAINING}._resume:compute_fingerprint", lambda *args, **options: {}),
                replace(f"{TRAINING}._journal:Journal.differs", lambda *args, **options: False),
            ),
        ),
    }
)


def prepare(name):
    """Return a context for each patch of a mutation; an error names a stale entry."""
    try:
        return [patch.prepare() for patch in MUTATIONS[name].patches]
    except StaleMutation as error:
        raise StaleMutation(f"The mutation {name!r} is stale: {error}. Update it.") from error


@contextmanager
def planted(name):
    """Plant a bug while the context lasts, and forget compiled functions before and after."""
    contexts = prepare(name)
    jax.clear_caches()
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
    jax.clear_caches()
