"""Hosts: what each process knows goes in, what all of them go by comes out."""

from __future__ import annotations

import jax
import numpy as np
from jax.experimental import multihost_utils

from optax_lsdp._keys import fresh_key


def agreed_text(text: str) -> str:
    """Return the text of the first process, everywhere."""
    if jax.process_count() == 1:
        return text
    sent = np.frombuffer(text.encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(sent))))
    room = sent if jax.process_index() == 0 else np.zeros(size, np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(room))).decode()


def joined_text(text: str) -> str:
    """Return the texts of all processes, which must be of one length, everywhere."""
    if jax.process_count() == 1:
        return text
    sent = np.frombuffer(text.encode(), np.uint8)
    return bytes(np.asarray(multihost_utils.process_allgather(sent)).ravel()).decode()


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


def raise_together(error: BaseException | None) -> None:
    """Raise the error of this process, or say that another one has one; else let all go on."""
    if not holds_anywhere(error is not None):
        return
    if error is None:
        raise RuntimeError("another process has failed; its own error says why.")
    raise error


def wait_for_all(name: str) -> None:
    """Let no process go on before all have come here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
