"""Importing this registers every kernel op."""

from fuseops.kernels import activation, bias, norm, quantize

__all__ = ["activation", "bias", "norm", "quantize"]
