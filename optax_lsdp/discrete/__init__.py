"""Exact discrete noise: quantized gradients, summed and noised in whole numbers."""

from optax_lsdp.discrete._quantized import (
    AddDiscreteNoiseState,
    QuantizedSum,
    add_discrete_gaussian_noise,
    quantized_grad,
    quantized_sensitivity,
)

__all__ = ["AddDiscreteNoiseState", "QuantizedSum", "add_discrete_gaussian_noise"]
__all__ += ["quantized_grad", "quantized_sensitivity"]
