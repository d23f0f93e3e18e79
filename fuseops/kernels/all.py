"""Importing this registers every kernel op."""

from fuseops.kernels import activation, bias, norm, permute, quantize, routing

__all__ = ["activation", "bias", "norm", "permute", "quantize", "routing"]
