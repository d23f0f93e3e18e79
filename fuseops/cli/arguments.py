"""What commands take as values: what is wrong with one is said with the usage of the command."""

import argparse

from fuseops.errors import FuseOpsError
from fuseops.offload.arguments import parse_bytes


def positive(text: str) -> int:
    """A whole number from 1 on."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number, 1 or more, got {text!r}")
    return int(text)


def amount(text: str) -> int:
    """Bytes: a number, or text such as 11GiB."""
    try:
        return parse_bytes(text, "")
    except FuseOpsError:
        raise argparse.ArgumentTypeError(
            f"expected bytes such as 11GiB, 500MB or 1073741824, got {text!r}"
        ) from None
