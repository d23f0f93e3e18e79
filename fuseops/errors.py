"""The errors of fuseops. Each says what is wrong, where, what was given, what was expected, and what to do."""


class FuseOpsError(Exception):
    """`FuseOpsError` is the base of every error that fuseops raises on purpose."""


class SideInputError(FuseOpsError, TypeError):
    """A side input is missing, unknown, written twice, or not a tensor."""


class FusionMissError(FuseOpsError):
    """Under strict fusion a protected rule did not fire; the message carries the reasons."""


class ShapeError(FuseOpsError, ValueError):
    """A tensor does not have the shape that an op expects."""


class DtypeError(FuseOpsError, RuntimeError):
    """One GEMM was given tensors of two dtypes."""


class RecomputationError(FuseOpsError):
    """A recomputation runs under other settings than its forward did."""


class DoubleBackwardError(FuseOpsError, RuntimeError):
    """A second derivative was asked of a node that has only a first one."""


class InPlaceError(FuseOpsError, RuntimeError):
    """A saved tensor was modified in place between the forward and the backward."""
