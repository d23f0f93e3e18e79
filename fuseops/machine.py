"""`machine_id` tells machines apart, for what ranks of one have together: memory, peers and process ids."""

import functools
import socket
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@functools.cache
def machine_id() -> tuple[str, str]:
    """The hostname, which two machines may share, and the id of the running kernel's boot; "" where there is none."""
    try:
        return socket.gethostname(), BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname(), ""
