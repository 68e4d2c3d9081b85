"""The methods that solve A u = v, one file each; `_dispatch` chooses among them."""

from optax_lsdp.smoothing.methods.banded import band_reach, smooth_banded
from optax_lsdp.smoothing.methods.halo import smooth_halo, smooth_recursive
from optax_lsdp.smoothing.methods.spectral import smooth_fft, smooth_matrix

__all__ = ["band_reach", "smooth_banded", "smooth_fft", "smooth_halo", "smooth_matrix"]
__all__ += ["smooth_recursive"]
