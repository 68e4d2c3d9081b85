"""The methods of smoothing: functions that multiply an array by (I + (−1)ⁿ σ Lⁿ)⁻¹.

Here σ is `smoothing`, n is `order`, and L is the sum of the second differences along the axes on
which entries are neighbours. `_dispatch` chooses a method for each leaf.
"""

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
