"""Check whether a model can be trained privately.

`check_model` traces the loss. In the trace, it finds layers of batch normalisation, and examples
that the loss closes over. It computes the gradient of every example, to find values that are not
finite, and parameters without a gradient. In a loss of whole batches, `_mixing` searches for layers
that mix examples.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lsdp._trees as trees
from optax_lsdp._checks import check_function, is_number
from optax_lsdp._isolation import batch_norm_sentence, batch_norms, check_no_layer_state
from optax_lsdp._jaxpr import ClosedJaxpr, constants, equations
from optax_lsdp._keys import is_key
from optax_lsdp._loss import LossFn, call_with_any_key, explain_failure, takes_key
from optax_lsdp._types import PyTree
from optax_lsdp.clipping import clipped_grad
from optax_lsdp.model_check._mixing import Rows, mixing

_CHUNK = 8  # examples whose gradients are in memory at the same time
_STEP = 1e-2  # size of a perturbation, relative to max(1, root mean square of the leaf)
_REMEDY = "look for labels out of range, large scales, logarithms and divisions by zero"


@dataclass(frozen=True)
class ModelReport:
    """What is wrong with a model. The report reveals facts about the batch that was checked.

    Attributes:
        problems: one sentence for each obstacle to private training.
        notes: one sentence for each finding that may be intended, such as an unused parameter.
    """

    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        verdict = "fit for private training" if self.passed else "NOT fit for private training"
        lines = [f"{verdict}, but:" if self.passed and self.notes else verdict]
        return "\n".join([*lines, *(f"- {line}" for line in (*self.problems, *self.notes))])


def check_model(
    loss_fn: LossFn, params: optax.Params, batch: PyTree, *, batched: bool = False
) -> ModelReport:
    """Report whether a model can be trained privately and, if not, which layer prevents it.

    The report lists:

    - in a loss of whole batches, layers that mix examples: the loss or gradient of one example
      depends on other examples, as in batch normalisation, batch statistics and auxiliary losses;
    - in a loss of one example, layers of batch normalisation, and operations that `clipped_grad`
      refuses because they can mix or reveal examples, such as callbacks;
    - losses and gradients that are not finite;
    - random numbers that are the same for all examples, as a note;
    - parameters that get no gradient, neither at `params` nor at a point nearby.

    Args:
        loss_fn: `loss_fn(params, example)` returns a scalar for one example, as for `clipped_grad`.
            With `batched`, `loss_fn(params, batch)` returns each example's loss, their mean or
            their sum. Both kinds of loss may take a key as a third argument, as for `fit`.
        params: the parameters at the start of training.
        batch: examples with a leading axis. Use public examples, because the report reveals facts
            about them. Only the first eight are searched for mixing.
        batched: whether `loss_fn` takes a whole batch.

    >>> def normalised(w, batch):
    ...     centred = batch - batch.mean(axis=0)
    ...     return ((centred @ w) ** 2).mean()
    >>> batch = jax.random.normal(jax.random.key(0), (4, 3))
    >>> report = check_model(normalised, jnp.ones(3), batch, batched=True)
    >>> report.passed
    False
    """
    trees.check_not_empty("params", params)
    try:
        check_no_layer_state(params)
        check_function(
            "loss_fn", loss_fn, f"of parameters and {'a batch' if batched else 'one example'}"
        )
        loss = partial(call_with_any_key, loss_fn) if takes_key(loss_fn) else loss_fn
    except (TypeError, ValueError) as error:
        return ModelReport((str(error),))
    trees.check_floating("params", params)
    size = _check_batch(batch, batched)
    batch = jax.tree.map(jnp.asarray, batch)
    batch = jax.tree.map(lambda x: x if is_key(x) else np.asarray(x), batch)
    count = min(size, _CHUNK)
    few = jax.tree.map(lambda x: x[:count], batch)
    sample = few if batched else jax.tree.map(lambda x: x[0], batch)
    scan = partial(_scan, jax.jit(partial(_scan_chunk, loss, batched)))
    try:
        program, value = jax.make_jaxpr(loss, return_shape=True)(params, sample)
        if problem := _problem_of_value(value, [(), (count,)] if batched else [()]):
            return ModelReport((f"The loss must {problem}.",))
        if not batched:
            # `batch_norms` below finds batch normalisation, so ignore the warning about it.
            with warnings.catch_warnings(action="ignore"):
                jax.eval_shape(clipped_grad(loss, clip_norm=1.0), params, few)
        found = scan(params, batch, size)
    except Exception as error:
        sentence = explain_failure(error, loss_fn, params, sample, batched=batched)
        if sentence is None and not isinstance(error, TypeError | ValueError):
            raise
        if sentence is None:
            sentence = str(error).splitlines()[0]
            if not sentence.startswith("`loss_fn` must"):  # one of this library's own messages
                sentence = (
                    f"The loss cannot be differentiated: {sentence}; pass batched=True for a loss "
                    "of whole batches, and if the batch is (examples, keys), let the loss take "
                    "(example, key) as its example."
                )
        return ModelReport((sentence,))
    layers = [] if batched else batch_norms(program)
    problems = [batch_norm_sentence(layers)] if layers else []
    problems += _not_finite(found, params, "batches" if batched else "examples")
    if any(_begins_with(constant, few) for constant in constants(program)):
        problems.append(
            "The loss closes over the examples of its batch, which then count as public; use only "
            "the example that is passed to the loss."
        )
    if batched and not problems:
        problems += mixing(loss, params, few, count)
    has_gradient = found.has_gradient
    if not has_gradient.all():
        has_gradient = has_gradient | scan(_perturb(params), few, count).has_gradient
    without = [path or "The parameter" for path in compress(_paths(params), ~has_gradient)]
    if not has_gradient.any():
        problems.append(
            "No parameter gets a gradient: the loss does not depend on the parameters, or only "
            "through functions without a derivative, such as argmax, round or stop_gradient."
        )
        without = []
    notes = [f"{name} gets no gradient from these examples, only noise." for name in without]
    if not takes_key(loss_fn) and _draws_shared_numbers(program, sample):
        notes.append(
            "The loss draws random numbers, but takes no key: all examples and steps get the same "
            "numbers, for example in dropout. Let it take a key, `loss_fn(params, example, key)`."
        )
    return ModelReport(tuple(problems), tuple(notes))


def _draws_shared_numbers(program: ClosedJaxpr, sample: PyTree) -> bool:
    """Return whether a loss draws random numbers although its `sample` of the data has no key."""
    if any(is_key(leaf) or leaf.dtype == jnp.uint32 for leaf in jax.tree.leaves(sample)):
        return False
    names = {equation.primitive.name for equation in equations(program.jaxpr)}
    return not names.isdisjoint({"random_bits", "threefry2x32", "rng_bit_generator"})


def _check_batch(batch: PyTree, batched: bool) -> int:
    """Return the number of examples. Raise unless all leaves are rows of numbers or keys."""
    for path, leaf in jax.tree.leaves_with_path(batch):
        if not (hasattr(leaf, "dtype") or is_number(leaf)):
            raise TypeError(
                f"`batch` must hold arrays, got {type(leaf).__name__}; pass arrays of some "
                "examples, such as the `arrays` of a UserData."
            )
        if hasattr(leaf, "dtype") and not (trees.is_numeric(leaf) or is_key(leaf)):
            raise TypeError(
                f"`batch` must hold numbers or keys, got {trees.dtype_name(leaf)} at "
                f"{trees.path_name(path)!r}; encode text and dates as numbers first."
            )
    size = trees.count_examples(batch, "move the axis of examples to the front with jnp.moveaxis")
    if batched and size < 2:
        raise ValueError("`batch` must hold two examples or more with batched=True, got one.")
    return size


def _paths(params: optax.Params) -> list[str]:
    return [trees.path_name(path) for path, _ in jax.tree.leaves_with_path(params)]


def _problem_of_value(value: PyTree, shapes: list[tuple[int, ...]]) -> str:
    """Return what is wrong with a loss value, or "" if it is real and has one of `shapes`."""
    if not hasattr(value, "shape"):
        return f"be one array, got {type(value).__name__}; return no aux"
    if value.shape not in shapes:
        return (
            f"have shape {' or '.join(map(str, shapes))}, got {value.shape}; write a loss of one "
            "example without batch axis, or pass batched=True for a loss of whole batches"
        )
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return f"be a real number, got {value.dtype}, which has no gradient"
    return ""


def _begins_with(constant: PyTree, batch: PyTree) -> bool:
    """Return whether the first rows of a constant equal the rows of an array of the batch."""

    def bits(array: Rows) -> np.ndarray:
        return np.asarray(jax.random.key_data(array) if is_key(array) else array)

    return any(
        jnp.shape(constant)[:1] >= leaf.shape[:1]
        and constant.shape[1:] == leaf.shape[1:]
        and constant.dtype == leaf.dtype
        and (leaf.ndim > 1 or trees.is_floating(leaf))  # a few labels may be equal by chance
        and np.array_equal(bits(constant)[: len(leaf)], bits(leaf))
        for leaf in jax.tree.leaves(batch)
    )


class _ScanResult(NamedTuple):
    """Which losses and gradients of a batch are finite, and which leaves get a gradient."""

    finite_losses: Rows  # (examples,)
    finite_gradients: Rows  # (examples, leaves)
    has_gradient: Rows  # (leaves,): whether any example's gradient is not zero


def _scan_chunk(loss: LossFn, batched: bool, params: optax.Params, chunk: PyTree) -> _ScanResult:
    """Check losses and gradients of some examples. If `batched`, `loss` takes a whole batch."""
    if batched:
        found = jax.value_and_grad(lambda p: jnp.mean(loss(p, chunk)))(params)
        values, grads = jax.tree.map(lambda x: x[None], found)
    else:
        values, grads = jax.vmap(jax.value_and_grad(loss), (None, 0))(params, chunk)
    rows = [leaf.reshape(len(values), -1) for leaf in jax.tree.leaves(grads)]
    finite = jnp.stack([jnp.isfinite(row).all(axis=1) for row in rows], axis=1)
    has_gradient = jnp.stack([jnp.any(row != 0) for row in rows])
    return _ScanResult(jnp.isfinite(values), finite, has_gradient)


def _scan(scan_chunk: LossFn, params: optax.Params, batch: PyTree, size: int) -> _ScanResult:
    """Check all examples in chunks of equal size. The last chunk may overlap the previous chunk."""
    width = min(size, _CHUNK)
    starts = sorted({*range(0, size - width + 1, width), size - width})
    chunks = [jax.tree.map(lambda x, s=s: x[s : s + width], batch) for s in starts]
    parts = [jax.device_get(scan_chunk(params, chunk)) for chunk in chunks]
    losses, gradients, has_gradient = (list(part) for part in zip(*parts, strict=True))
    if len(losses[0]) == width:  # one entry per example, not one per chunk
        overlap = len(starts) * width - size
        losses[-1], gradients[-1] = losses[-1][overlap:], gradients[-1][overlap:]
    return _ScanResult(
        np.concatenate(losses), np.concatenate(gradients), np.any(has_gradient, axis=0)
    )


@jax.jit
def _perturb(params: optax.Params) -> optax.Params:
    """Return slightly changed parameters. Leaves that were zero, like LoRA's B, become nonzero."""
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(0), len(leaves))

    def move(x: jax.Array, key: jax.Array) -> jax.Array:
        wide = trees.widen(x)
        size = _STEP * jnp.maximum(jnp.sqrt(jnp.mean(jnp.square(wide))), 1)
        return (wide + size * jax.random.normal(key, wide.shape, wide.dtype)).astype(x.dtype)

    points = [move(jnp.asarray(x), key) for x, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, points)


def _not_finite(found: _ScanResult, params: optax.Params, what: str) -> Iterator[str]:
    """Yield sentences about losses and gradients that are not finite.

    A loss may be NaN although its gradient is finite, for example if a label is out of range.
    """
    broken, sound = ~found.finite_losses, found.finite_gradients.all(axis=1)
    count, size = int(broken.sum()), len(broken)
    if count:
        trained = int((broken & sound).sum())
        effect = f"{trained} of their gradients are finite, and still train the model; the others "
        effect += "contribute nothing"
        if trained == count:
            effect = "their gradients are finite, and still train the model"
        elif trained == 0:
            effect = "their gradients are not finite either, and contribute nothing"
        first = f", first at index {int(np.argmax(broken))}" if size > 1 else ""
        yield f"The loss is not finite for {count} of {size} {what}{first}: {effect}; {_REMEDY}."
    for path, finite in zip(_paths(params), found.finite_gradients.T, strict=True):
        alone = ~finite & ~broken
        if alone.any():
            of = f" of {path!r}" if path else ""
            yield (
                f"The gradient{of} is not finite for {int(alone.sum())} of {size} {what}, although "
                f"the loss is finite: these {what} contribute nothing to private training; "
                f"{_REMEDY}."
            )
