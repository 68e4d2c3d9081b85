"""Hosts: what one process has chosen goes in, what all of them go by comes out."""

import jax
import numpy as np
from jax.experimental import multihost_utils

from optax_lsdp._keys import fresh_key


def agreed_text(text: str) -> str:
    """Return the text of the first process, everywhere; all must be of one length."""
    if jax.process_count() == 1:
        return text
    sent = np.frombuffer(text.encode(), np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(sent))).decode()


def agreed_key() -> jax.Array:
    """Return a fresh key, the same everywhere."""
    key = fresh_key()
    if jax.process_count() == 1:
        return key
    data = multihost_utils.broadcast_one_to_all(np.asarray(jax.random.key_data(key)))
    return jax.random.wrap_key_data(jax.numpy.asarray(np.asarray(data)))


def holds_anywhere(flag: bool) -> bool:
    """Tell whether something is true of any process."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.array(flag))))


def wait_for_all(name: str) -> None:
    """Let no process go on before all have come here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
