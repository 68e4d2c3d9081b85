"""Our own pipeline, broken in one way at a time: an audit rejects each, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lsdp as lsdp
from optax_lsdp.auditing import audit_noise, audit_sampler, audit_sensitivity
from optax_lsdp.sampling import FixedSizeSampler, UnamplifiedShuffle
from optax_lsdp.smoothing import ring_beta

SIZE, CLIP, NOISE = 16, 1.0, 2.0
KEY = jax.random.key(7)
PARAMS = {
    "first": jax.random.normal(jax.random.key(1), (8, 6)),
    "second": jax.random.normal(jax.random.key(2), (6, 6)),
    "bias": jnp.zeros(6),
}
BATCH = {
    "x": jax.random.normal(jax.random.key(3), (SIZE, 8)),
    "y": jax.random.normal(jax.random.key(4), (SIZE, 6)),
}


def loss(params, example):
    hidden = jnp.tanh(example["x"] @ params["first"] + params["bias"])
    return jnp.sum((hidden @ params["second"] - example["y"]) ** 2)


def tied_loss(params, example):
    """One square matrix, used twice."""
    hidden = jnp.tanh(example["y"] @ params["second"])
    return jnp.sum((hidden @ params["second"] - example["y"]) ** 2)


def clipped(batch, mask, engine="bookkeeping", loss_fn=loss):
    gradient = lsdp.clipped_grad(loss_fn, clip_norm=CLIP, engine=engine)
    link = lsdp.clip_per_example(CLIP)
    return link.update(gradient(PARAMS, batch, mask), link.init(PARAMS), PARAMS)[0]


def norm_of(tree):
    return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)))


def masked_sum(stacked, mask, factors=None):
    weights = mask.astype(jnp.float32) * (1.0 if factors is None else factors)
    return jax.tree.map(lambda x: jnp.einsum("n,n...->...", weights, x), stacked)


def per_example(batch, loss_fn=loss):
    return jax.vmap(jax.grad(loss_fn), (None, 0))(PARAMS, batch)


def sensitivity(release, declared=CLIP, seed=0, **options):
    key = jax.random.key(seed)
    return audit_sensitivity(release, BATCH, declared=declared, searches=12, key=key, **options)


def clips_the_mean(batch, mask):
    mean = jax.tree.map(lambda x: x / SIZE, masked_sum(per_example(batch), mask))
    return jax.tree.map(lambda x: x / jnp.maximum(1, norm_of(mean) / CLIP), mean)


def has_norms_in_half_precision(batch, mask):
    stacked = per_example(batch)
    half = jax.tree.map(lambda x: x.astype(jnp.float16), stacked)
    norms = jax.vmap(norm_of)(half).astype(jnp.float32)
    return masked_sum(stacked, mask, jnp.minimum(1, CLIP / jnp.maximum(norms, 1e-12)))


def divides_by_what_came(batch, mask):
    return jax.tree.map(
        lambda x: x / jnp.maximum(mask.astype(x.dtype).sum(), 1), clipped(batch, mask)
    )


def forgets_the_mask(batch, mask):
    return clipped(batch, jnp.ones_like(mask))


def keeps_nan(batch, mask):
    stacked = per_example(batch)
    factors = jnp.minimum(1, CLIP / jnp.maximum(jax.vmap(norm_of)(stacked), 1e-12))
    return masked_sum(stacked, mask, factors)


def counts_a_tied_weight_once(batch, mask):
    stacked = per_example(batch, tied_loss)

    def last_use(params, example):
        hidden = jax.lax.stop_gradient(jnp.tanh(example["y"] @ params["second"]))
        return jnp.sum((hidden @ params["second"] - example["y"]) ** 2)

    norms = jax.vmap(norm_of)(per_example(batch, last_use))
    finite = jax.vmap(lambda tree: jnp.isfinite(norm_of(tree)))(stacked)
    stacked = jax.tree.map(
        lambda x: jnp.where(finite.reshape(-1, *(1,) * (x.ndim - 1)), x, 0), stacked
    )
    factors = jnp.where(finite, jnp.minimum(1, CLIP / jnp.maximum(norms, 1e-12)), 0)
    return masked_sum(stacked, mask, factors)


def normalises_by_the_batch(batch, mask):
    weights = mask.astype(jnp.float32)[:, None]
    x = jnp.where(mask[:, None], jnp.nan_to_num(batch["x"], posinf=0, neginf=0), 0)
    count = jnp.maximum(weights.sum(), 1)
    mean = (weights * x).sum(0) / count
    deviation = jnp.sqrt((weights * (x - mean) ** 2).sum(0) / count) + 1e-3
    return clipped({**batch, "x": (x - mean) / deviation}, mask)


@pytest.mark.parametrize(
    ("release", "declared"),
    [
        (clips_the_mean, CLIP / SIZE),
        (has_norms_in_half_precision, CLIP),
        (divides_by_what_came, CLIP / SIZE),
        (forgets_the_mask, CLIP),
        (keeps_nan, CLIP),
        (counts_a_tied_weight_once, CLIP),
        (normalises_by_the_batch, CLIP),
    ],
)
def test_a_wrong_sensitivity_is_found(release, declared):
    report = sensitivity(release, declared)
    assert not report and "REJECTED" in str(report)


@pytest.mark.parametrize("engine", ["bookkeeping", "vmap"])
@pytest.mark.parametrize("loss_fn", [loss, tied_loss])
@pytest.mark.parametrize(
    ("neighbouring", "declared"),
    [("add_remove", CLIP), pytest.param("replace_one", 2 * CLIP, marks=pytest.mark.full)],
)
def test_clipping_has_the_sensitivity_that_it_declares(engine, loss_fn, neighbouring, declared):
    report = sensitivity(
        lambda batch, mask: clipped(batch, mask, engine, loss_fn),
        declared,
        neighbouring=neighbouring,
    )
    assert report, str(report)
    assert report.largest > 0.5 * declared  # it sees something


@pytest.mark.parametrize("make", [lsdp.dp_sgd, lsdp.dp_lssgd])
def test_whole_steps_have_the_sensitivity_that_they_declare(make):
    """Noise is the same on both sides, and cancels; smoothing makes no distance larger."""
    options = {"smoothing": 1.0} if make is lsdp.dp_lssgd else {}
    optimizer = make(
        1.0,
        clip_norm=CLIP,
        noise_multiplier=NOISE,
        expected_batch_size=SIZE,
        key=KEY,
        **options,
    )
    gradient = lsdp.clipped_grad(loss, clip_norm=CLIP)

    def release(batch, mask):
        return optimizer.update(gradient(PARAMS, batch, mask), optimizer.init(PARAMS), PARAMS)[0]

    report = sensitivity(release, CLIP / SIZE)
    assert report, str(report)


ZEROS = jax.tree.map(jnp.zeros_like, PARAMS)


def library_noise(deviation, key=KEY):
    link = lsdp.add_gaussian_noise(deviation, key=key)
    return jax.jit(lambda step: link.update(ZEROS, link.init(PARAMS)._replace(step=step))[0])


def draw(deviation, leaf_key):
    """Return noise of our own making, leaf by leaf."""

    @jax.jit
    def release(step):
        key = jax.random.fold_in(KEY, step)
        keys = (leaf_key(key, number) for number in range(len(PARAMS)))
        leaves, structure = jax.tree.flatten(PARAMS)
        noise = [
            deviation * jax.random.normal(key, x.shape) for key, x in zip(keys, leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, noise)

    return release


def resumed(renewed):
    """Sixteen steps; then it falls back to the eighth, on other data."""
    first = library_noise(NOISE * CLIP)
    second = library_noise(NOISE * CLIP, jax.random.key(8) if renewed else KEY)
    return lambda step: first(step) if step < 16 else second(step - 8)


GOOD = library_noise(NOISE * CLIP)


def on_every_device(step):
    """Return noise of which both halves are the same, as if two devices had one key."""
    half = GOOD(step)["first"][:4]
    return {"first": jnp.concatenate([half, half])}


BROKEN = {
    "nine tenths of it": library_noise(0.9 * NOISE * CLIP),
    "that of the mean on the sum": library_noise(NOISE * CLIP / SIZE),
    "one key for all leaves": draw(NOISE * CLIP, lambda key, number: key),
    "the same in every step": lambda step: GOOD(0),
    "less of it since it is smoothed": library_noise(
        float(np.sqrt(ring_beta(1.0, 48))) * NOISE * CLIP
    ),
    "used again after a fall": resumed(renewed=False),
    "the same on every device": on_every_device,
    "uniform": lambda step: jax.tree.map(
        lambda x: (
            NOISE * (12**0.5) * (jax.random.uniform(jax.random.fold_in(KEY, step), x.shape) - 0.5)
        ),
        PARAMS,
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_wrong_noise_is_found(name):
    report = audit_noise(BROKEN[name], scale=NOISE * CLIP)
    assert not report and "REJECTED" in str(report)


@pytest.mark.parametrize("seed", range(5))
def test_the_noise_of_the_library_passes(seed):
    report = audit_noise(library_noise(NOISE * CLIP, jax.random.key(seed)), scale=NOISE * CLIP)
    assert report, str(report)
    assert audit_noise(draw(NOISE * CLIP, jax.random.fold_in), scale=NOISE * CLIP)


def test_a_run_that_goes_on_with_another_key_passes():
    report = audit_noise(resumed(renewed=True), scale=NOISE * CLIP)
    assert report, str(report)


COUNT, RATE = 1000, 0.05


@pytest.mark.parametrize("claim", ["poisson", "without_replacement"])
def test_a_shuffler_is_found(claim):
    shuffler = UnamplifiedShuffle(COUNT, 50, KEY)
    report = audit_sampler(shuffler, dataset_size=COUNT, sampling_rate=RATE, sampling=claim)
    assert not report and "REJECTED" in str(report)


@pytest.mark.parametrize("seed", range(5))
def test_the_samplers_of_the_library_pass_as_what_they_are_alone(seed):
    key = jax.random.key(seed)
    samplers = {
        "poisson": lsdp.PoissonSampler(COUNT, RATE, key),
        "without_replacement": FixedSizeSampler(COUNT, 50, key),
    }
    for kind, sampler in samplers.items():
        for claim in samplers:
            report = audit_sampler(sampler, dataset_size=COUNT, sampling_rate=RATE, sampling=claim)
            assert bool(report) == (kind == claim), str(report)
    tilted = lsdp.PoissonSampler(COUNT, 1.1 * RATE, key)
    assert not audit_sampler(tilted, dataset_size=COUNT, sampling_rate=RATE)
