"""The journal of a run: a line before every step, so that after a crash nothing goes uncounted.

A step that is repeated with the same key on the same clipped sum gives the same result, and costs
no privacy. With the same key on a different sum it would reveal the difference of the two sums. So
the journal stores the fingerprint under which steps were taken, and a hash of the examples that
each step has read. A run whose fingerprint or examples have changed restarts with a new nonce,
hence with new noise and new batches, and its repeated steps are counted twice.

The files, one JSON object per line:

- `journal.jsonl`, written by the first process: `{"nonce", "fingerprint", "start"}` at each start or
  restart, and `{"announced"}`, the step before which the run may have arrived.
- `examples-<process>.jsonl`, written by each process: `{"nonce", "step", "examples"}`.
"""

from __future__ import annotations

import json
import os
import secrets
from io import FileIO
from pathlib import Path

import jax

from optax_lsdp._checks import Json
from optax_lsdp.training._files import cannot_write
from optax_lsdp.training._multihost import broadcast_text
