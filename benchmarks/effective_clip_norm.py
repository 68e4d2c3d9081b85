"""Measure the effective clip norm of every model of the zoo, as each platform rounds.

The effective clip norm of an example is the norm of its contribution to the clipped sum if its
gradient is longer than the clip norm C. This script clips each example of a batch alone, to a clip
norm below the norm of its gradient, and divides the norm of the result by C. A CPU evaluates the
programs of other platforms, with operands rounded as the platform rounds them.

Each result is written as soon as it is known, and a run that was interrupted continues. To measure
again, delete the record.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax

import optax_lsdp as lsdp
from benchmarks import _timing
from benchmarks._models import VOCABULARY, Model, language_model, tokens
from benchmarks.zoo import ZOO, Block, Decoder
from optax_lsdp.clipping import emulate_platform

Row = dict[str, float]
PLATFORMS = ("cpu", "cuda", "tpu")
CLIP_NORM = 1e-6  # below the gradient of every example
LENGTHS = (64, 128, 256, 512)  # of texts, in tokens


class WideDecoder(nn.Module):
    """A decoder as wide as BERT and GPT-2, with a few layers and tied embeddings."""

    width: int = 768
    layers: int = 2

    @nn.compact
    def __call__(self, text: jax.Array) -> jax.Array:
        """Return the logits of every next token."""
        table, normal = nn.Embed(VOCABULARY, self.width), nn.initializers.normal(0.02)
        x = table(text) + self.param("positions", normal, (len(text), self.width))
        for _ in range(self.layers):
            x = Block(self.width, causal=True)(x)
        return table.attend(nn.LayerNorm()(x))


DECODERS = {256: (Decoder(), 16), 768: (WideDecoder(), 4)}  # by width: module, and batch size


def decoder(width: int, length: int, size: int | None) -> Model:
    """Return a decoder of this width, for texts of this length."""
    module, usual = DECODERS[width]
    return language_model(module, tokens(size or usual, length + 1))


def contributions(model: Model, platform: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the norms of each example's gradient and of its contribution, in units of C."""
    clip = lsdp.value_and_clipped_grad(model.loss, clip_norm=CLIP_NORM, engine="bookkeeping")

    def alone(params: Any, example: Any) -> tuple[jax.Array, jax.Array]:
        private, total = clip(params, jax.tree.map(lambda x: x[None], example))
        scaled = jax.tree.map(lambda x: x / CLIP_NORM, total)
        return private.norms[0] / CLIP_NORM, optax.tree.norm(jax.tree.leaves(scaled))

    run = jax.jit(lambda params, batch: jax.lax.map(partial(alone, params), batch))
    with emulate_platform(platform):
        norms, lengths = jax.device_get(run(model.params, model.batch))
    return norms, lengths


def measure(build: Callable[[int | None], Model], platform: str, size: int | None) -> Row:
    """Return the smallest and the median effective clip norm over a batch, in units of C."""
    start = time.perf_counter()
    norms, lengths = contributions(build(size), platform)
    if not np.all(norms > 2):
        raise ValueError(f"The clip norm must be below all norms, got a norm of {norms.min()}·C.")
    return {
        "examples": len(lengths),
        "smallest": round(float(lengths.min()), 6),
        "median": round(float(np.median(lengths)), 6),
        "seconds": round(time.perf_counter() - start, 1),
    }


def main() -> None:
    """Measure all models and platforms that the record does not have yet."""
    args = _timing.arguments(__doc__ or "", "effective_clip_norm.json")
    names, lengths, size = list(ZOO), LENGTHS, None
    if args.smoke:
        names, lengths, size = names[:1], (4,), 2
    work = {
        platform: {name: partial(measure, ZOO[name], platform, size) for name in names}
        for platform in PLATFORMS
    }
    work |= {
        f"{platform}, decoders": {
            f"{width} wide, {length} tokens": partial(
                measure, partial(decoder, width, length), platform, size
            )
            for width in DECODERS
            for length in lengths
        }
        for platform in PLATFORMS
    }
    _timing.measure_missing(args.output, work)


if __name__ == "__main__":
    main()
