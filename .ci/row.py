"""Runs the whole suite in the environment of one row, a few files a process; what came of it goes to .ci/rows.json.

    .venv-torch-newest/bin/python .ci/row.py            # all of it; what an earlier run tried is not run again
    .venv-torch-newest/bin/python .ci/row.py --again --with "nice -n 19" tests/test_moe.py

An entry says which commit it tried, with which versions and draws, and every test that failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / ".ci" / "rows.json"
PACKAGES = ("torch", "triton", "numpy", "transformers", "peft", "hypothesis")
BATCH = 6  # files a process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", help="test files; left out, all of them")
    parser.add_argument("--again", action="store_true", help="also what is in the entry already")
    parser.add_argument("--with", dest="prefix", default="", help="a command before each command")
    args = parser.parse_args()
    row = "torch " + version("torch").split("+")[0]
    known: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    entry = known.setdefault(row, {"files": {}})
    entry["python"] = platform.python_version()
    entry["versions"] = {name: version(name) for name in PACKAGES}
    entry["draws"] = "of CI" if os.environ.get("CI") else "of make test"
    every = _all_files()
    entry["files"] = {f: said for f, said in entry["files"].items() if f in every}
    wanted = args.files or every
    left = [f for f in wanted if args.again or f not in entry["files"]]
    for kernels in (False, True):
        files = [f for f in left if f.startswith("tests/kernels/") is kernels]
        for start in range(0, len(files), BATCH):
            part = files[start : start + BATCH]
            entry["files"] |= _run(part, kernels, args.prefix.split())
            _summarize(entry)
            FILE.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
            print(row, "+".join(Path(f).stem for f in part), entry["counts"], flush=True)
    sys.exit(bool(entry["failed"]))


def _all_files() -> list[str]:
    return sorted(str(f.relative_to(ROOT)) for f in (ROOT / "tests").rglob("test_*.py"))


def _run(files: list[str], kernels: bool, prefix: list[str]) -> dict[str, Any]:
    """{file: {passed, skipped, failed, seconds, commit}} of one process; a file without a result has crashed it."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    found: dict[str, Any] = {
        f: {"passed": 0, "skipped": 0, "failed": [], "seconds": 0.0, "commit": commit}
        for f in files
    }
    env = os.environ | {"PYTHONPATH": str(ROOT)} | ({"TRITON_INTERPRET": "1"} if kernels else {})
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        pytest = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
        ]
        subprocess.run([*prefix, *pytest, "-o", "junit_family=xunit1", *files], cwd=ROOT, env=env)
        cases = ET.parse(report).iter("testcase") if report.exists() else iter(())
        for case in cases:
            # a machine of hypothesis.stateful lies in a file of that: its class says where it is meant; a file that is
            # skipped whole has no class
            meant = (case.get("classname") or case.get("name", "")).replace(".", "/")
            file = next((f for f in found if f"{meant}/".startswith(f[:-3] + "/")), "")
            if not file:
                continue
            of, name = found[file], f"{file}::{case.get('name')}"
            kind = {child.tag for child in case}
            of["seconds"] = round(of["seconds"] + float(case.get("time") or 0), 1)
            if kind & {"failure", "error"}:
                of["failed"].append(name)
            else:
                of["skipped" if "skipped" in kind else "passed"] += 1
    for file, of in found.items():
        if not (of["passed"] or of["skipped"] or of["failed"]):
            of["failed"].append(f"{file} (no result)")
    return found


def _summarize(entry: dict[str, Any]) -> None:
    files = entry["files"].values()
    entry["failed"] = sorted(name for f in files for name in f["failed"])
    entry["counts"] = {kind: sum(f[kind] for f in files) for kind in ("passed", "skipped")}
    entry["counts"]["failed"] = len(entry["failed"])


if __name__ == "__main__":
    main()
