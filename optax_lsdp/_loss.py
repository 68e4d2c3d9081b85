"""Call and adapt a loss, with or without a key, and explain why a call failed.

A loss is `loss_fn(params, example)` or `loss_fn(params, example, key)`. `fit`, `check_model` and
`explain_clipping` make the keys themselves. For `clipped_grad` the keys are part of the batch.

If a loss fails, this module tries other likely calls. If one works, the error message suggests it.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import NoReturn, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from optax_lsdp._checks import check_function, check_whole
from optax_lsdp._isolation import batch_norm_in_traceback, batch_norm_sentence
from optax_lsdp._trees import check_mask, describe_arrays, dtype_name, is_floating, widen
from optax_lsdp._types import PyTree, UserBatch

LossFn: TypeAlias = Callable[..., PyTree]
_Call: TypeAlias = Callable[[optax.Params, PyTree], PyTree]

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_TRIAL_BATCH_SIZE = 2  # a loss that fails on one example is tried on a batch of this size
_FLAX_REMEDIES = {  # by the class name of Flax's error
    "InvalidRngError": "let it take a key, `loss_fn(params, example, key)`, and pass "
    'rngs={"dropout": key} to `apply`',
    "TraceContextError": "let it merge a copy, `nnx.merge(graph, params, rest, copy=True)`, and "
    "with dropout take a key, `loss_fn(params, example, key)`, for `rngs=nnx.Rngs(dropout=key)`",
}
_KEPT_ERRORS = (TypeError, ValueError, IndexError)  # an explained error keeps these types


def takes_key(loss_fn: LossFn) -> bool:
    """Check the signature of a loss, and return whether its third argument is a key."""
    check_loss_signature(loss_fn)
    return len(_required(loss_fn)) == 3 or _names_key(loss_fn)


def check_loss_signature(loss_fn: LossFn) -> None:
    """Raise unless a loss takes (params, example) or (params, example, key)."""
    parameters = _parameters(loss_fn)
    positional = [p for p in parameters if p.kind in _POSITIONAL]
    takes_few = len(positional) < 2 and not any(p.kind == p.VAR_POSITIONAL for p in parameters)
    if len(_required(loss_fn)) > 3 or (parameters and takes_few):
        raise TypeError(
            "`loss_fn` must take parameters, one example and optionally a key, got a function of "
            f"{', '.join(p.name for p in parameters)}; pass the arrays of an example as one tuple, "
            "and let the function close over other values that are not trained."
        )


def needs_key(loss_fn: LossFn) -> bool:
    """Return whether a loss requires a key."""
    keys = [p for p in _parameters(loss_fn) if p.name == "key" and p.default is p.empty]
    return len(_required(loss_fn)) == 3 or any(p.kind == p.KEYWORD_ONLY for p in keys)


def _parameters(loss_fn: LossFn) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(loss_fn).parameters.values())
    except (TypeError, ValueError):  # some functions written in C have no signature
        return []


def _required(loss_fn: LossFn) -> list[str]:
    """Return the positional parameters without a default."""
    found = _parameters(loss_fn)
    return [p.name for p in found if p.kind in _POSITIONAL and p.default is p.empty]


def _names_key(loss_fn: LossFn) -> bool:
    parameters = _parameters(loss_fn)[2:]
    return any(p.name == "key" and p.kind != p.POSITIONAL_ONLY for p in parameters)


def call_loss(loss_fn: LossFn, params: optax.Params, example: PyTree, *key: jax.Array) -> PyTree:
    """Call the loss of one example. Pass the key, if there is one, by name or by position."""
    if not key:
        return loss_fn(params, example)
    if _names_key(loss_fn):
        return loss_fn(params, example, key=key[0])
    try:
        return loss_fn(params, example, *key)
    except Exception as error:
        error.add_note(
            "The third argument of `loss_fn` is a random key. Labels are part of the example: if "
            "`data` is a tuple of arrays, the example is a tuple as well."
        )
        raise


def call_with_any_key(loss_fn: LossFn, params: optax.Params, example: PyTree) -> PyTree:
    """Call the loss of one example. If it takes a key, pass an arbitrary key."""
    key = (jax.random.key(0),) if takes_key(loss_fn) else ()
    return call_loss(loss_fn, params, example, *key)


def with_key_in_example(loss_fn: LossFn) -> LossFn:
    """Convert `loss(params, example, key)` to `loss(params, (example, key))` for `clipped_grad`."""
    return lambda params, pair: call_loss(loss_fn, params, *pair)


def mixed_precision(loss_fn: LossFn, dtype: DTypeLike = jnp.bfloat16) -> LossFn:
    """Return a loss that casts parameters and examples to half precision before it computes.

    The stored parameters, norms, sums, noise and updates stay in float32.

    >>> loss = mixed_precision(lambda w, x: jnp.vdot(w, x))
    >>> jax.grad(loss)(jnp.ones(2), jnp.ones(2)).dtype
    dtype('float32')
    """

    def cast(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: x.astype(dtype) if is_floating(x) else x, tree)

    def loss(params: optax.Params, example: PyTree, *key: jax.Array) -> jax.Array:
        return call_loss(loss_fn, cast(params), cast(example), *key).astype(jnp.float32)

    return _with_arguments_of(loss_fn, loss)


def keep_batch_axis(loss_fn: LossFn) -> LossFn:
    """Return a loss for `fit` that calls `loss_fn` on examples with a leading axis of length 1.

    >>> loss = keep_batch_axis(lambda w, x: jnp.sum(x @ w))
    >>> print(loss(jnp.ones(3), jnp.ones(3)))
    3.0
    """

    def loss(params: optax.Params, example: PyTree, *key: jax.Array) -> jax.Array:
        return call_loss(loss_fn, params, jax.tree.map(lambda x: x[None], example), *key)

    return _with_arguments_of(loss_fn, loss)


def _with_arguments_of(loss_fn: LossFn, loss: LossFn) -> LossFn:
    """Give `loss` the signature of `loss_fn`: with or without a key."""
    if takes_key(loss_fn):
        return lambda params, example, key: loss(params, example, key)
    return lambda params, example: loss(params, example)


def average_views(
    loss_fn: LossFn, augment: Callable[[jax.Array, PyTree], PyTree], views: int
) -> LossFn:
    """Return a loss that averages `loss_fn` over random views of an example.

    A view is a random augmentation, `augment(key, example)`. The losses of the views are averaged
    before the gradient is clipped, so all views together count as one example. If `loss_fn` takes a
    key, it gets a different key for each view. Reference: De et al. 2022, Unlocking High-Accuracy
    Differentially Private Image Classification through Scale (augmentation multiplicity).

    >>> def loss_fn(params, x):
    ...     return (params - x) ** 2
    >>> loss = average_views(loss_fn, lambda key, x: x + jax.random.normal(key), 10_000)
    >>> print(round(float(loss(0.0, 0.0, jax.random.key(0))), 1))  # the variance of the views
    1.0
    """
    check_function("loss_fn", loss_fn, "of parameters and one example")
    check_function("augment", augment, "of a key and one example")
    check_whole("views", views)
    keyed = takes_key(loss_fn)

    def loss(params: optax.Params, example: PyTree, key: jax.Array) -> jax.Array:
        def loss_of_view(key: jax.Array) -> jax.Array:
            other_key = (jax.random.fold_in(key, 1),) if keyed else ()
            return call_loss(loss_fn, params, augment(key, example), *other_key)

        return jax.vmap(loss_of_view)(jax.random.split(key, views)).mean()

    return loss


def average_examples(loss_fn: LossFn) -> LossFn:
    """Return the loss of a user: the average of `loss_fn` over the user's examples.

    loss(params, (examples, mask)) = Σⱼ maskⱼ · loss_fn(params, exampleⱼ) / max(1, Σⱼ maskⱼ)

    The average is taken before the gradient is clipped, so all examples of a user together
    contribute at most the clip norm. `fit` calls this function; in your own loop, call it yourself.

    Args:
        loss_fn: `loss_fn(params, example)` returns a scalar for one example. If it takes a key as
            its third argument, then so does the returned loss, which splits the key.

    Returns:
        The loss of one user. Its second argument is one row of a `UserBatch`, or a pair: arrays
        with a leading axis, and a bool mask, False for padding. Without examples, the loss is zero.

    >>> loss = average_examples(lambda params, x: params * x)
    >>> examples, mask = jnp.array([1.0, 3.0, jnp.nan]), jnp.array([True, True, False])
    >>> print(jax.grad(loss)(5.0, (examples, mask)))
    2.0
    """
    check_function("loss_fn", loss_fn, "of parameters and one example")

    def loss(params: optax.Params, user: PyTree, *key: jax.Array) -> jax.Array:
        examples, mask = _check_user(user)

        def fill(x: jax.Array) -> jax.Array:
            """Replace padding by the first example, because a NaN would reach the gradient."""
            one = jnp.where(mask.any(), x[jnp.argmax(mask)], jnp.zeros_like(x[0]))
            return jnp.where(mask.reshape(-1, *[1] * one.ndim), x, one)

        if not isinstance(user, UserBatch):  # there, padding repeats the first example already
            examples = jax.tree.map(fill, examples)
        arguments = examples, *(jax.random.split(one, len(mask)) for one in key)
        call = partial(call_loss, loss_fn, params)
        if len(mask) == 1:  # the same program as for one example
            losses = jax.tree.map(lambda x: x[None], call(*jax.tree.map(lambda x: x[0], arguments)))
        else:
            losses = jax.vmap(call)(*arguments)
        if getattr(losses, "shape", None) != mask.shape:
            got = f"{describe_arrays(losses)} for {len(mask)} examples"
            raise ValueError(f"`loss_fn` must return a scalar for one example, got {got}.")
        wide = jnp.where(mask, widen(losses), 0)  # a sum can overflow float16, but no average does
        return (jnp.sum(wide) / jnp.maximum(mask.sum(dtype=wide.dtype), 1)).astype(losses.dtype)

    return _with_arguments_of(loss_fn, loss)


def _check_user(user: PyTree) -> tuple[PyTree, jax.Array]:
    """Return the examples of a user and their mask. Raise unless they are valid."""
    is_pair = isinstance(user, tuple | list) and len(user) >= 2 and dtype_name(user[1]) == "bool"
    lengths = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(user[0])} if is_pair else set()
    if len(lengths) != 1 or () in lengths:
        raise ValueError(
            "`user` must be a pair (examples, mask), with a row and a bool for each example, got "
            f"{describe_arrays(user)}; pass a row of a UserBatch, or an example's loss to `fit`."
        )
    check_mask(user[1], *lengths.pop())
    return user[0], user[1]


def call_or_explain(loss_fn: LossFn, params: optax.Params, example: PyTree) -> PyTree:
    """Call the loss of one example. If the loss fails, raise an error that explains the cause."""
    try:
        return loss_fn(params, example)
    except Exception as error:
        raise_explained(error, loss_fn, params, example)


def raise_explained(
    error: Exception, loss_fn: LossFn, params: optax.Params, example: PyTree
) -> NoReturn:
    """Raise an error that explains why a loss failed, or `error` itself if no cause is found."""
    sentence = explain_failure(error, loss_fn, params, example)
    note = (
        "`loss_fn(params, example)` was called with one example without batch axis, "
        f"{describe_arrays(_shapes(example))}. If a batch has several arrays, the example is one "
        "tuple. To get a batch axis of length 1, pass keep_batch_axis=True (for `fit`, pass "
        "`training.keep_batch_axis(loss_fn)`)."
    )
    if sentence is None:
        error.add_note(note)
        raise error
    kind = type(error) if type(error) in _KEPT_ERRORS else ValueError
    explained = kind(sentence)
    for each in (*getattr(error, "__notes__", ()), note):
        explained.add_note(each)
    raise explained from error


def explain_failure(
    error: Exception,
    loss_fn: LossFn,
    params: optax.Params,
    example: PyTree,
    *,
    batched: bool = False,
) -> str | None:
    """Return one sentence that explains why a loss failed, or None if no cause is found.

    With `batched`, `loss_fn` is the loss of a whole batch, and `example` is a batch.
    """
    layer = batch_norm_in_traceback(error)
    if layer:
        return batch_norm_sentence([layer])
    if type(error).__name__ in _FLAX_REMEDIES:
        reason = str(error).splitlines()[0].split(" (https")[0].rstrip(".")
        got = f"got an error of Flax, {reason}; {_FLAX_REMEDIES[type(error).__name__]}"
        return f"`loss_fn` must depend only on its arguments, {got}."
    if "NoneType" in str(error) and None in jax.tree.leaves(params, is_leaf=lambda x: x is None):
        return (
            "`loss_fn` must combine a filtered model before it calls the model, got None for a "
            "part of the model; split the model by `params, static = eqx.partition(model, "
            "eqx.is_inexact_array)`, and begin with `model = eqx.combine(params, static)`."
        )
    params, one = _shapes(params), _shapes(example)
    rows = None if batched else _shapes(example, _TRIAL_BATCH_SIZE)
    demand = f"`loss_fn` must take parameters and {'a batch' if batched else 'one example'}"
    if _returns_a_loss(partial(call_with_any_key, loss_fn), params, one):
        if not (needs_key(loss_fn) and "missing" in str(error)):
            return None
        return (
            f"{demand}, got a function that also needs a key; pass the batch (examples, "
            "jax.random.split(key, n)) and the loss `lambda params, example: loss_fn(params, "
            "*example)`, or use `training.fit`, which makes the keys itself."
        )
    for call, sample, advice in _likely_calls(loss_fn, one, rows):
        if sample is not None and _returns_a_loss(call, params, sample):
            return demand + advice
    return None


def _likely_calls(
    loss_fn: LossFn, one: PyTree, rows: PyTree
) -> Iterator[tuple[_Call, PyTree, str]]:
    """Yield triples (call, example, advice) for calls that the user may have intended.

    The advice ends the error message. `one` and `rows` have the shapes of one example and a batch.
    """

    def scalar(x: jax.Array) -> jax.Array:  # for examples of an array of shape (n, 1)
        return x[0] if x.shape == (1,) else x

    call_with_key = partial(call_with_any_key, loss_fn)
    yield (
        average_examples(call_with_key),
        one,
        ", which is a user here, got the loss of a single example of a user; pass "
        "`training.average_examples(loss_fn)`.",
    )
    calls_with_parts: dict[str, _Call] = {
        "*example": lambda params, example: loss_fn(params, *_parts(example, tuple | list)),
        "**example": lambda params, example: loss_fn(params, **_parts(example, dict)),
    }
    for written, call in calls_with_parts.items():
        advice = (
            ", got a function that takes the parts of the example as arguments; write "
            f"`lambda params, example: loss_fn(params, {written})`"
        )
        remark = ", and remove vmap and the mean over the batch from the loss."
        yield call, one, f"{advice}."
        yield call, rows, f" without batch axis{advice}{remark}"
    yield (
        call_with_key,
        rows,
        f", got the loss of a whole batch: it fails on {describe_arrays(one)} and works on "
        f"{describe_arrays(rows)}; remove vmap and the mean over the batch from the loss, or pass "
        "keep_batch_axis=True, which calls it on batches of one example (for `fit`, pass "
        "`training.keep_batch_axis(loss_fn)`; for `check_model`, pass batched=True).",
    )
    yield (
        lambda params, example: call_with_key(example, params),
        one,
        ", got a function that takes the example first; write "
        "`lambda params, example: loss_fn(example, params)`.",
    )
    yield (
        lambda params, example: loss_fn(params, jax.random.key(0), example),
        one,
        ", and then a key, got a function that takes the key before the example; write "
        "`lambda params, example, key: loss_fn(params, key, example)`.",
    )
    yield (
        lambda params, example: call_with_key(params, jax.tree.map(scalar, example)),
        one,
        ", got arrays of shape (1,) in the example, and a loss that works with scalars; remove the "
        "last axis of such arrays from the data, as in labels[:, 0].",
    )
    yield (
        lambda params, example: call_with_key({"params": params}, example),
        one,
        ", got a function that takes its parameters in a dict; write "
        '`lambda params, example: loss_fn({"params": params}, example)`.',
    )


def _parts(example: PyTree, kind: PyTree) -> PyTree:
    """Return `example`. Raise unless it is of type `kind` and has two entries or more."""
    if not (isinstance(example, kind) and len(example) > 1):
        raise TypeError("the example has no such parts")
    return example


def _returns_a_loss(function: _Call, params: optax.Params, example: PyTree) -> bool:
    """Return whether a call returns one real number, or one real number per row of `example`."""
    try:
        found = jax.eval_shape(function, params, example)
    except Exception:
        return False
    value = found[0] if isinstance(found, tuple) and found else found
    lengths = {leaf.shape[:1] for leaf in jax.tree.leaves(example)}
    return is_floating(value) and (value.shape == () or {value.shape} == lengths)


def _shapes(tree: PyTree, *rows: int) -> PyTree:
    """Return the shapes and dtypes of all leaves, with leading axes of the sizes `rows` added."""

    def describe(leaf: PyTree) -> jax.ShapeDtypeStruct:
        dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
        return jax.ShapeDtypeStruct((*rows, *jnp.shape(leaf)), dtype)

    return jax.tree.map(describe, tree)
