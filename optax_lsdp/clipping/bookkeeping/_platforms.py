"""Describe the kinds of devices: which numbers they multiply exactly, and what their work costs.

A matrix unit multiplies numbers with few bits, and adds up the products in float32. If its operands
are rounded to these bits first, the products are exact, and only additions round. `strategies`
bounds the rounding errors. Without such a unit, products in float32 round as well, and the bounds
count each product as one more rounding. The bounds assume that the relative error of an addition is
at most `addition_error`, in whatever order a device adds. This assumption holds even for matrix
units that truncate float32 sums instead of rounding them to nearest. It does not hold for
algorithms that transform their operands, such as Winograd's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_lsdp._trees import wide_dtype


class Platform(NamedTuple):
    """A kind of device.

    Attributes:
        name: the name of the platform in JAX.
        mantissa_bits: how many bits the operands of the matrix unit have after the leading bit.
        addition_error: the largest relative rounding error of a float32 addition.
        longest_sum: how many numbers one sum may add in an unknown order; longer sums are split.
        longest_product: how many products one entry of a Gram matrix may add in an unknown order.
        precision: the `lax.Precision` of a product of rounded operands.
        takes_bfloat16: whether the matrix unit takes operands in bfloat16.
        keeps: whether per-example gradients of matrices are cheap to store and read back.
        per_byte: how many multiplications take as long as moving one byte of memory.
        lanes: how many rows and columns the matrix unit processes at once.
        fuses: whether XLA slices the operands of a product, and squares the product, without
            storing the slices or the product.
        grouped: the cost of a multiplication in a convolution with many feature groups, divided by
            the cost of any other multiplication.
    """

    name: str
    mantissa_bits: int
    addition_error: float
    longest_sum: int
    longest_product: int
    precision: lax.Precision
    takes_bfloat16: bool
    keeps: bool
    per_byte: float
    lanes: int
    fuses: bool
    grouped: int

    def bits(self, *operands: jax.Array) -> int:
        """Return how many bits after the leading bit the operands of a product keep."""
        is_half = all(x.dtype == jnp.bfloat16 for x in operands)
        return min(7 if is_half else 23, self.mantissa_bits) if self.mantissa_bits < 23 else 23

    def rounded(self, x: jax.Array, *operands: jax.Array) -> jax.Array:
        """Round an operand to numbers that the matrix unit multiplies exactly.

        This function uses `reduce_precision`, because XLA may remove a cast to fewer bits and the
        cast back. Integers are indices, and stay as they are. Multiplying by clip factors can
        change the dtype of an operand. In this case, pass the two original inputs of the matrix
        product as `operands`: then `x` is rounded to the precision of this product.
        """
        bits = self.bits(*(operands or (x,)))
        if not jnp.issubdtype(x.dtype, jnp.floating) or bits >= 23 or x.dtype == jnp.float64:
            return x
        if x.dtype != jnp.bfloat16:
            x = lax.reduce_precision(x.astype(jnp.float32), exponent_bits=8, mantissa_bits=bits)
        return x.astype(jnp.bfloat16) if bits == 7 and self.takes_bfloat16 else x

    def unit(self, dtype: jnp.dtype) -> float:
        """Return the largest relative rounding error of an addition in `dtype`."""
        return self.addition_error if dtype == jnp.float32 else 2.0**-52

    def growth(self, roundings: float, dtype: jnp.dtype) -> float:
        """Return 1/(1 − ku), the largest ratio of an exact to a computed sum of positive numbers.

        Here k = `roundings` is the number of roundings between a term and the sum, and u is `unit`.
        If ku is 1 or more, the result is ∞.
        """
        error = roundings * self.unit(dtype)
        return 1 / (1 - error) if error < 1 else math.inf

    def product(self, subscripts: str, a: jax.Array, g: jax.Array) -> jax.Array:
        """Return an einsum of rounded operands, added up in float32 or wider."""
        dtype = wide_dtype(a, g)
        if a.dtype != g.dtype or not self.takes_bfloat16:
            a, g = a.astype(dtype), g.astype(dtype)
        precision = lax.Precision.HIGHEST if dtype == jnp.float64 else self.precision
        return jnp.einsum(subscripts, a, g, precision=precision, preferred_element_type=dtype)

    def weighting_error(self, *operands: jax.Array) -> float:
        """Return an upper bound on the relative error of each entry of a weighted operand.

        A weighted operand has been multiplied by clip factors and rounded again.
        """
        unit = self.unit(wide_dtype(*operands))
        if self.mantissa_bits == 23 or any(x.dtype == jnp.float64 for x in operands):
            return unit
        return 2.0 ** -(self.bits(*operands) + 1) + unit


CPU = Platform(
    name="cpu",
    mantissa_bits=23,
    addition_error=2**-24,
    longest_sum=1024,
    longest_product=8192,
    precision=lax.Precision.HIGHEST,
    takes_bfloat16=False,
    keeps=True,
    per_byte=12.5,
    lanes=1,
    fuses=False,
    grouped=1,
)
CUDA = Platform(
    name="cuda",
    mantissa_bits=10,  # TF32
    addition_error=2**-23,
    longest_sum=4096,
    longest_product=4096,
    precision=lax.Precision.DEFAULT,
    takes_bfloat16=True,
    keeps=False,
    per_byte=100.0,
    lanes=16,
    fuses=False,
    grouped=1,
)
ROCM = CUDA._replace(
    name="rocm", mantissa_bits=23, precision=lax.Precision.HIGHEST, takes_bfloat16=False
)
TPU = CUDA._replace(
    name="tpu", mantissa_bits=7, per_byte=120.0, lanes=128, fuses=True, grouped=60
)  # bfloat16
PLATFORMS = {platform.name: platform for platform in (CPU, CUDA, ROCM, TPU)}
EMULATED: ContextVar[dict[str, Platform] | None] = ContextVar("emulated", default=None)


@contextmanager
def emulate_platform(name: str) -> Iterator[None]:
    """Treat every device as the named platform, in programs that are traced in this context.

    In this way, audits evaluate the bounds of an accelerator on a CPU. The engine rounds as on the
    accelerator, but holds the rounded numbers in float32, because XLA lacks some products of
    bfloat16 numbers on CPUs.
    """
    platform = PLATFORMS[name]
    if platform.takes_bfloat16:
        platform = platform._replace(takes_bfloat16=False)
    token = EMULATED.set({CPU.name: platform})
    try:
        yield
    finally:
        EMULATED.reset(token)
