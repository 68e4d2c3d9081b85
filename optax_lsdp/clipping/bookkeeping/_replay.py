"""Replay: the equations run again, with a tap at every site, whose cotangent is the site's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_lsdp._jaxpr import ClosedJaxpr, Equation, body, evaluate, is_literal
from optax_lsdp.clipping.bookkeeping._sites import (
    REMATERIALISED,
    Path,
    Site,
    carried_unchanged,
    is_derived,
    is_transparent,
    scan_parts,
)

Sites = Mapping[Path, Site]
Taps = Mapping[Path, jax.Array]  # zeros, added to the output of each site
Kept = dict[Path, jax.Array]  # the operand of which each site's factors are made


class Value(NamedTuple):
    """A value twice: as it is differentiated, and, if it is a weight, as sites use it.

    Sites take the constant, so that their parameter's gradient is not formed.
    """

    active: Any
    weight: Any = None


def replay(
    closed: ClosedJaxpr, inputs: Sequence[Value], sites: Sites, taps: Taps, path: Path = ()
) -> tuple[list[Value], Kept]:
    """Return the outputs of a program, and the operand that each of its sites keeps."""
    jaxpr = closed.jaxpr
    kept: Kept = {}
    values = {v: Value(c, c) for v, c in zip(jaxpr.constvars, closed.consts, strict=True)}
    values |= zip(jaxpr.invars, inputs, strict=True)

    def read(atom: Any) -> Value:
        return Value(atom.val, atom.val) if is_literal(atom) else values[atom]

    for number, equation in enumerate(jaxpr.eqns):
        here = (*path, number)
        operands = [read(atom) for atom in equation.invars]
        outputs, more = _replay_equation(equation, operands, sites, taps, here)
        values |= zip(equation.outvars, outputs, strict=True)
        kept |= more
    return [read(atom) for atom in jaxpr.outvars], kept


def _replay_equation(
    equation: Equation, operands: list[Value], sites: Sites, taps: Taps, path: Path
) -> tuple[list[Value], Kept]:
    if path in sites:
        return _replay_site(equation, operands, sites[path], taps, path)
    name = equation.primitive.name
    weights = [operand.weight for operand in operands]
    if is_transparent(equation, weights):
        return replay(body(equation), operands, sites, taps, path)
    if any(site[: len(path)] == path for site in sites):
        if name in REMATERIALISED:
            return _replay_checkpoint(equation, operands, sites, taps, path)
        if name == "scan":
            return _replay_scan(equation, operands, sites, taps, path)
        return _replay_cond(equation, operands, sites, taps, path)
    outputs = evaluate(equation, [operand.active for operand in operands])
    if is_derived(equation, weights):
        known = all(operand.active is operand.weight for operand in operands)
        return list(map(Value, outputs, outputs if known else evaluate(equation, weights))), {}
    results = list(map(Value, outputs))
    return _carry_weights(equation, operands, results) if name == "scan" else results, {}


def _replay_site(
    equation: Equation, operands: list[Value], site: Site, taps: Taps, path: Path
) -> tuple[list[Value], Kept]:
    actives = [operand.active for operand in operands]
    kept = actives[site.rule.kept(equation, site.place)]
    actives[site.place] = operands[site.place].weight
    (output,) = evaluate(equation, actives)
    return [Value(output + taps[path])], {path: kept}


def _inside(path: Path, taps: Taps) -> dict[Path, jax.Array]:
    """Return the taps of the sites inside of the equation at `path`."""
    return {site: tap for site, tap in taps.items() if site[: len(path)] == path}


def _replay_checkpoint(
    equation: Equation, operands: list[Value], sites: Sites, taps: Taps, path: Path
) -> tuple[list[Value], Kept]:
    params = equation.params

    def run(operands: list[Value], taps: Taps) -> tuple[list[Any], Kept]:
        outputs, kept = replay(body(equation), operands, sites, taps, path)
        return [output.active for output in outputs], kept

    again = jax.checkpoint(run, policy=params["policy"], prevent_cse=params["prevent_cse"])
    outputs, kept = again(operands, _inside(path, taps))
    return list(map(Value, outputs)), kept


def _replay_scan(
    equation: Equation, operands: list[Value], sites: Sites, taps: Taps, path: Path
) -> tuple[list[Value], Kept]:
    """Run a scan whose taps come in slice by slice, and whose kept operands go out stacked."""
    consts, carry, slices = scan_parts(equation, operands)
    unchanged = carried_unchanged(equation)
    same = [item.active is item.weight for item in slices]  # not to be sliced twice
    apart = [None if alike else item.weight for item, alike in zip(slices, same, strict=True)]

    def step(carried: list[Any], sliced: Any) -> tuple[list[Any], Any]:
        actives, weights, inner = sliced
        carries = [
            Value(active, item.weight if fixed else None)
            for active, item, fixed in zip(carried, carry, unchanged, strict=True)
        ]
        parts = [
            Value(active, active if alike else weight)
            for active, weight, alike in zip(actives, weights, same, strict=True)
        ]
        outputs, kept = replay(body(equation), [*consts, *carries, *parts], sites, inner, path)
        results = [output.active for output in outputs]
        return results[: len(carry)], (results[len(carry) :], kept)

    params = equation.params
    last, (stacked, kept) = jax.lax.scan(
        step,
        [item.active for item in carry],
        ([item.active for item in slices], apart, _inside(path, taps)),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return _carry_weights(equation, operands, list(map(Value, [*last, *stacked]))), kept


def _carry_weights(equation: Equation, operands: list[Value], results: list[Value]) -> list[Value]:
    """Let a weight that a scan only hands on remain a weight."""
    _, carry, _ = scan_parts(equation, operands)
    for place, unchanged in enumerate(carried_unchanged(equation)):
        if unchanged:
            results[place] = carry[place]
    return results


def _replay_cond(
    equation: Equation, operands: list[Value], sites: Sites, taps: Taps, path: Path
) -> tuple[list[Value], Kept]:
    """Run the branches; those not taken keep zeros, of which no gradient is made."""
    index, *arguments = operands

    def branch(number: int, closed: ClosedJaxpr) -> Any:
        def run(arguments: list[Value], taps: Taps) -> tuple[list[Any], Kept]:
            outputs, kept = replay(closed, arguments, sites, taps, (*path, number))
            return [output.active for output in outputs], kept

        return run

    runs = [branch(*item) for item in enumerate(equation.params["branches"])]
    inner = _inside(path, taps)
    shapes: dict[Path, Any] = {}
    for run in runs:
        shapes |= jax.eval_shape(run, arguments, inner)[1]

    def with_zeros(run: Any) -> Any:
        def padded(arguments: list[Value], taps: Taps) -> tuple[list[Any], Kept]:
            outputs, kept = run(arguments, taps)
            zeros = {p: jnp.zeros(s.shape, s.dtype) for p, s in shapes.items() if p not in kept}
            return outputs, zeros | kept

        return padded

    outputs, kept = jax.lax.switch(index.active, list(map(with_zeros, runs)), arguments, inner)
    return list(map(Value, outputs)), kept
