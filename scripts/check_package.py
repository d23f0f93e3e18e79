"""Builds wheel and sdist, looks at what is in them, and uses the wheel as somebody would who has no repository.

python scripts/check_package.py             # in the environment at hand, offline: with the torch that is here
python scripts/check_package.py --install   # in a new environment, with all dependencies (some GB): for a release
python scripts/check_package.py --out DIR   # and keep wheel and sdist
"""

import argparse
import email
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
NEEDED = {"fuseops/py.typed", "fuseops/kernels/configs.json", "fuseops/cli/__init__.py"}
SOURCES = {
    "README.md",
    "CHANGELOG.md",
    "LICENSE",
    "pyproject.toml",
    "tests/conftest.py",
    "docs/ops.md",
    "examples/quickstart.py",
}
USES = (
    ("import fuseops as fo, torch; fo.explain(fo.MoE(8, 4, 4, 2), torch.randn(3, 8))", "-c"),
    ("fuseops --version", "-m"),
    ("fuseops env", "-m"),
    ("fuseops explain {model}", "-m"),
    ("fuseops offload-plan {model}", "-m"),
)
MODEL = """import torch
import fuseops as fo

def build():
    return fo.Sequential(fo.ops.Linear(8, 8), fo.ops.GELU()), (torch.randn(3, 8),), {}
"""


def build(out: Path, source: Path = ROOT, *targets: str) -> list[Path]:
    """The files of these targets of hatchling."""
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(out)]
    subprocess.run(
        [*command, *(f"-t{t}" for t in targets)], cwd=source, check=True, capture_output=True
    )
    return sorted(out.iterdir())


def wrong_in_wheel(wheel: Path) -> list[str]:
    names = zipfile.ZipFile(wheel).namelist()
    found = [f"{name} is not in the wheel" for name in NEEDED - set(names)]
    found += [
        f"{name} is in the wheel" for name in names if not name.startswith(("fuseops/", "fuseops-"))
    ]
    found += [f"{name} is in the wheel" for name in names if name.endswith(("aot.json", ".pyc"))]
    here = {str(path.relative_to(ROOT)) for path in (ROOT / "fuseops").rglob("*.py")}
    found += [f"{name} is not in the wheel" for name in here - set(names)]
    return found + wrong_in_metadata(next(n for n in names if n.endswith("METADATA")), wheel)


def wrong_in_metadata(name: str, wheel: Path) -> list[str]:
    data = email.message_from_bytes(zipfile.ZipFile(wheel).read(name))
    found = []
    if not {"Homepage", "Repository", "Documentation", "Changelog"} <= {
        u.split(",")[0] for u in data.get_all("Project-URL", [])
    }:
        found.append("the metadata lacks URLs")
    extras, stated = set(data.get_all("Provides-Extra", [])), set(PROJECT["optional-dependencies"])
    if extras != stated:
        found.append(f"extras are {sorted(extras)}, expected {sorted(stated)}")
    text = str(data.get_payload())
    relative = [a or b for a, b in re.findall(r'\]\(([^)\s]+)\)|(?:src|href)="([^"]+)"', text)]
    found += [
        f"the description links to {link}"
        for link in relative
        if not link.startswith(("https://", "#"))
    ]
    said = set(
        re.findall(
            r"fuseops\[(\w+)\]", text + (ROOT / "docs" / "huggingface.md").read_text("utf-8")
        )
    )
    return found + [f"the documentation names the extra {name}" for name in said - extras]


def wrong_in_sdist(sdist: Path, wheel: Path, scratch: Path) -> list[str]:
    """What a wheel made of the sdist has not, or has more than that of the repository."""
    with tarfile.open(sdist) as archive:
        top = archive.getnames()[0].split("/")[0]
        names = {name.removeprefix(f"{top}/") for name in archive.getnames()}
        archive.extractall(scratch, filter="data")
    found = [f"{name} is not in the sdist" for name in SOURCES - names]
    (again,) = build(scratch / "again", scratch / top, "wheel")
    mine, theirs = (set(zipfile.ZipFile(w).namelist()) for w in (wheel, again))
    return found + [
        f"{name}: only one of the wheels of repository and sdist has it" for name in mine ^ theirs
    ]


def used(wheel: Path, scratch: Path, install: bool) -> list[str]:
    """What fails when the wheel is used, in a folder of its own."""
    (scratch / "model.py").write_text(MODEL)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "FUSEOPS_"))}
    if install:
        venv.create(scratch / "venv", with_pip=True)
        python = scratch / "venv" / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "-q", wheel], check=True)
        where = scratch / "venv"
    else:
        python, where = Path(sys.executable), scratch / "installed"
        zipfile.ZipFile(wheel).extractall(where)
        environment["PYTHONPATH"] = str(where)
    found = []
    probe = [str(python), "-c", "import fuseops; print(fuseops.__file__)"]
    ran = subprocess.run(probe, cwd=scratch, env=environment, capture_output=True, text=True)
    if not ran.stdout.startswith(str(where)):
        found.append(f"not the wheel is used, but {ran.stdout.strip() or ran.stderr}")
    for use, how in USES:
        words = [use] if how == "-c" else use.format(model="model.py").split()
        ran = subprocess.run(
            [str(python), "-W", "error", how, *words],
            cwd=scratch,
            env=environment,
            capture_output=True,
            text=True,
        )
        if ran.returncode:
            found.append(f"{how} {use!r} fails: {ran.stderr[-800:]}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Check wheel and sdist.")
    parser.add_argument(
        "--install", action="store_true", help="into a new environment, with all dependencies"
    )
    parser.add_argument("--out", type=Path, help="keep wheel and sdist there")
    args = parser.parse_args()
    if importlib.util.find_spec("hatchling") is None:
        print("skipped: hatchling is not installed (pip install hatchling)")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder).resolve()
        out = args.out.resolve() if args.out else scratch / "dist"
        wheel, sdist = sorted(
            build(out, ROOT, "wheel", "sdist"), key=lambda path: path.suffix != ".whl"
        )
        wrong = [
            *wrong_in_wheel(wheel),
            *wrong_in_sdist(sdist, wheel, scratch),
            *used(wheel, scratch, args.install),
        ]
        sizes = ", ".join(
            f"{path.name} {path.stat().st_size / 1024:.0f} KiB" for path in (wheel, sdist)
        )
    print("\n".join(wrong) if wrong else f"{sizes}: whole, and used outside of the repository")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
