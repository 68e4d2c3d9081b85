"""Ten small models in the styles of other libraries: Hugging Face, jraph, diffrax, FlowJAX, tinygp.

They are plain JAX and Flax, and need none of these libraries.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks._models import Model, classifier, images, language_model, normal, tokens

WIDTH = 128


class MLP(nn.Module):
    """Dense layers with tanh between them."""

    widths: tuple[int, ...]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the last layer's output for each row."""
        for width in self.widths[:-1]:
            x = nn.tanh(nn.Dense(width)(x))
        return nn.Dense(self.widths[-1])(x)


class GraphNetwork(nn.Module):
    """A graph network as jraph has it: edges, nodes and the graph update one another."""

    width: int = 64
    rounds: int = 3

    @nn.compact
    def __call__(self, graph: tuple[jax.Array, ...]) -> jax.Array:
        """Return the logits of one graph."""
        nodes, edges, senders, receivers = graph
        nodes, edges = nn.Dense(self.width)(nodes), nn.Dense(self.width)(edges)
        whole = self.param("whole", nn.initializers.zeros, (self.width,))
        for _ in range(self.rounds):
            everywhere = partial(jnp.broadcast_to, whole)
            ends = [edges, nodes[senders], nodes[receivers], everywhere(edges.shape)]
            edges = MLP((self.width, self.width))(jnp.concatenate(ends, axis=-1))
            inbox = jax.ops.segment_sum(edges, receivers, len(nodes))
            parts = [nodes, inbox, everywhere(nodes.shape)]
            nodes = MLP((self.width, self.width))(jnp.concatenate(parts, axis=-1))
            summary = jnp.concatenate([whole, nodes.mean(axis=0), edges.mean(axis=0)])
            whole = MLP((self.width, self.width))(summary)
        return nn.Dense(10)(whole)


def graphs(size: int, nodes: int = 32, edges: int = 96) -> Model:
    """Return a graph network, and random graphs."""
    ends = jax.random.randint(jax.random.key(2), (2, size, edges), 0, nodes)
    batch = normal(size, nodes, 16), normal(size, edges, 8), ends[0], ends[1]
    return classifier(GraphNetwork(), batch)


def _log_product(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return log(exp(x) exp(y)) for stacks of matrices."""
    return jax.nn.logsumexp(x[..., :, :, None] + y[..., None, :, :], axis=-2)


def autoregressive_flow(size: int, features: int = 8, hidden: int = 8) -> Model:
    """Return a block neural autoregressive flow as FlowJAX has it, and points to be likely.

    Blocks of weights on the diagonal are positive, blocks above it are zero. So output i grows with
    input i, and depends on earlier inputs alone. The Jacobian's diagonal is a product of blocks.
    """
    blocks = [(hidden, 1), (hidden, hidden), (1, hidden)]

    def layer(params: Any, block: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
        grid = jnp.ones(block)
        on_diagonal = jnp.kron(jnp.eye(features), grid)
        below = jnp.kron(jnp.tril(jnp.ones((features, features)), -1), grid)
        weight = jnp.exp(params["weight"]) * on_diagonal + params["weight"] * below
        norms = jnp.linalg.norm(weight, axis=1, keepdims=True)
        weight = jnp.exp(params["scale"])[:, None] * weight / norms
        stacked = weight.reshape(features, block[0], features, block[1])
        places = jnp.arange(features)
        return weight, jnp.log(stacked[places, :, places, :])

    def loss(params: Any, example: Any) -> jax.Array:
        x, log_slopes = example, None
        for number, block in enumerate(blocks):
            weight, log_block = layer(params[number], block)
            x = weight @ x + params[number]["bias"]
            log_slopes = log_block if log_slopes is None else _log_product(log_block, log_slopes)
            if number < len(blocks) - 1:
                log_tanh = 2 * (jnp.log(2.0) - x - jax.nn.softplus(-2 * x))
                log_slopes = log_slopes + log_tanh.reshape(features, -1, 1)
                x = jnp.tanh(x)
        return 0.5 * jnp.sum(x**2) - jnp.sum(log_slopes)

    keys = jax.random.split(jax.random.key(0), len(blocks))
    params = [
        {
            "weight": 0.1 * jax.random.normal(key, (features * rows, features * columns)),
            "scale": jnp.zeros(features * rows),
            "bias": jnp.zeros(features * rows),
        }
        for key, (rows, columns) in zip(keys, blocks, strict=True)
    ]
    return Model(loss, params, normal(size, features))


def gaussian_process(size: int, points: int = 32) -> Model:
    """Return a Gaussian process on learned features as tinygp has it; one example is one curve."""
    features = MLP((64, 64, 8))

    def loss(params: Any, example: Any) -> jax.Array:
        x, y = example
        z = features.apply(params["features"], x) / jnp.exp(params["log_lengths"])
        distances = jnp.sum((z[:, None] - z[None, :]) ** 2, axis=-1)
        kernel = jnp.exp(params["log_amplitude"] - 0.5 * distances)
        noise = jnp.exp(params["log_noise"]) + 1e-3
        factor = jnp.linalg.cholesky(kernel + noise * jnp.eye(points))
        whitened = jax.scipy.linalg.solve_triangular(factor, y - params["mean"], lower=True)
        return 0.5 * jnp.sum(whitened**2) + jnp.sum(jnp.log(jnp.diagonal(factor)))

    x, y = normal(size, points, 4), jnp.sin(normal(size, points))
    params = {
        "features": features.init(jax.random.key(0), x[0]),
        "log_lengths": jnp.zeros(8),
        "log_amplitude": jnp.zeros(()),
        "log_noise": jnp.full((), -2.0),
        "mean": jnp.zeros(()),
    }
    return Model(loss, params, (x, y))


class SmallViT(nn.Module):
    """A vision transformer as Hugging Face has it, for images of 32 × 32 pixels."""

    layers: int = 4

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        """Return the logits of one image."""
        x = nn.Conv(WIDTH, (4, 4), strides=4, padding="VALID")(image).reshape(-1, WIDTH)
        token = self.param("class", nn.initializers.zeros, (1, WIDTH))
        x = jnp.concatenate([token, x])
        x = x + self.param("positions", nn.initializers.normal(0.02), x.shape)
        for _ in range(self.layers):
            x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x))
            y = nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))
            x = x + nn.Dense(WIDTH)(y)
        return nn.Dense(10)(nn.LayerNorm()(x)[0])


class SmallBert(nn.Module):
    """An encoder as Hugging Face has it, with token types and padding."""

    layers: int = 2

    @nn.compact
    def __call__(self, text: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        """Return the logits of one text."""
        words, types, is_word = text
        places = jnp.arange(len(words))
        x = nn.Embed(4_000, WIDTH)(words) + nn.Embed(512, WIDTH)(places)
        x = nn.LayerNorm()(x + nn.Embed(2, WIDTH)(types))
        mask = nn.make_attention_mask(is_word, is_word)
        for _ in range(self.layers):
            x = nn.LayerNorm()(x + nn.MultiHeadDotProductAttention(4)(x, mask=mask))
            y = nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(x)))
            x = nn.LayerNorm()(x + y)
        return nn.Dense(10)(nn.tanh(nn.Dense(WIDTH)(x[0])))


def typed_texts(size: int, length: int = 64) -> Model:
    """Return the encoder, and pairs of sentences of different lengths."""
    places = jnp.broadcast_to(jnp.arange(length), (size, length))
    ends = jax.random.randint(jax.random.key(2), (size, 1), length // 2, length)
    types = (places > ends // 2).astype(jnp.int32)
    return classifier(SmallBert(), (tokens(size, length, 4_000), types, places < ends))


def rotate(x: jax.Array) -> jax.Array:
    """Return queries or keys (tokens, heads, features), rotated by their positions."""
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** (-jnp.arange(half) / half)
    angles = jnp.arange(len(x))[:, None, None] * frequencies
    one, other = x[..., :half], x[..., half:]
    turned = [one * jnp.cos(angles) - other * jnp.sin(angles)]
    turned += [one * jnp.sin(angles) + other * jnp.cos(angles)]
    return jnp.concatenate(turned, axis=-1)


class RotaryGPT(nn.Module):
    """A decoder with rotary positions, root-mean-square norms and gated layers."""

    layers: int = 2
    heads: int = 4

    @nn.compact
    def __call__(self, words: jax.Array) -> jax.Array:
        """Return the logits of every next token."""
        dense = partial(nn.Dense, use_bias=False)
        x = nn.Embed(4_000, WIDTH)(words)
        mask = nn.make_causal_mask(words)
        for _ in range(self.layers):
            y = nn.RMSNorm()(x)
            query, key, value = (dense(WIDTH)(y).reshape(len(x), self.heads, -1) for _ in range(3))
            y = nn.dot_product_attention(rotate(query), rotate(key), value, mask=mask)
            x = x + dense(WIDTH)(y.reshape(len(x), WIDTH))
            y = nn.RMSNorm()(x)
            x = x + dense(WIDTH)(nn.silu(dense(3 * WIDTH)(y)) * dense(3 * WIDTH)(y))
        return dense(4_000)(nn.RMSNorm()(x))


def neural_ode(size: int, times: int = 16) -> Model:
    """Return a neural differential equation as diffrax has it: Runge–Kutta steps in a scan."""
    field = MLP((64, 64, 4))

    def loss(params: Any, path: jax.Array) -> jax.Array:
        def step(y: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            h, f = 1 / times, partial(field.apply, params)
            k1 = f(y)
            k2 = f(y + h / 2 * k1)
            k3 = f(y + h / 2 * k2)
            k4 = f(y + h * k3)
            y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            return y, y

        _, found = jax.lax.scan(step, path[0], None, length=times)
        return jnp.mean((found - path[1:]) ** 2)

    return Model(loss, field.init(jax.random.key(0), jnp.zeros(4)), normal(size, times + 1, 4))


class UNet(nn.Module):
    """A denoiser as diffusion models have it: down and up with skips, and a time."""

    widths: tuple[int, ...] = (32, 64)

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        """Return the noise that one image holds."""
        angles = time * 2.0 ** jnp.arange(16)
        embedded = MLP((WIDTH, WIDTH))(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)]))

        def block(x: jax.Array, width: int) -> jax.Array:
            x = nn.Conv(width, (3, 3))(nn.silu(nn.GroupNorm(8)(x)))
            x = x + nn.Dense(width)(embedded)
            return nn.Conv(width, (3, 3))(nn.silu(nn.GroupNorm(8)(x)))

        x, channels, skips = nn.Conv(self.widths[0], (3, 3))(x), x.shape[-1], []
        for width in self.widths:
            x = block(x, width)
            skips.append(x)
            x = nn.Conv(width, (3, 3), strides=2)(x)
        x = block(x, self.widths[-1])
        for width, skip in zip(reversed(self.widths), reversed(skips), strict=True):
            x = nn.ConvTranspose(width, (2, 2), strides=(2, 2))(x)
            x = block(jnp.concatenate([x, skip], axis=-1), width)
        return nn.Conv(channels, (3, 3))(nn.silu(nn.GroupNorm(8)(x)))


def unet(size: int) -> Model:
    """Return the denoiser, and images with noise and times."""
    module = UNet()

    def loss(params: Any, example: Any) -> jax.Array:
        image, noise, time = example
        noisy = jnp.sqrt(1 - time) * image + jnp.sqrt(time) * noise
        return jnp.mean((module.apply(params, noisy, time) - noise) ** 2)

    time = jnp.linspace(0.1, 0.9, size)
    batch = images(size, 32, 3), images(size, 32, 3)[::-1], time
    params = module.init(jax.random.key(0), batch[0][0], time[0])
    return Model(loss, params, batch)


class Experts(nn.Module):
    """Two of four dense networks for each token, by a learned gate."""

    experts: int = 4

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return one vector per input vector."""
        gates = nn.softmax(nn.Dense(self.experts)(x))
        least = jax.lax.top_k(gates, 2)[0][:, -1:]
        gates = jnp.where(gates >= least, gates, 0.0)
        gates = gates / gates.sum(axis=-1, keepdims=True)
        init = nn.initializers.lecun_normal(batch_axis=0)
        up = self.param("up", init, (self.experts, WIDTH, 2 * WIDTH))
        down = self.param("down", init, (self.experts, 2 * WIDTH, WIDTH))
        hidden = nn.gelu(jnp.einsum("tw,ewh->teh", x, up))
        return jnp.einsum("teh,ehw,te->tw", hidden, down, gates)


class MixtureOfExperts(nn.Module):
    """A transformer whose dense layers are mixtures of experts."""

    layers: int = 2

    @nn.compact
    def __call__(self, words: jax.Array) -> jax.Array:
        """Return the logits of one text."""
        x = nn.Embed(4_000, WIDTH)(words)
        x = x + self.param("positions", nn.initializers.normal(0.02), x.shape)
        for _ in range(self.layers):
            x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x))
            x = x + Experts()(nn.LayerNorm()(x))
        return nn.Dense(10)(nn.LayerNorm()(x).mean(axis=0))


class Perceiver(nn.Module):
    """A few latent vectors that attend to all pixels, twice with the same weights."""

    latents: int = 16
    rounds: int = 2

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        """Return the logits of one image."""
        places = jnp.stack(jnp.meshgrid(*(jnp.linspace(-1, 1, n) for n in image.shape[:2])), -1)
        angles = places[..., None] * 2.0 ** jnp.arange(6) * jnp.pi
        waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        pixels = jnp.concatenate([image, waves.reshape(*image.shape[:2], -1)], -1)
        pixels = nn.LayerNorm()(pixels.reshape(-1, pixels.shape[-1]))
        x = self.param("latents", nn.initializers.normal(0.02), (self.latents, WIDTH))
        cross = nn.MultiHeadDotProductAttention(4, qkv_features=WIDTH, out_features=WIDTH)
        norm, within, dense = nn.LayerNorm(), nn.MultiHeadDotProductAttention(4), MLP((256, WIDTH))
        for _ in range(self.rounds):
            x = x + cross(norm(x), pixels)
            x = x + within(x)
            x = x + dense(x)
        return nn.Dense(10)(x.mean(axis=0))


STYLES: dict[str, Callable[[int | None], Model]] = {
    "graph network": lambda n: graphs(n or 32),
    "autoregressive flow": lambda n: autoregressive_flow(n or 128),
    "Gaussian process": lambda n: gaussian_process(n or 64),
    "small ViT": lambda n: classifier(SmallViT(), images(n or 32, 32, 3)),
    "BERT, token types": lambda n: typed_texts(n or 32),
    "GPT, rotary": lambda n: language_model(RotaryGPT(), tokens(n or 16, 65, 4_000)),
    "neural ODE": lambda n: neural_ode(n or 64),
    "U-Net": lambda n: unet(n or 16),
    "mixture of experts": lambda n: classifier(MixtureOfExperts(), tokens(n or 32, 32, 4_000)),
    "Perceiver": lambda n: classifier(Perceiver(), images(n or 32, 14, 3)),
}
