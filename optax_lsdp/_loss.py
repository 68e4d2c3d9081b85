"""How a loss is called, with or without a key, and why a call failed.

A loss is `loss_fn(params, example)` or `loss_fn(params, example, key)`. `fit`, `check_model` and
`explain_clipping` make the keys; for `clipped_grad` they are part of the batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from optax_lsdp._isolation import batch_norm_in_traceback, batch_norm_sentence

LossFn = Callable[..., Any]

_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_ROWS = 2  # examples of the batch on which a loss is tried that fails on one example
_FLAX = {  # errors of Flax, by name, and the remedy
    "InvalidRngError": "let it take a key, `loss_fn(params, example, key)`, and pass "
    'rngs={"dropout": key} to `apply`',
    "TraceContextError": "merge a copy in it, `nnx.merge(graph, params, rest, copy=True)`",
}
_KEPT = (TypeError, ValueError, IndexError)  # kinds of errors that stay what they are


def takes_key(loss_fn: LossFn) -> bool:
    """Tell a loss with a third argument, the key of its example, from one without."""
    check_loss_signature(loss_fn)
    return len(_needed(loss_fn)) == 3 or _names_key(loss_fn)


def check_loss_signature(loss_fn: LossFn) -> None:
    """Raise unless a loss can be called with parameters and one example, or with a key as well."""
    parameters, needed = _parameters(loss_fn), _needed(loss_fn)
    by_place = [p for p in parameters if p.kind in _BY_PLACE]
    takes_few = len(by_place) < 2 and not any(p.kind == p.VAR_POSITIONAL for p in parameters)
    if len(needed) > 3 or (parameters and takes_few):
        raise TypeError(
            "`loss_fn` must take parameters, one example and at most a key, got a function of "
            f"{', '.join(p.name for p in parameters)}; several arrays of an example come as one "
            "tuple, and what is not trained comes from around the function."
        )


def needs_key(loss_fn: LossFn) -> bool:
    """Tell whether a loss cannot be called without a key."""
    keys = [p for p in _parameters(loss_fn) if p.name == "key" and p.default is p.empty]
    return len(_needed(loss_fn)) == 3 or any(p.kind == p.KEYWORD_ONLY for p in keys)


def _parameters(loss_fn: LossFn) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(loss_fn).parameters.values())
    except (TypeError, ValueError):  # some functions that are not written in Python have none
        return []


def _needed(loss_fn: LossFn) -> list[str]:
    found = _parameters(loss_fn)
    return [p.name for p in found if p.kind in _BY_PLACE and p.default is p.empty]


def _names_key(loss_fn: LossFn) -> bool:
    parameters = _parameters(loss_fn)[2:]
    return any(p.name == "key" and p.kind != p.POSITIONAL_ONLY for p in parameters)


def call_loss(loss_fn: LossFn, params: Any, example: Any, *key: jax.Array) -> Any:
    """Call the loss of one example, with its key if it takes one."""
    if not key:
        return loss_fn(params, example)
    if _names_key(loss_fn):
        return loss_fn(params, example, key=key[0])
    try:
        return loss_fn(params, example, *key)
    except Exception as error:
        error.add_note(
            "The third argument of `loss_fn` is a key for each example; labels and the like are "
            "part of the example, which is a tuple if `data` is one."
        )
        raise


def with_key_in_example(loss_fn: LossFn) -> LossFn:
    """Convert `loss(params, example, key)` to `loss(params, (example, key))` for `clipped_grad`."""
    return lambda params, pair: call_loss(loss_fn, params, *pair)


def call_or_explain(loss_fn: LossFn, params: Any, example: Any) -> Any:
    """Evaluate the loss of an example; raise an error that explains the cause if it fails."""
    try:
        return loss_fn(params, example)
    except Exception as error:
        raise_explained(error, loss_fn, params, example)


def raise_explained(error: Exception, loss_fn: LossFn, params: Any, example: Any) -> NoReturn:
    """Raise an error that explains why a loss failed, or the original error if nobody knows.

    The loss is traced again in the ways in which it may have been meant. One that works so is the
    proof of what went wrong.
    """
    sentence = explain_failure(error, loss_fn, params, example)
    if sentence is None:
        error.add_note(_was_given(example))
        raise error
    kind = type(error) if type(error) in _KEPT else ValueError
    explained = kind(sentence)
    for note in (*getattr(error, "__notes__", ()), _was_given(example)):
        explained.add_note(note)
    raise explained from error


def explain_failure(
    error: Exception, loss_fn: LossFn, params: Any, example: Any, *, batched: bool = False
) -> str | None:
    """Explain why a loss failed, in one sentence, if the cause can be found.

    With `batched`, the loss is one of whole batches, and `example` is such a batch.
    """
    layer = batch_norm_in_traceback(error)
    if layer:
        return batch_norm_sentence([layer])
    if type(error).__name__ in _FLAX:
        reason = str(error).splitlines()[0].split(" (https")[0].rstrip(".")
        remedy = _FLAX[type(error).__name__]
        demand = "`loss_fn` must be a function of its arguments alone"
        return f"{demand}, got an error of Flax, {reason}; {remedy}."
    if "NoneType" in str(error) and None in jax.tree.leaves(params, is_leaf=lambda x: x is None):
        return (
            "`loss_fn` must put a model together that was filtered, got None for a part of it; "
            "split it by `params, static = eqx.partition(model, eqx.is_inexact_array)`, and begin "
            "the loss with `model = eqx.combine(params, static)`."
        )
    one, rows, params = _shapes(example), _shapes(example, _ROWS), _shapes(params)
    demand = f"`loss_fn` must take parameters and {'a batch' if batched else 'one example'}"

    def as_it_is(params: Any, example: Any) -> Any:
        return _plainly(loss_fn, params, example)

    if _gives_a_loss(as_it_is, params, one):
        if not (needs_key(loss_fn) and "missing" in str(error)):
            return None
        return (
            f"{demand}, got one that needs a key as well; keys are part of the batch, (examples, "
            "jax.random.split(key, n)), for `lambda params, example: loss_fn(params, *example)`, "
            "and `training.fit` makes them itself."
        )
    for call, words in _in_parts(loss_fn):
        if _gives_a_loss(call, params, one):
            return f"{demand}, {words}."
        if not batched and _gives_a_loss(call, params, rows):
            return f"{demand} without batch axis, {words}, and drop vmap and the mean from it."
    if not batched and _gives_a_loss(as_it_is, params, rows):
        return (
            "`loss_fn` must be the loss of one example, got one of a whole batch: it fails on "
            f"{_in_words(one)} and works on {_in_words(rows)}; drop vmap and the mean over the "
            "batch from it, or give it batches of one example with keep_batch_axis=True, for "
            "`fit` with `training.keep_batch_axis(loss_fn)`; `check_model` takes it with "
            "batched=True."
        )
    for call, words in _otherwise(loss_fn):
        if _gives_a_loss(call, params, one):
            return f"{demand}, {words}."
    return None


def _plainly(loss_fn: LossFn, params: Any, example: Any) -> Any:
    key = (jax.random.key(0),) if takes_key(loss_fn) else ()
    return call_loss(loss_fn, params, example, *key)


def _in_parts(loss_fn: LossFn) -> Iterator[tuple[Callable[..., Any], str]]:
    """Return calls that pass the parts of an example as arguments, with the advice if one works."""
    yield (
        lambda params, example: loss_fn(params, *_parts(example, tuple | list)),
        "got one with the parts of the example as arguments; write "
        "`lambda params, example: loss_fn(params, *example)`",
    )
    yield (
        lambda params, example: loss_fn(params, **_parts(example, dict)),
        "got one with the parts of the example as arguments; write "
        "`lambda params, example: loss_fn(params, **example)`",
    )


def _otherwise(loss_fn: LossFn) -> Iterator[tuple[Callable[..., Any], str]]:
    """Return other calls of a loss, with the advice to give if one works."""
    yield (
        lambda params, example: _plainly(loss_fn, example, params),
        "got one that takes the example first; write "
        "`lambda params, example: loss_fn(example, params)`",
    )
    yield (
        lambda params, example: loss_fn(params, jax.random.key(0), example),
        "and then a key, got one that takes the key before the example; write "
        "`lambda params, example, key: loss_fn(params, key, example)`",
    )
    yield (
        lambda params, example: _plainly(loss_fn, params, _squeezed(example)),
        "got arrays of one entry in the example, and a loss that works with single numbers; give "
        "columns as labels[:, 0]",
    )
    yield (
        lambda params, example: _plainly(loss_fn, {"params": params}, example),
        'got one that wants them in a dict; write `lambda params, example: loss_fn({"params": '
        "params}, example)`",
    )


def _squeezed(example: Any) -> Any:
    """Return an example with single numbers for arrays of one entry, as columns give them."""
    return jax.tree.map(lambda x: x[0] if x.shape == (1,) else x, example)


def _parts(example: Any, kind: Any) -> Any:
    """Return the parts of an example of that kind; raise if it has none to pass as arguments."""
    if not (isinstance(example, kind) and len(example) > 1):
        raise TypeError("the example has no such parts")
    return example


def _gives_a_loss(function: Callable[..., Any], params: Any, example: Any) -> bool:
    """Tell whether a call returns a real number, or one for each row of what it is given."""
    try:
        found = jax.eval_shape(function, params, example)
    except Exception:
        return False
    value = found[0] if isinstance(found, tuple) and found else found
    is_real = hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.floating)
    lengths = {leaf.shape[:1] for leaf in jax.tree.leaves(example)}
    return is_real and (value.shape == () or {value.shape} == lengths)


def _shapes(tree: Any, *rows: int) -> Any:
    return jax.tree.map(
        lambda x: (
            jax.ShapeDtypeStruct((*rows, *jnp.shape(x)), jnp.result_type(x))
            if not hasattr(x, "dtype")
            else jax.ShapeDtypeStruct((*rows, *x.shape), x.dtype)
        ),
        tree,
    )


def _in_words(example: Any) -> Any:
    return jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", example)


def _was_given(example: Any) -> str:
    """Return what a loss that fails most often did not expect."""
    return (
        f"`loss_fn(params, example)` was given one example without batch axis, "
        f"{_in_words(_shapes(example))}; several "
        "arrays come as one tuple, and keep_batch_axis=True, or `training.keep_batch_axis` for "
        "`fit`, gives an axis of length 1."
    )
