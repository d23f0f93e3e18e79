"""Builds the documentation site strictly and looks for every public name in the reference.

python scripts/check_docs.py            # exit 1 where something is wrong; "skipped" and 0 where mkdocs is not installed
python scripts/check_docs.py --out DIR  # and keep the site
"""

import argparse
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDS = ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers.python")
PAGES = {
    "fuseops": "fuseops",
    **{
        f"fuseops.{name}": name
        for name in ("ops", "offload", "recipes", "distributed", "kernels", "testing")
    },
    "fuseops.integrations.hf": "hf",
}


def missing() -> list[str]:
    """What the build needs and is not installed."""
    found = []
    for name in NEEDS:
        try:
            if importlib.util.find_spec(name) is None:
                found.append(name)
        except ModuleNotFoundError:
            found.append(name)
    return found


def build(site: Path) -> int:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(site),
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def undocumented(site: Path) -> list[str]:
    """Public names without a heading on their page of the reference."""
    wrong = []
    for package, page in PAGES.items():
        module = importlib.import_module(package)
        text = (site / "reference" / page / "index.html").read_text("utf-8")
        headings = {
            found.rpartition(".")[2] for found in re.findall(r'<h2 id="([\w.]+)" class="doc', text)
        }
        for name in module.__all__:
            if name not in headings and not isinstance(getattr(module, name), types.ModuleType):
                wrong.append(f"{package}.{name} is not in the reference: docs/reference/{page}.md")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the documentation site as CI does.")
    parser.add_argument("--out", type=Path, help="keep the site there")
    out = parser.parse_args().out
    if absent := missing():
        print(f'skipped: {", ".join(absent)} not installed (pip install -e ".[docs]")')
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        site = (out or Path(scratch)).resolve()
        if code := build(site):
            return code
        wrong = undocumented(site)
    print("\n".join(wrong) or "the site builds and holds every public name")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
