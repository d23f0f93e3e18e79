"""Importing this registers every kernel op."""

from fuseops.kernels import activation, bias, cast, norm, permute, quantize, router, routing

__all__ = ["activation", "bias", "cast", "norm", "permute", "quantize", "router", "routing"]
