"""`fuseops env`: versions, devices, backends and settings, for bug reports."""

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from fuseops.errors import FuseOpsError
from fuseops.kernels import configs
from fuseops.offload.planning.hardware import Hardware
from fuseops.ops import scopes

from .terminal import print_json

VARIABLES = (
    "FUSEOPS_FUSION",
    "FUSEOPS_DISABLE",
    "FUSEOPS_CACHE_DIR",
    "FUSEOPS_LOG",
    "FUSEOPS_NVTX",
    "TRITON_INTERPRET",
)

PACKAGES = ("triton", "numpy", "transformers", "peft", "accelerate")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure the CUDA device: copies by size and direction, memory, matrix products",
    )


def run(args: argparse.Namespace) -> int:
    facts = describe()
    if args.measure:
        facts["measured"] = _measure()
    if args.json:
        print_json("env", **facts)
        return 0
    at = _issue_url()
    print(f"fuseops env, for a report at {at}\n" if at else "fuseops env\n")
    for title, values in facts.items():
        print(title)
        for name, value in values.items() if isinstance(values, dict) else enumerate(values):
            print(f"  {name:<18}  {value}")
    return 0


def _issue_url() -> str | None:
    """The URL for bug reports, from the package's metadata; None where it is not installed."""
    try:
        urls = importlib.metadata.metadata("fuseops").get_all("Project-URL") or []
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        return None
    return next((u.partition(", ")[2] for u in urls if u.startswith("Issues, ")), None)


def describe() -> dict[str, Any]:
    """Versions, devices, backends and settings, as plain data."""
    settings = scopes.resolve(scopes.process.token)
    return {
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            **{name: _version(name) for name in PACKAGES},
            "fuseops": version(),
            "installed": _installed(),
            "platform": platform.platform(),
        },
        "cuda": _cuda(),
        "devices": [_device(k) for k in range(torch.cuda.device_count())]
        or ["cpu only: torch sees no CUDA device"],
        "backends": _backends(),
        "environment": {
            name: _home_as_tilde(os.environ.get(name, "not set")) for name in VARIABLES
        },
        "tuned": _tuned_configurations(),
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


def _installed() -> str:
    """How fuseops is installed: from a checkout, with its commit, or as a package."""
    root = Path(str(sys.modules["fuseops"].__file__)).parents[1]
    if not (root / ".git").exists():
        return "as a package"
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
        commit = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        commit = ""
    return f"from a checkout, {commit or 'of no known commit'}"


def _cuda() -> dict[str, str]:
    """The CUDA version that torch was built for, and the driver."""
    driver = Path("/proc/driver/nvidia/version")
    found = driver.read_text(encoding="utf-8").splitlines()[0] if driver.exists() else "none found"
    return {"torch built for": str(torch.version.cuda or "no CUDA"), "driver": found}


def _tuned_configurations() -> dict[str, Any]:
    """The number of kernel configurations that `fuseops tune` has written, and their file."""
    file = configs.cache_file()
    try:
        return {"configurations": len(configs.cached_table()), "file": _home_as_tilde(file)}
    except FuseOpsError as error:
        return {"configurations": f"not readable: {error}", "file": _home_as_tilde(file)}


def _home_as_tilde(value: object) -> str:
    """A path with ~ for the home directory, which has the name of the user."""
    return str(value).replace(str(Path.home()), "~")


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


def _measure() -> dict[str, Any]:
    """A measured hardware profile, in the format of `offload.Hardware.load`; without CUDA the reason for none."""
    if not torch.cuda.is_available():
        return {"not measured": "torch sees no CUDA device; plans use the shipped NVIDIA H200"}
    return Hardware.measure().to_json()
