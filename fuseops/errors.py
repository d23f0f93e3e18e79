"""The errors that fuseops raises."""


class FuseOpsError(Exception):
    """Base of every error that fuseops raises on purpose."""
