"""Losses that use their parameters inside calls, loops and branches, and in convolutions."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.clipping.bookkeeping.losses import FORMED, GRAM, NO_RULE, OUTER, Case, N, normal, squash


def conv(x, kernel, stride=1, **kwargs):
    rank = kernel.ndim - 2
    numbers = {1: "W", 2: "HW", 3: "DHW"}[rank]
    kwargs = {"dimension_numbers": (f"N{numbers}C", f"{numbers}IO", f"N{numbers}C"), **kwargs}
    strides = (stride,) * rank if isinstance(stride, int) else stride
    return lax.conv_general_dilated(x, kernel, strides, **{"padding": "SAME", **kwargs})


def recurrent(params, x):
    def step(h, x):
        return jnp.tanh(x @ params[0] + h @ params[1] + params[2]), None

    return jnp.sum(lax.scan(step, jnp.zeros(20), x)[0])


def scanned(params, x, **kwargs):
    return jnp.sum(lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params, **kwargs)[0])


def scan_of_concatenated(stacks, x, pieces):
    def step(h, slices):
        return jnp.tanh(h @ jnp.concatenate(pieces(slices), 1)), None

    return squash(lax.scan(step, x, stacks)[0])


def carried(w, x, change=1.0):
    def step(carry, x):
        return (carry[0] * change if change != 1 else carry[0], jnp.tanh(x @ carry[0])), None

    (last, h), _ = lax.scan(step, (w, jnp.zeros(20)), x)
    return squash(h @ last)


def nested(params, x):
    def outer(h, w):
        return lax.scan(lambda c, y: (jnp.tanh(c @ w + y @ params[1]), c), h, x)[0], None

    return jnp.sum(lax.scan(jax.checkpoint(outer), jnp.zeros(20), params[0])[0])


def branching(params, x):
    def one(x):
        return squash(x @ params[0])

    def other(x):
        return jnp.sum(jnp.sin(x @ params[1]) @ params[2])

    return lax.cond(x[0, 0] > 0, one, other, x)


def branching_in_scan(w, x):
    def step(h, y):
        return lax.cond(y[0] > 0, lambda h: jnp.tanh(h @ w), lambda h: jnp.tanh(w @ y), h), None

    return jnp.sum(lax.scan(step, jnp.ones(20), x)[0])


@jax.custom_jvp
def odd_product(w, x):
    return jnp.sin(x @ w)


@odd_product.defjvp
def _(primals, tangents):
    (w, x), (dw, dx) = primals, tangents
    return odd_product(w, x), 2 * (x @ dw) + dx @ w


@jax.custom_vjp
def tripled(w, x):
    return x @ w


tripled.defvjp(lambda w, x: (x @ w, (w, x)), lambda r, g: (3 * r[1].T @ g, g @ r[0].T))

LOSSES = {
    # structure
    "jit": Case(
        lambda w, x: jnp.sum(jax.jit(lambda x, w: jnp.tanh(x @ w.T.T))(x, w)),
        normal(40, 50),
        normal(N, 3, 40),
        (GRAM,),
    ),
    "jit returns a weight": Case(
        lambda w, x: squash(x @ jax.jit(lambda w: w.T)(w)),
        normal(50, 40),
        normal(N, 3, 40),
        (GRAM,),
    ),
    "remat": Case(
        lambda w, x: jnp.sum(jax.checkpoint(lambda x: jnp.tanh(jnp.tanh(x @ w) @ w.T))(x)),
        normal(40, 50),
        normal(N, 3, 40),
        (GRAM,),
    ),
    "remat returns a weight": Case(
        lambda w, x: squash(x @ jax.checkpoint(lambda w: 2 * w)(w)),
        normal(20, 30),
        normal(N, 3, 20),
    ),
    "custom_jvp": Case(
        lambda w, x: squash(odd_product(w, x)), normal(6, 30), normal(N, 3, 6), (NO_RULE,)
    ),
    "custom_vjp": Case(
        lambda w, x: squash(tripled(w, x)), normal(6, 30), normal(N, 3, 6), (NO_RULE,)
    ),
    "cond": Case(branching, [normal(40, 50), normal(40, 50), normal(50)], normal(N, 3, 40)),
    "cond in scan": Case(branching_in_scan, normal(20, 20), normal(N, 6, 20)),
    "while without gradient": Case(
        lambda w, x: (
            squash(x @ w)
            + lax.stop_gradient(
                lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] @ w), (0, x))[1].sum()
            )
        ),
        normal(20, 20) / 9,
        normal(N, 20),
    ),
    "recurrent": Case(
        recurrent,
        [normal(20, 20) / 4, normal(20, 20) / 4, normal(20)],
        normal(N, 4, 20),
        (GRAM, GRAM, FORMED),
    ),
    "layers in a scan": Case(scanned, normal(3, 20, 20), normal(N, 2, 20), (GRAM,)),
    "layers in a scan, rows": Case(scanned, normal(3, 20, 20), normal(N, 20), (OUTER,)),
    "layers in a scan, backwards": Case(
        lambda w, x: scanned(w, x, reverse=True), normal(3, 20, 20), normal(N, 20), (OUTER,)
    ),
    "layers in a scan, moved": Case(
        lambda w, x: scanned(w.transpose(2, 0, 1), x), normal(20, 20, 3), normal(N, 20), (OUTER,)
    ),
    "layers in two scans": Case(
        lambda w, x: scanned(
            w.swapaxes(1, 2), lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0]
        ),
        normal(3, 20, 20),
        normal(N, 20),
        (GRAM,),
    ),
    "concatenated layers in a scan": Case(
        lambda p, x: scan_of_concatenated(p, x, lambda slices: slices),
        [normal(3, 20, 8), normal(3, 20, 12)],
        normal(N, 2, 20),
    ),
    "a layer in a scan, concatenated with a shared one": Case(
        lambda p, x: scan_of_concatenated(p[:1], x, lambda slices: [p[1], *slices]),
        [normal(3, 20, 12), normal(20, 8)],
        normal(N, 2, 20),
    ),
    "a shared layer, concatenated with one in a scan": Case(
        lambda p, x: scan_of_concatenated(p[:1], x, lambda slices: [*slices, p[1]]),
        [normal(3, 20, 12), normal(20, 8)],
        normal(N, 2, 20),
    ),
    "layers scanned and closed over": Case(
        lambda w, x: jnp.sum(lax.scan(lambda h, v: (jnp.tanh(h @ v + h @ w[0]), None), x, w)[0]),
        normal(3, 20, 20),
        normal(N, 20),
    ),
    "derived in a scan": Case(
        lambda p, x: jnp.sum(lax.scan(lambda h, w: (jnp.tanh(h @ (w * p[1])), None), x, p[0])[0]),
        [normal(3, 20, 20), normal(20, 20)],
        normal(N, 20),
    ),
    "weight in the carry": Case(carried, normal(20, 20) / 4, normal(N, 2, 20)),
    "weight changed in the carry": Case(
        lambda w, x: carried(w, x, change=0.5), normal(20, 20) / 4, normal(N, 2, 20)
    ),
    "first state": Case(
        lambda h, x: jnp.sum(lax.scan(lambda h, x: (jnp.tanh(x + h), None), h, x)[0]),
        normal(20),
        normal(N, 4, 20),
    ),
    "scan in remat in scan": Case(nested, [normal(3, 20, 20), normal(20, 20)], normal(N, 2, 20)),
    "fori_loop": Case(
        lambda w, x: jnp.sum(lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ w[i]), x)),
        normal(3, 20, 20),
        normal(N, 20),
    ),
    "gradient inside": Case(
        lambda w, x: jnp.sum(jax.grad(lambda x: squash(x @ w))(x) ** 2),
        normal(20, 30),
        normal(N, 20),
    ),
}

IMAGES = normal(N, 6, 6, 4)
CONVOLUTIONS = {
    "1-d": (normal(3, 4, 8), normal(N, 7, 4), {}),
    "1-d, stride, dilation": (normal(3, 4, 8), normal(N, 9, 4), dict(stride=2, rhs_dilation=(2,))),
    "2-d": (normal(3, 2, 4, 8), IMAGES, {}),
    "2-d, strides, padding": (
        normal(3, 2, 4, 8),
        IMAGES,
        dict(stride=(2, 1), padding=[(1, 2), (0, 3)]),
    ),
    "2-d, cropped at the end": (
        normal(3, 2, 4, 8),
        IMAGES,
        dict(stride=2, padding=[(1, 1), (0, -1)]),
    ),
    "2-d, transposed": (
        normal(3, 2, 4, 8),
        IMAGES,
        dict(padding=[(2, 2), (2, 1)], lhs_dilation=(2, 3)),
    ),
    "2-d, groups": (normal(3, 3, 2, 8), IMAGES, dict(feature_group_count=2)),
    "2-d, depthwise": (normal(3, 3, 1, 12), IMAGES, dict(feature_group_count=4)),
    "2-d, wide window": (normal(9, 9, 3, 5), normal(N, 10, 10, 3), {}),  # more than 64 offsets
    "2-d, Gram": (normal(3, 3, 40, 40), normal(N, 2, 2, 40), {}),
    "2-d, Gram, groups": (normal(3, 3, 20, 40), normal(N, 2, 2, 40), dict(feature_group_count=2)),
    "2-d, other layout": (
        normal(8, 4, 3, 3),
        normal(N, 4, 6, 6),
        dict(dimension_numbers=("NCHW", "OIHW", "NCHW")),
    ),
    "3-d": (normal(3, 2, 2, 4, 8), normal(N, 5, 4, 3, 4), {}),
    "3-d, groups": (
        normal(3, 2, 2, 2, 8),
        normal(N, 5, 4, 3, 4),
        dict(stride=2, feature_group_count=2),
    ),
}
LOSSES |= {
    name: Case(lambda w, x, kwargs=kwargs: squash(conv(x[None], w, **kwargs)), kernel, batch)
    for name, (kernel, batch, kwargs) in CONVOLUTIONS.items()
}
LOSSES |= {
    "tied convolutions": Case(
        lambda w, x: squash(conv(jnp.tanh(conv(x[None], w)), w)), normal(3, 3, 4, 4), IMAGES
    ),
    "standardised convolution": Case(
        lambda w, x: squash(conv(x[None], (w - w.mean((0, 1, 2))) / w.std((0, 1, 2)))),
        normal(3, 3, 4, 4),
        IMAGES,
        (FORMED,),
    ),
    "video": Case(lambda w, x: squash(conv(x, w)), normal(3, 3, 4, 8), normal(N, 3, 6, 6, 4)),
    "convolutions in a scan": Case(
        lambda w, x: jnp.sum(lax.scan(lambda h, w: (jnp.tanh(conv(h, w)), None), x[None], w)[0]),
        normal(3, 3, 3, 4, 4),
        IMAGES,
        (FORMED,),
    ),
    "kernel as image": Case(
        lambda w, x: squash(conv(w[None], x)), normal(6, 6, 4), normal(N, 3, 3, 4, 2), (NO_RULE,)
    ),
}
