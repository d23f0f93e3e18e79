"""What the offload benchmark says: progress, provenance, tables."""

from __future__ import annotations

import datetime
import platform
import time
from typing import Any

import torch

import fuseops as fo

START = time.perf_counter()


def provenance(device: torch.device) -> dict[str, str]:
    """When and with what a figure was measured."""
    cuda = device.type == "cuda"
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fuseops": fo.__version__,
    }


def say(what: str) -> None:
    print(f"{time.perf_counter() - START:6.1f} s  {what}", flush=True)


def table(found: dict[str, dict[str, Any]]) -> str:
    lines = [f"{'way':20}{'ms':>9}{'host':>8}{'ratio':>8}{'quartiles':>16}{'peak':>7}{'moved':>7}"]
    for way, row in found.items():
        spread = "{:.4f}-{:.4f}".format(*row["quartiles"]) if "quartiles" in row else ""
        lines.append(
            f"{way:20}{row['ms']:9.2f}{row['host_ms']:8.1f}{row.get('ratio', 0):8.4f}{spread:>16}"
            f"{row.get('peak_gib', 0):7.2f}{row.get('moved_gib', 0):7.2f}"
        )
        if "predicted" in row:
            guess = row["predicted"]
            lines[-1] += (
                f"  predicted {guess['peak_gib']:.2f} GiB ({row['peak_error']:+.4f}), "
                f"{guess['ms']:.2f} ms ({row['time_error']:+.4f}), {guess['ratio']:.4f}; "
                f"{len(guess['recomputed'])} recomputed; lower {row['lower_over_predicted']:.4f}, "
                f"gone {row.get('gone_over_moved', 0):.4f}"
            )
    return "\n".join(lines)
