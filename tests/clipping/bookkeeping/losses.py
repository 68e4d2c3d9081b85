"""Losses that use their parameters in many ways, and the strategy that each leaf should get."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

N = 5
OUTER, GRAM, UNUSED = "outer product", "Gram matrices", "unused"
FORMED, NO_RULE = "materialised", "materialised, no rule"


class Case(NamedTuple):
    """A loss for one example, its parameters, a batch, and the expected strategy of each leaf."""

    loss: Any
    params: Any
    batch: Any
    strategies: tuple[str, ...] | None = None


def normal(*shape):
    """Return random numbers from NumPy; JAX would compile for each shape during collection."""
    return jax.device_put(np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32))


def squash(y):
    return jnp.sum(jnp.tanh(y) ** 2)


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum()


def through_stack(weights, x):
    for i in range(3):
        x = jnp.tanh(x @ weights[i])
    return jnp.sum(x)


IDS = jax.random.randint(jax.random.key(1), (N, 7), 0, 50)
TABLE = normal(50, 30)

LOSSES = {
    # matrix products
    "row": Case(lambda w, x: squash(x @ w), normal(20, 30), normal(N, 20), (OUTER,)),
    "row, left": Case(lambda w, x: squash(w @ x), normal(30, 20), normal(N, 20), (OUTER,)),
    "rows": Case(lambda w, x: squash(x @ w), normal(40, 50), normal(N, 3, 40), (GRAM,)),
    "rows, left": Case(lambda w, x: squash(w @ x.T), normal(50, 40), normal(N, 3, 40), (GRAM,)),
    "many rows": Case(lambda w, x: squash(x @ w), normal(6, 7), normal(N, 9, 6), (FORMED,)),
    "heads": Case(
        lambda w, x: squash(jnp.einsum("td,dhk->htk", x, w)),
        normal(40, 3, 14),
        normal(N, 4, 40),
        (GRAM,),
    ),
    "heads, out": Case(
        lambda w, x: squash(jnp.einsum("htk,hkd->td", x, w)),
        normal(3, 14, 40),
        normal(N, 3, 4, 14),
        (GRAM,),
    ),
    "batched": Case(
        lambda w, x: squash(jnp.einsum("gtp,gpq->gtq", x, w)),
        normal(3, 20, 21),
        normal(N, 3, 4, 20),
        (GRAM,),
    ),
    "batched rows": Case(
        lambda w, x: squash(jnp.einsum("gp,pgq->qg", x, w)),
        normal(14, 3, 16),
        normal(N, 3, 14),
        (OUTER,),
    ),
    "bilinear": Case(
        lambda w, x: squash(jnp.einsum("i,ijk,j->k", x, w, x)), normal(6, 6, 4), normal(N, 6)
    ),
    "inner map": Case(
        lambda p, x: squash(jax.vmap(lambda y: y @ p[0] + p[1])(x)),
        [normal(20, 30), normal(30)],
        normal(N, 3, 20),
        (GRAM, FORMED),
    ),
    "half the weights": Case(
        lambda w, x: squash(x @ w[:, :20]) + squash(x @ w[:, 20:]),
        normal(20, 60),
        normal(N, 4, 20),
        (GRAM,),
    ),
    "overlapping": Case(
        lambda w, x: squash(x @ w[:, :20]) + squash(x @ w[:, 10:30]),
        normal(20, 60),
        normal(N, 4, 20),
        (FORMED,),
    ),
    "part and whole": Case(
        lambda w, x: squash(x @ w) + squash(x[:, :10] @ w[:10]), normal(20, 60), normal(N, 4, 20)
    ),
    "reversed": Case(lambda w, x: squash(x @ w[::-1]), normal(20, 30), normal(N, 3, 20)),
    "reshaped": Case(
        lambda w, x: squash(x @ w.reshape(20, 30)) + squash(x @ w.reshape(30, 20).T),
        normal(600),
        normal(N, 3, 20),
    ),
    "stack by index": Case(through_stack, normal(3, 20, 20), normal(N, 4, 20), (GRAM,)),
    "concatenated": Case(
        lambda p, x: squash(x @ jnp.concatenate(p, 1)),
        [normal(20, 20), normal(20, 25)],
        normal(N, 4, 20),
        (GRAM, GRAM),
    ),
    "concatenated, then kept in place": Case(  # as a cast keeps all entries in their places
        lambda p, x: squash(x @ lax.optimization_barrier(jnp.concatenate(p, 1))),
        [normal(20, 20), normal(20, 25)],
        normal(N, 4, 20),
        (GRAM, GRAM),
    ),
    "concatenated with a constant": Case(
        lambda p, x: squash(
            x @ jnp.concatenate([p[0], lax.stop_gradient(p[0][:, :9]), p[1]], axis=1)
        ),
        [normal(20, 20), normal(20, 25)],
        normal(N, 4, 20),
    ),
    "concatenated, many rows": Case(
        lambda p, x: squash(x @ jnp.concatenate(p, 1)),
        [normal(6, 3), normal(6, 4)],
        normal(N, 9, 6),
        (FORMED, FORMED),
    ),
    "concatenated inputs": Case(
        lambda p, x: squash(x @ jnp.concatenate(p)),
        [normal(15, 20), normal(25, 20)],
        normal(N, 4, 40),
        (GRAM, GRAM),
    ),
    "concatenated with itself": Case(
        lambda w, x: squash(x @ jnp.concatenate([w, w], 1)), normal(20, 20), normal(N, 2, 20)
    ),
    # tied weights
    "tied": Case(
        lambda w, x: squash(jnp.tanh(x @ w) @ w.T), normal(40, 50), normal(N, 3, 40), (GRAM,)
    ),
    "tied square": Case(
        lambda w, x: squash(jnp.tanh(x @ w) @ w), normal(40, 40), normal(N, 40), (GRAM,)
    ),
    "tied embedding": Case(
        lambda w, i: cross_entropy(jnp.tanh(w[i]) @ w.T, i), normal(90, 60), IDS, (GRAM,)
    ),
    # embeddings
    "embedding": Case(lambda w, i: squash(w[i]), TABLE, IDS, (GRAM,)),
    "embedding of one": Case(lambda w, i: squash(w[i]), TABLE, IDS[:, 0]),
    "embedding, clipped": Case(
        lambda w, i: squash(jnp.take(w, i, axis=0, mode="clip")), TABLE, IDS + 45, (GRAM,)
    ),
    "embedding, filled": Case(
        lambda w, i: squash(jnp.take(w, i, axis=0, mode="fill", fill_value=0)),
        TABLE,
        IDS + 45,
        (GRAM,),
    ),
    "embedding, from the end": Case(lambda w, i: squash(w[i]), TABLE, IDS - 50, (GRAM,)),
    "embedding of constant positions": Case(
        lambda w, x: squash(w[jnp.array([3, 1, 3, -1])] + x), TABLE, normal(N, 4, 30), (GRAM,)
    ),
    "embedding along columns": Case(lambda w, i: squash(w[:, i]), TABLE, IDS[:, :3], (GRAM,)),
    "one-hot": Case(lambda w, i: squash(jax.nn.one_hot(i, 50) @ w), TABLE, IDS, (GRAM,)),
    "window of a table": Case(
        lambda w, i: squash(lax.dynamic_slice(w, (i[0], 0), (3, 30))), TABLE, IDS, (NO_RULE,)
    ),
    "expert": Case(lambda w, x: squash(x @ w[jnp.argmax(x[:4])]), normal(4, 20, 30), normal(N, 20)),
    # entrywise uses, and values that depend on parameters alone
    "bias and scale": Case(
        lambda p, x: squash(x * p[0] + p[1]),
        [normal(6), normal(6)],
        normal(N, 9, 6),
        (FORMED, FORMED),
    ),
    "one more than": Case(lambda w, x: squash(x * (1 + w)), normal(6), normal(N, 9, 6)),
    "threshold": Case(
        lambda w, x: squash(jnp.maximum(x, w)), normal(6), normal(N, 9, 6), (NO_RULE,)
    ),
    "normalised": Case(
        lambda w, x: squash(x @ (w / jnp.linalg.norm(w, axis=0))),
        normal(20, 30),
        normal(N, 4, 20),
        (FORMED,),
    ),
    "low rank": Case(
        lambda p, x: squash(x @ (p[0] + p[1] @ p[2])),
        [normal(20, 30), normal(20, 2), normal(2, 30)],
        normal(N, 4, 20),
    ),
    "regularised": Case(
        lambda w, x: squash(x @ w) + 0.1 * jnp.sum(w**2),
        normal(20, 30),
        normal(N, 4, 20),
        (NO_RULE,),
    ),
    "output": Case(lambda w, x: w[0] + jnp.sum(x), jnp.ones(3), normal(N, 6)),
    UNUSED: Case(
        lambda p, x: squash(x @ p[0]),
        [normal(20, 30), normal(3, 3)],
        normal(N, 20),
        (OUTER, UNUSED),
    ),
    "stopped": Case(
        lambda w, x: squash(x @ lax.stop_gradient(w)) + squash(x @ w),
        normal(20, 30),
        normal(N, 20),
        (OUTER,),
    ),
    "decided by a weight": Case(
        lambda w, x: jnp.where(jnp.sum(w) > 0, 1.0, 2.0) * squash(x @ w),
        normal(40, 50),
        normal(N, 3, 40),
        (GRAM,),
    ),
}
