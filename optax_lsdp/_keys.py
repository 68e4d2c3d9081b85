"""Keys: entropy or a typed key goes in, a key with its own address comes out."""

import hashlib
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def fresh_key() -> jax.Array:
    """Return a typed key filled with entropy of the operating system.

    An integer seed keeps 32 bits of itself (`jax.random.key(2**40 + 5)` is `key(5)`, unless
    `jax_enable_x64` is set), which can be guessed. The key is a secret: whoever has it can subtract
    the noise. Inside of `jax.vmap` one key would be that of all: map over keys made outside.

    >>> jax.random.key_data(fresh_key()).size * 32  # bits, with JAX's default generator
    64
    """
    words = jax.random.key_data(jax.random.key(0))
    if isinstance(words, jax.core.Tracer):
        raise RuntimeError(
            "`fresh_key()` must be called outside jit, got called while tracing: its result would "
            "be a constant of the compiled program; pass the key in."
        )
    entropy = np.frombuffer(os.urandom(words.nbytes), words.dtype).reshape(words.shape)
    return jax.random.wrap_key_data(jnp.asarray(entropy))


def is_key(array: Any) -> bool:
    """Tell an array of typed keys from one of numbers."""
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def check_key(name: str, key: Any) -> None:
    """Raise unless `key` is one typed key."""
    if not (isinstance(key, jax.Array) and is_key(key) and key.ndim == 0):
        got = f"{key.dtype} of shape {key.shape}" if isinstance(key, jax.Array) else repr(key)
        raise TypeError(
            f"`{name}` must be one typed key, got {got}; make it with `fresh_key()`, or with "
            "`jax.random.key(seed)` where the noise need not be secret."
        )


def fold_in_text(key: jax.Array, text: str) -> jax.Array:
    """Fold 64 bits of the hash of `text` into `key`, so that two texts never share a stream."""
    return fold_in_texts(key, [text])[0]


def fold_in_texts(key: jax.Array, texts: Sequence[str]) -> jax.Array:
    """Return a key for each text: (len(texts),). Different texts must have different hashes."""
    digests = [
        hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
        for text in texts
    ]
    if len(set(digests)) < len(digests):
        raise ValueError("`texts` must all be different, got some that would share a key.")
    words = np.frombuffer(b"".join(digests), "<u4").reshape(-1, 2)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, words[:, 0])
    return jax.vmap(jax.random.fold_in)(keys, words[:, 1])
