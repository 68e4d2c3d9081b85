"""The command line: `optax-lsdp`, or `python -m optax_lsdp`."""

from optax_lsdp.cli._parser import main

__all__ = ["main"]
