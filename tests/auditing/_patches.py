"""Plant a bug in the library: replace attributes, or rewrite source text, while a context lasts.

Every patch names its target as text, "module:attribute". It looks the target up when the bug is
planted. If the library no longer has it, `Patch.prepare` raises `StaleMutation`.
"""

import inspect
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pkgutil import resolve_name
from typing import Any, NamedTuple
from unittest import mock


class StaleMutation(Exception):
    """The table of mutations names code that the library no longer has."""


class Patch(NamedTuple):
    """A change of one attribute.

    Attributes:
        target: "module:attribute", or "module:Class.attribute".
        change: a function from the present value to the wrong one.
    """

    target: str
    change: Callable[[Any], object]

    def prepare(self):
        """Return a context that patches the target; raise `StaleMutation` if there is none."""
        module, _, path = self.target.partition(":")
        owner_path, _, name = path.rpartition(".")
        try:
            owner = resolve_name(f"{module}:{owner_path}") if owner_path else import_module(module)
            present = getattr(owner, name)
        except (ImportError, AttributeError) as error:
            raise StaleMutation(f"there is no {self.target}: {error}") from error
        return mock.patch.object(owner, name, self.change(present))


class Mutation(NamedTuple):
    """A bug in the library's own code.

    Attributes:
        audit: the name of the audit that must reject it.
        patches: where the bug is, and what is wrong there.
        models: the hard models that suffice to show it, for audits of hard models.
    """

    audit: str
    patches: tuple[Patch, ...]
    models: tuple[str, ...] = ()


def replace(target, new):
    """Replace a value."""
    return Patch(target, lambda present: new)


def wrap(target, wrapper):
    """Replace a function by `wrapper(function, *args, **options)`."""
    return Patch(target, lambda present: partial(wrapper, present))


def rewrite(target, old, new, *importers):
    """Replace source text of a function, there and in other modules that import it."""
    name = target.partition(":")[2]

    def change(function):
        source = textwrap.dedent(inspect.getsource(function))
        if source.count(old) != 1:
            raise StaleMutation(
                f"{target} has {source.count(old)} times the text {old!r}, not once"
            )
        scope = dict(vars(sys.modules[function.__module__]))
        exec("from __future__ import annotations\n" + source.replace(old, new), scope)
        return scope[name]

    return tuple(Patch(place, change) for place in (target, *(f"{m}:{name}" for m in importers)))
