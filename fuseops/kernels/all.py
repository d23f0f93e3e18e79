"""Importing this registers every kernel op."""

from fuseops.kernels import activation, bias

__all__ = ["activation", "bias"]
