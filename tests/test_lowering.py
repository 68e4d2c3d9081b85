"""Every transform lowers for CPU, CUDA and TPU; lowering needs none of these devices."""

import jax
import jax.export
import jax.numpy as jnp
import optax
import pytest

import optax_lsdp as lsdp
from optax_lsdp.correlation import banded_inverse, square_root

PARAMS = {"kernel": jnp.ones((3, 3, 2, 4)), "bias": jnp.ones(7)}
STACK = jax.tree.map(lambda x: jnp.ones((5, *x.shape)), PARAMS)
PRIVATE = dict(clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=4, key=jax.random.key(0))
TRANSFORMS = {
    "clip_per_example": (lsdp.clip_per_example(1.0), STACK),
    "add_gaussian_noise": (lsdp.add_gaussian_noise(1.0, key=jax.random.key(0)), PARAMS),
    "add_correlated_noise": (
        lsdp.add_correlated_noise(1.0, square_root(9, 3), key=jax.random.key(0)),
        PARAMS,
    ),
    "add_correlated_noise, inverse": (
        lsdp.add_correlated_noise(1.0, banded_inverse(9, 3), key=jax.random.key(0)),
        PARAMS,
    ),
    "laplacian_smooth": (lsdp.laplacian_smooth(1.0), PARAMS),
    "laplacian_smooth, tree": (lsdp.laplacian_smooth(1.0, scope="tree"), PARAMS),
    "laplacian_smooth, grid": (
        lsdp.laplacian_smooth(1.0, layout=lambda path, shape: lsdp.Grid((0,))),
        PARAMS,
    ),
    **{
        f"laplacian_smooth, {method}": (
            lsdp.laplacian_smooth(0.1, method=method, boundary="neumann"),
            jnp.ones(300),
        )
        for method in ("recursive", "halo", "banded", "matrix", "fft")
    },
    "laplacian_smooth, order 2": (lsdp.laplacian_smooth(1.0, order=2), PARAMS),
    "dp_sgd": (lsdp.dp_sgd(0.1, **PRIVATE), STACK),
    "dp_lssgd": (lsdp.dp_lssgd(0.1, **PRIVATE), STACK),
    "dp_adam": (lsdp.dp_adam(0.1, **PRIVATE), STACK),
    "dp_lsadam": (lsdp.dp_lsadam(0.1, **PRIVATE), STACK),
    "privatize": (lsdp.privatize(optax.sgd(0.1), smoothing=lambda step: 1.0, **PRIVATE), STACK),
    "privatize, auto": (lsdp.privatize(optax.sgd(0.1), smoothing="auto", **PRIVATE), STACK),
}


def lowers(function, *args):
    exported = jax.export.export(jax.jit(function), platforms=["cpu", "cuda", "tpu"])(*args)
    return set(exported.platforms) == {"cpu", "cuda", "tpu"}


@pytest.fixture(autouse=True)
def _strict_promotion():
    """Override the strict fixture: Optax's own Adam divides by an int32 step."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize(("tx", "updates"), TRANSFORMS.values(), ids=list(TRANSFORMS))
def test_every_transform_lowers(tx, updates):
    assert lowers(lambda u: tx.update(u, tx.init(PARAMS), PARAMS)[0], updates)


def test_auto_needs_no_fourier_transform_on_a_tpu():
    tx, updates = TRANSFORMS["privatize, auto"]

    def text(tx):
        step = jax.jit(lambda u: tx.update(u, tx.init(PARAMS), PARAMS))
        return jax.export.export(step, platforms=["tpu"])(updates).mlir_module()

    assert "stablehlo.fft" not in text(tx)
    fourier = lsdp.laplacian_smooth("auto", stddev=1.0, method="fft")
    assert "stablehlo.fft" in text(optax.chain(TRANSFORMS["clip_per_example"][0], fourier))


@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_clipped_grad_lowers(microbatch_size):
    def loss(params, x):
        return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, params, x)))

    grad = lsdp.value_and_clipped_grad(loss, clip_norm=1.0, microbatch_size=microbatch_size)
    assert lowers(grad, PARAMS, STACK, jnp.ones(5, bool))
