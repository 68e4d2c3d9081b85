"""How many cases a fuzz run tries, and the largest values that it finds."""

import os
from collections import Counter

import jax

IS_LONG = bool(os.environ.get("FUZZ"))
_LARGEST: dict[str, float] = {}
_TRIED: Counter[str] = Counter()
_MEANING = {
    "clipped": "largest contribution of one example, in clip norms",
    "moved": "largest change by one example among others, in clip norms",
    "order": "largest effect of the order of summation of 6 examples, in clip norms",
    "crowd": "the same for 1,024 examples",
    "models": "random models on which both engines agree",
}


def example_counts():
    """Return how many cases to try of a cheap law, of a large batch, and of a law that compiles."""
    return (4_500, 500, 1_500) if IS_LONG else (90, 20, 6)


def saw(**values):
    """Count a case, and remember the largest value of each name."""
    for name, value in values.items():
        _TRIED[name] += 1
        _LARGEST[name] = max(_LARGEST.get(name, 0.0), float(value))
    if "models" in values and _TRIED["models"] % 100 == 0:
        jax.clear_caches()  # or the process runs out of memory maps


def summary():
    """Return the summary of a run, line by line."""
    total = sum(_TRIED[name] for name in ("clipped", "moved", "crowd", "models"))
    yield f"fuzz: {total:,} examples"
    for name, meaning in _MEANING.items():
        value = f"{_TRIED[name]:,}" if name == "models" else f"{_LARGEST.get(name, 0.0):.9g}"
        yield f"{meaning}: {value}"
