"""The vmap engine: the plain reference, which forms every example's gradient."""

from typing import Any

import jax
import optax

from optax_lsdp._batch_norm import warn_of_batch_norms
from optax_lsdp._jaxpr import Loss, trace
from optax_lsdp.clipping._factors import ClipStyle, Group, clip_and_sum


def clip_by_vmap(
    loss_fn: Loss,
    params: optax.Params,
    batch: Any,
    mask: jax.Array | None,
    *,
    groups: list[Group],
    style: ClipStyle,
) -> tuple[tuple[jax.Array, Any], dict[str, jax.Array], optax.Updates]:
    """Return each example's (value, aux), the norms of each group, and the clipped sum."""

    def one_example(example: Any) -> Any:
        program = trace(loss_fn, params, example)  # which checks it
        warn_of_batch_norms(program.closed)
        return jax.value_and_grad(loss_fn, has_aux=True)(params, example)

    outputs, grads = jax.vmap(one_example)(batch)
    norms, total = clip_and_sum(grads, groups, style=style, mask=mask)
    return outputs, norms, total
