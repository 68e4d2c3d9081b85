"""The methods that solve A u = v, one file each; `_dispatch` chooses among them."""

from optax_lsdp.smoothing.methods.banded import (
    Blocking,
    band_reach,
    choose_blocking,
    smooth_banded,
    smooth_in_blocks,
)
from optax_lsdp.smoothing.methods.halo import smooth_halo, smooth_recursive
from optax_lsdp.smoothing.methods.spectral import smooth_fft, smooth_matrix

__all__ = ["band_reach", "smooth_banded", "smooth_fft", "smooth_halo", "smooth_matrix"]
__all__ += ["Blocking", "choose_blocking", "smooth_in_blocks", "smooth_recursive"]
