"""Importing this registers every kernel op."""

from fuseops.kernels import activation, bias, norm

__all__ = ["activation", "bias", "norm"]
