"""The kernel tests under compute-sanitizer: out-of-bounds accesses and races on shared memory.

    python benchmarks/sanitize.py --out benchmarks/results/sanitize_h200.json [--jobs 8] [--seconds 600]

Every test file runs once under memcheck and once under racecheck. torch's caching allocator is off, so
that every tensor is an allocation of its own whose ends memcheck knows; what needs the allocator
(graphs) or large tensors is left out. What the sanitizer prints is kept beside the JSON.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from fuseops.kernels import configs

ROOT = Path(__file__).resolve().parent.parent
FILES = [
    "on_device",
    "quantize",
    "quantize_groups",
    "activation",
    "bias",
    "norm",
    "permute",
    "router",
    "routing",
    "casts",
]
LEFT_OUT = "not graph and not two_to_the_31 and not many_copies"
SUMMARY = {
    "memcheck": re.compile(r"ERROR SUMMARY: (\d+) error"),
    "racecheck": re.compile(r"RACECHECK SUMMARY: (\d+) hazard"),
}
TOOL = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"


def run(tool: str, file: str, logs: Path, deadline: float, examples: int) -> dict[str, Any]:
    """One test file under one tool: how many tests passed, what the tool found."""
    record: dict[str, Any] = {"tool": tool, "tests": f"tests/kernels/test_{file}.py"}
    seconds = deadline - time.monotonic()
    if seconds < 1:
        return record | {"finished": False}
    tests = ["-m", "gpu", "-k", LEFT_OUT, "-q", record["tests"]]
    plugins = ["-p", "no:cacheprovider", "-p", "no:benchmark"]
    command = [TOOL, "--tool", tool, sys.executable, "-m", "pytest", *tests, *plugins]
    log = logs / f"{tool}_{file}.log"
    begun = time.monotonic()
    with log.open("w") as out:
        try:
            env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
            env["KERNEL_TEST_EXAMPLES"] = str(examples)
            done = subprocess.run(
                command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            return record | {"finished": False}
    text = log.read_text(errors="replace")
    passed, found = re.search(r"(\d+) passed", text), SUMMARY[tool].search(text)
    return record | {
        "finished": found is not None,
        "found": found and int(found[1]),
        "passed": int(passed[1]) if passed else 0,
        "exit_status": done.returncode,
        "seconds": round(time.monotonic() - begun, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=600.0, help="for all of it together")
    parser.add_argument("--examples", type=int, default=10, help="of each property")
    parser.add_argument("--only", default="", help="test files whose name contains this")
    options = parser.parse_args()
    logs = options.out.with_suffix("")
    logs.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.seconds
    work = [(tool, file) for file in FILES if options.only in file for tool in SUMMARY]
    report: dict[str, Any] = {
        "environment": environment(), "examples": options.examples, "clean": False, "runs": []
    }  # fmt: skip
    with ThreadPoolExecutor(options.jobs) as pool:
        for record in pool.map(lambda pair: run(*pair, logs, deadline, options.examples), work):
            report["runs"].append(record)
            options.out.write_text(json.dumps(report, indent=1) + "\n")
            print(json.dumps(record), flush=True)
    report["clean"] = all(r.get("found") == 0 == r.get("exit_status") for r in report["runs"])
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print("clean" if report["clean"] else "NOT clean")
    return 0 if report["clean"] else 1


def environment() -> dict[str, Any]:
    """What the summary belongs to."""
    version = subprocess.run([TOOL, "--version"], capture_output=True, text=True).stdout
    return {
        "date": datetime.date.today().isoformat(),
        **configs.versions(),
        "gpu": torch.cuda.get_device_name(),
        "compute-sanitizer": version.strip().splitlines()[-1],
    }


if __name__ == "__main__":
    sys.exit(main())
