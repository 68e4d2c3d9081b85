"""Try a loss on the shapes of one example before anything is compiled, written or spent."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from optax_lsdp._isolation import batch_norm_sentence, batch_norms
from optax_lsdp._jaxpr import ClosedJaxpr, uses_inputs
from optax_lsdp._loss import LossFn, call_loss, raise_explained, takes_key


def check_loss(loss_fn: LossFn, params: Any, example: Any) -> ClosedJaxpr:
    """Return the program of a loss, or raise one sentence if `fit` cannot train with it.

    Args:
        loss_fn: as `fit` takes it.
        params: the parameters, or their shapes.
        example: one example.
    """
    example = jax.tree.map(jnp.asarray, example)
    key = (jax.random.key(0),) if takes_key(loss_fn) else ()
    try:
        call = jax.make_jaxpr(partial(call_loss, loss_fn), return_shape=True)
        program, output = call(params, example, *key)
    except Exception as error:
        raise_explained(error, loss_fn, params, example)
    if isinstance(output, tuple):
        raise ValueError(
            f"`loss_fn` must return the loss alone, got a tuple of {len(output)}; aux of single "
            "examples is private, and `value_and_clipped_grad(..., has_aux=True)` gives it to a "
            "loop of your own."
        )
    layers = batch_norms(program)
    if layers:
        raise ValueError(batch_norm_sentence(layers))
    return program


def check_used(program: ClosedJaxpr, params: Any) -> None:
    """Raise if a loss uses none of its parameters: noise alone would move them."""
    if not uses_inputs(program, len(jax.tree.leaves(params))):
        raise ValueError(
            "`loss_fn` must depend on `params`, got one that uses none of them, so that noise "
            "alone would move them; let it use its first argument, and no model around it."
        )
