"""Bookkeeping finds every use of a weight behind loops, branches and custom derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import optax_lsdp as lsdp

SIZE, NO_CLIP = 3, 1e6
MATRIX, VECTOR = (jax.random.normal(jax.random.key(n), (SIZE,) * n) for n in (2, 1))
BATCH = jax.random.normal(jax.random.key(3), (2, SIZE))


@jax.custom_vjp
def bent(w):
    """Return w; the backward pass clips its cotangent, so it is not linear."""
    return w


bent.defvjp(lambda w: (w, None), lambda _, g: (jnp.clip(g, -0.05, 0.05),))


def two_layers(w, x):
    return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w))


def loop(step, carry, x):
    """Return the sum over all outputs of a scan over the entries of x."""
    last, outputs = lax.scan(step, carry, x)
    return jnp.sum(outputs) + jnp.sum(jax.tree.leaves(last)[0])


def swapped(p, x):
    return loop(lambda c, y: ((c[1], c[0]), jnp.sum(c[0] * y)), (p, 2 * p), x)


def in_two_scans(p, x):
    def outer(carry, y):
        last, sums = lax.scan(lambda c, z: (p, jnp.sum(c * z)), carry, x)
        return last, jnp.sum(sums) * y

    return loop(outer, jnp.zeros(SIZE), x)


def handed_out_of_a_scan(p, x):
    def outer(carry, y):
        last, _ = lax.scan(lambda c, _: (c, None), p, None, length=2)
        return last, jnp.sum(carry * y)

    return loop(outer, jnp.zeros(SIZE), x)


def chosen_by_a_branch(p, x):
    def step(carry, y):
        return lax.cond(y > 0, lambda c: p, lambda c: c, carry), jnp.sum(carry * y)

    return loop(step, jnp.zeros(SIZE), x)


def in_a_while_loop(p, x):
    more = lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, p), (0, jnp.zeros(SIZE)))[1]
    return jnp.sum(lax.stop_gradient(more) * x * p)


def repeated(w, x, length, step):
    return lax.scan(lambda h, _: (step(h), None), x, None, length=length)[0]


def weight_in_an_empty_scan(w, x):
    last, h = repeated(w, (w, x), 0, lambda c: (2 * c[0], jnp.tanh(c[1] @ c[0])))
    return jnp.sum(jnp.tanh(h @ last) @ w)


def by_a_rule_and_without(w, x):
    return jnp.sum(jnp.tanh(x @ w)) + jnp.sum(jnp.sin(w) * x)


CARRIES = {
    "a weight leaves as the carry": lambda p, x: loop(
        lambda c, y: (p, jnp.sum(c * y)), jnp.zeros(SIZE), x
    ),
    "a view of a weight leaves as the carry": lambda p, x: loop(
        lambda c, y: (p[::-1], c * y), jnp.zeros(SIZE), x
    ),
    "a slice of a weight leaves as the carry": lambda p, x: loop(
        lambda c, y: (y[0], c * y[1]), jnp.zeros(()), (p, x)
    ),
    "two weights change places": swapped,
    "a nested scan hands a weight on": in_two_scans,
    "a nested scan returns a weight that it did not change": handed_out_of_a_scan,
    "a branch puts a weight into the carry": chosen_by_a_branch,
    "fori_loop": lambda p, x: jnp.sum(lax.fori_loop(0, 3, lambda i, c: p, jnp.zeros(SIZE)) * x),
    "while_loop": in_a_while_loop,
}
CUSTOM = {
    "twice": lambda w, x: two_layers(bent(w), x),
    "inside of jit": lambda w, x: two_layers(jax.jit(bent)(w), x),
    "inside of remat": lambda w, x: two_layers(jax.checkpoint(lambda w: 2 * bent(w))(w), x),
    "inside of a branch": lambda w, x: two_layers(lax.cond(w[0, 0] > 9, lambda w: w, bent, w), x),
    "inside of a map": lambda w, x: two_layers(lax.map(bent, w), x),
    "in every iteration": lambda w, x: jnp.sum(repeated(w, x, 3, lambda h: jnp.tanh(h @ bent(w)))),
    "by a rule and without one": lambda w, x: by_a_rule_and_without(bent(w), x),
}
EMPTY = {
    "beside another use": lambda w, x: jnp.sum(
        jnp.tanh(repeated(w, x, 0, lambda h: jnp.tanh(h @ w)) @ w)
    ),
    "of slices": lambda w, x: jnp.sum(
        jnp.tanh(lax.scan(lambda h, v: (h @ v, None), x, w[:0, :, None] * w[0])[0] @ w)
    ),
    "with a weight as its carry": weight_in_an_empty_scan,
    "around a scan": lambda w, x: jnp.sum(
        repeated(w, x, 0, lambda h: repeated(w, h, 2, lambda h: h @ w)) @ w
    ),
}
CASES = (
    {f"carry: {name}": (loss, VECTOR) for name, loss in CARRIES.items()}
    | {f"custom_vjp: {name}": (loss, MATRIX) for name, loss in CUSTOM.items()}
    | {f"empty scan: {name}": (loss, MATRIX) for name, loss in EMPTY.items()}
)


@pytest.fixture(scope="module")
def results():
    """Return norms and sums of all cases by both engines, compiled together."""

    @jax.jit
    def run(batch):
        def of_engine(engine):
            options = {"clip_norm": NO_CLIP, "engine": engine}
            return {
                name: lsdp.value_and_clipped_grad(loss, **options)(params, batch)
                for name, (loss, params) in CASES.items()
            }

        return of_engine("bookkeeping"), of_engine("vmap")

    with jax.numpy_dtype_promotion("strict"):
        return jax.device_get(run(BATCH))


@pytest.mark.parametrize("name", CASES)
def test_every_use_counts(name, results):
    (private, total), (expected, sums) = (engine[name] for engine in results)
    assert np.all(expected.norms > 0.1)
    np.testing.assert_allclose(private.norms, expected.norms, rtol=1e-5)
    np.testing.assert_allclose(total.value, sums.value, rtol=1e-5, atol=1e-5)
