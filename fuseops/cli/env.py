"""`fuseops env`: what runs here, and under which settings."""

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import statistics
import sys
from typing import Any

import torch

from fuseops.ops import scopes

from .show import as_json

VARIABLES = (
    "FUSEOPS_FUSION",
    "FUSEOPS_DISABLE",
    "FUSEOPS_CACHE_DIR",
    "FUSEOPS_LOG",
    "TRITON_INTERPRET",
)
COPY_BYTES, COPY_ROUNDS = 1 << 28, 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.add_argument(
        "--measure", action="store_true", help="measure copy bandwidth of the CUDA device"
    )


def run(args: argparse.Namespace) -> int:
    facts = describe()
    if args.measure:
        facts["measured"] = _measure()
    if args.json:
        as_json("env", **facts)
        return 0
    for title, values in facts.items():
        print(title)
        for name, value in values.items() if isinstance(values, dict) else enumerate(values):
            print(f"  {name:<18}  {value}")
    return 0


def describe() -> dict[str, Any]:
    """Versions, devices, backends and settings, as plain data."""
    settings = scopes.resolve(scopes.process.token)
    return {
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": _version("triton"),
            "fuseops": version(),
            "platform": platform.platform(),
        },
        "devices": [_device(k) for k in range(torch.cuda.device_count())]
        or ["cpu only: torch sees no CUDA device"],
        "backends": _backends(),
        "environment": {name: os.environ.get(name, "not set") for name in VARIABLES},
        "settings": {
            "fusion": settings.fusion,
            "disable": sorted(settings.disable),
            "recipe": None if settings.recipe is None else repr(settings.recipe),
        },
    }


def version() -> str:
    """The version of the code that runs, installed or not."""
    return str(sys.modules["fuseops"].__dict__["__version__"])


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _device(index: int) -> str:
    p = torch.cuda.get_device_properties(index)
    size = f"{p.total_memory / 2**30:.1f} GiB"
    return f"{p.name}, sm_{p.major}{p.minor}, {size}, {p.multi_processor_count} SMs"


def _backends() -> dict[str, str]:
    found = importlib.util.find_spec("triton") is not None
    cuda = torch.cuda.is_available()
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    why = "triton is not installed" if not found else "torch sees no CUDA device"
    return {
        "reference": "yes: plain torch, on any device",
        "triton on CUDA": "yes, where there is a kernel; the reference elsewhere"
        if found and cuda
        else f"no: {why}",
        "triton interpreter": "yes"
        if found and interpreted
        else "no: TRITON_INTERPRET is not 1"
        if found
        else f"no: {why}",
    }


def _measure() -> dict[str, str | float]:
    if not torch.cuda.is_available():
        return {"copy": "not measured: torch sees no CUDA device"}
    on_device = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    pinned = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    return {
        "device copy GB/s": 2 * _rate(torch.empty_like(on_device), on_device),  # reads and writes
        "host to device GB/s": _rate(on_device, pinned),
        "device to host GB/s": _rate(pinned, on_device),
    }


def _rate(target: torch.Tensor, source: torch.Tensor) -> float:
    """Median GB/s of copying source to target."""
    seconds = []
    for _ in range(COPY_ROUNDS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source, non_blocking=True)
        stop.record()
        stop.synchronize()
        seconds.append(start.elapsed_time(stop) / 1e3)
    return round(COPY_BYTES / statistics.median(seconds) / 1e9, 1)
