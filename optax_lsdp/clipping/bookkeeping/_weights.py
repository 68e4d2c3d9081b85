"""Weights: what is known of a value that depends on the parameters alone, and on no example."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_lsdp._jaxpr import Equation, evaluate
from optax_lsdp.clipping.bookkeeping._views import Axis, View, viewed

Builder = Callable[[Sequence[jax.Array], dict[int, Any]], Any]


class Loop(NamedTuple):
    """A scan around an equation: its depth among all scans around it, and its length."""

    depth: int
    length: int


class Weight(NamedTuple):
    """A value made of parameters and constants.

    Attributes:
        leaves: which leaves of the parameters it depends on; none for a constant.
        build: (leaves, values already made) → the value, with a leading axis for each scan that
            slices it, outermost first.
        view: which entries it shows of the only leaf it depends on, if it is a view.
        show: leaf → the view of it, whatever its dtype; only where `view` is known.
        sliced: the scans that slice it, by depth, each with the axis of the leaf that it walks.
        pieces: the views that were concatenated to make it, if so, along `axis`.
    """

    leaves: frozenset[int]
    build: Builder
    view: View | None = None
    show: Callable[[jax.Array], jax.Array] = lambda leaf: leaf
    sliced: tuple[tuple[int, Axis], ...] = ()
    pieces: tuple[Weight, ...] = ()
    axis: int = 0

    def value(self, leaves: Sequence[jax.Array]) -> jax.Array:
        """Return the value for these leaves of the parameters."""
        return self.build(leaves, {})


def constant(value: Any) -> Weight:
    """Return what does not even depend on the parameters."""
    return Weight(frozenset(), lambda leaves, made: value)


def parameter(index: int, view: View) -> Weight:
    """Return a leaf of the parameters itself."""
    return Weight(frozenset([index]), lambda leaves, made: leaves[index], view)


def derived(equation: Equation, inputs: Sequence[Weight]) -> list[Weight]:
    """Return the outputs of an equation all of whose inputs are weights."""
    loops = sorted({depth: axis for weight in inputs for depth, axis in weight.sliced}.items())

    run = partial(_run, equation)
    for depth, _ in reversed(loops):
        sliced = [depth in dict(weight.sliced) for weight in inputs]
        run = jax.vmap(run, in_axes=tuple(0 if flag else None for flag in sliced))

    def build(leaves: Sequence[jax.Array], made: dict[int, Any]) -> list[Any]:
        if id(build) not in made:
            made[id(build)] = run(*(weight.build(leaves, made) for weight in inputs))
        return made[id(build)]

    leaves = frozenset[int]().union(*(weight.leaves for weight in inputs))
    if equation.primitive.name == "stop_gradient":
        leaves = frozenset()
    view = None
    if len(inputs) == 1 and inputs[0].view is not None:
        view = viewed(equation.primitive.name, equation.params, inputs[0].view)

    def show(leaf: jax.Array) -> jax.Array:
        before = inputs[0].show(leaf)
        casts = equation.primitive.name == "convert_element_type"
        return before if casts else run(before)[0]

    pieces: tuple[Weight, ...] = ()
    if equation.primitive.name == "concatenate" and all(weight.view for weight in inputs):
        pieces = tuple(inputs)

    def output(place: int, atom: Any) -> Weight:
        moves = jnp.issubdtype(atom.aval.dtype, jnp.inexact)  # integers have no gradient
        return Weight(
            leaves if moves else frozenset(),
            lambda leaves, made: build(leaves, made)[place],
            view,
            show,
            tuple(loops),
            pieces,
            equation.params.get("dimension", 0),
        )

    return [output(place, atom) for place, atom in enumerate(equation.outvars)]


def _run(equation: Equation, *values: Any) -> list[Any]:
    return evaluate(equation, values)


def slice_of(weight: Weight, loop: Loop) -> Weight:
    """Return what one iteration of a scan sees of a weight that the scan slices."""
    view, axis = None, (loop.length, 0)
    if weight.view is not None:
        axis, *inner = weight.view.axes
        view = View(tuple(inner), weight.view.offset)
    return weight._replace(view=view, sliced=(*weight.sliced, (loop.depth, axis)), pieces=())
