"""Kernel tests under compute-sanitizer: out-of-bounds accesses and races on shared memory.

    python benchmarks/sanitize.py --out benchmarks/results/sanitize_h200.json [--jobs 10] [--only norm]

The test files of the memory-bound kernels run once under memcheck and once under racecheck, small files together,
since a process takes longer to start than they do. `on_device` calls every kernel with small arguments: of the grouped
GEMMs that is the path for any layout, not those of Hopper. torch's caching allocator is off, so that every tensor is an
allocation of its own whose ends memcheck knows; what needs the allocator (graphs) or large tensors is left out.
What the driver returns is not reported: a loader that asks for more shared memory than there is, and goes on with less,
has accessed nothing. `at` counts reports by kernel and line.
With ``--only`` other runs of an older report of the same environment are kept. What the sanitizer prints is kept
beside the JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import measure

ROOT = Path(__file__).resolve().parent.parent
FILES = {
    "on_device": ["on_device"],
    "quantize_groups": ["quantize_groups"],
    "quantize": ["quantize"],
    "norm": ["norm", "bias", "activation"],
    "permute": ["permute", "router", "routing"],
}
"""Test files of one process; the longest first."""
LEFT_OUT = "not graph and not two_to_the_31 and not many_copies"
SUMMARY = {
    "memcheck": re.compile(r"ERROR SUMMARY: (\d+) error"),
    "racecheck": re.compile(r"RACECHECK SUMMARY: (\d+) hazard"),
}
AT = re.compile(
    r"(?:Race reported between Write|=     and \w+|Invalid \S+ (?:read|write)).* at (\w+)\+0x\w+ in (\S+:\d+)"
)
OPTIONS = {"memcheck": ["--report-api-errors", "no"], "racecheck": []}
TOOL = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"


def run(tool: str, group: str, logs: Path, deadline: float, examples: int) -> dict[str, Any]:
    """One group of test files under one tool: how many tests passed, what the tool found."""
    files = [f"tests/kernels/test_{file}.py" for file in FILES[group]]
    record: dict[str, Any] = {"tool": tool, "group": group, "tests": files}
    seconds = deadline - time.monotonic()
    if seconds < 1:
        return record | {"finished": False}
    tests = ["-m", "gpu", "-k", LEFT_OUT, "-q", *files]
    plugins = ["-p", "no:cacheprovider", "-p", "no:benchmark"]
    sanitizer = [TOOL, "--tool", tool, *OPTIONS[tool]]
    command = [*sanitizer, sys.executable, "-m", "pytest", *tests, *plugins]
    log = logs / f"{tool}_{group}.log"
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
        "at": dict(Counter(map(" in ".join, AT.findall(text)))),
        "passed": int(passed[1]) if passed else 0,
        "exit_status": done.returncode,
        "seconds": round(time.monotonic() - begun, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=600.0, help="for all of it together")
    parser.add_argument("--examples", type=int, default=10, help="of each property")
    parser.add_argument("--only", nargs="*", default=list(FILES), choices=FILES)
    options = parser.parse_args()
    logs = options.out.with_suffix("")
    logs.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.seconds
    work = [(tool, group) for group in FILES if group in options.only for tool in SUMMARY]
    head = {"environment": environment(), "examples": options.examples}
    runs = earlier(options.out, head)

    def save() -> bool:
        clean = [r.get("found") == 0 == r.get("exit_status") for r in runs.values()]
        done = all(clean) and len(runs) == len(FILES) * len(SUMMARY)
        text = json.dumps({**head, "clean": done, "runs": list(runs.values())}, indent=1)
        options.out.write_text(text + "\n")
        return done

    with ThreadPoolExecutor(options.jobs) as pool:
        for record in pool.map(lambda pair: run(*pair, logs, deadline, options.examples), work):
            runs[record["tool"], record["group"]] = record
            save()
            print(json.dumps(record), flush=True)
    print("clean" if save() else "NOT clean")
    return 0 if save() else 1


def earlier(path: Path, head: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """What an older report of the same head has, by tool and group; the command may differ."""
    report = json.loads(path.read_text()) if path.exists() else {}
    mine, theirs = ({**h.get("environment", {}), "command": ""} for h in (head, report))
    same = mine == theirs and report.get("examples") == head["examples"]
    return {(r["tool"], r["group"]): r for r in report["runs"]} if same else {}


def environment() -> dict[str, Any]:
    """What the summary belongs to."""
    version = subprocess.run([TOOL, "--version"], capture_output=True, text=True).stdout
    return {**measure.environment(), "compute-sanitizer": version.strip().splitlines()[-1]}


if __name__ == "__main__":
    sys.exit(main())
