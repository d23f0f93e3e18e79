#!/bin/sh
# Sets up .venv: a Python >= 3.11, torch and triton, then fuseops itself, editable, with its tools.
#
#   PYTHON=...         the Python to build .venv from (default: the first suitable one on PATH)
#   SETUP_TORCH=auto   keep a CUDA torch that Python already imports, else install the pinned one
#   SETUP_TORCH=system keep the torch that Python already imports, whatever it is; fail without one
#   SETUP_TORCH=pin    always install the pinned torch into .venv
#   SETUP_TORCH=2.11.0 install that version, or `newest`, whatever is there (.ci/rows)
#   VENV=.venv         where
#
# `make setup` runs this once, and again when pyproject.toml, constraints.txt or this file changed.
# A .venv that works is kept: to change its Python or go back to the pinned torch, `make clean` first.
set -eu
cd "$(dirname "$0")/.."

MIN_TORCH="2.11"     # as in pyproject.toml: an older torch is never kept
CPU_TRITON="3.6.0"   # for a torch that brought no triton
SETUP_TORCH="${SETUP_TORCH:-auto}"
VENV="${VENV:-.venv}"

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: error: %s\n' "$*" >&2; exit 1; }

case "$SETUP_TORCH" in
  auto | system | pin | newest | [0-9]*.[0-9]*) ;;
  *) die "SETUP_TORCH=$SETUP_TORCH: auto, system, pin, newest or a version" ;;
esac

# Prints "" for a Python that will do, else what is wrong with it. It is run, not only found: a
# version manager's shim may exist for a version that is not installed.
python_fault() {
  "$1" - 2>/dev/null <<'PY' || echo "does not run"
import sys
if sys.version_info < (3, 11):
    print(f"is Python {sys.version.split()[0]}, older than 3.11")
else:
    try:
        import ensurepip, venv
    except ImportError:
        print("has no venv or ensurepip (on Debian and Ubuntu: the package python3-venv)")
PY
}

find_python() {
  if [ -n "${PYTHON:-}" ]; then
    fault=$(python_fault "$PYTHON")
    [ -z "$fault" ] || die "PYTHON=$PYTHON $fault"
    return
  fi
  faults=""
  for candidate in python3 python3.12 python3.13 python3.11 python3.14; do
    command -v "$candidate" >/dev/null 2>&1 || continue
    fault=$(python_fault "$candidate")
    if [ -z "$fault" ]; then PYTHON="$candidate"; return; fi
    faults="$faults
  $candidate $fault"
  done
  die "no suitable Python found; fuseops needs Python 3.11 or newer (or name one: PYTHON=...)$faults"
}

# "VERSION for CUDA ...|ROCm|CPU": the torch that this Python imports, nothing if that is none or too old.
torch_of() {
  "$1" - "$MIN_TORCH" 2>/dev/null <<'PY' || true
import sys
import torch
release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
if release >= tuple(int(part) for part in sys.argv[1].split(".")):
    cuda, rocm = torch.version.cuda, getattr(torch.version, "hip", None)
    print(torch.__version__, f"for CUDA {cuda}" if cuda else "for ROCm" if rocm else "for CPU")
PY
}

# Is a torch that is already there to be left alone?  $1: what torch_of printed
keep_torch() {
  case "$SETUP_TORCH:$1" in
    pin:* | newest:* | [0-9]*:* | *:"") return 1 ;;
    system:*) return 0 ;;
    *" for CPU") return 1 ;;   # auto: a CPU torch is quickly replaced by the tested version
    *) return 0 ;;             # auto: a GPU's torch was chosen to fit this machine's driver
  esac
}

# Only errors: pip's warnings are about the machine's pip configuration, not about fuseops.
pip_install() { "$VENV/bin/python" -m pip install -qq --disable-pip-version-check "$@"; }

make_venv() {
  # Kept when it works, so that setting up again after an edit of pyproject.toml takes seconds.
  if [ -x "$VENV/bin/python" ] && [ -z "$(python_fault "$VENV/bin/python")" ] &&
    "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    say "keeping $VENV, $("$VENV/bin/python" --version)"
    return
  fi
  site=""
  case "$SETUP_TORCH" in auto | system)
    found=$(torch_of "$PYTHON")
    if keep_torch "$found"; then
      site="--system-site-packages"
    elif [ "$SETUP_TORCH" = system ]; then
      die "SETUP_TORCH=system, but $PYTHON imports no torch >= $MIN_TORCH"
    fi ;;
  esac
  say "creating $VENV from $("$PYTHON" --version)"
  "$PYTHON" -m venv --clear $site "$VENV" || die "could not create $VENV"
}

install_torch() {
  found=$(torch_of "$VENV/bin/python")
  if keep_torch "$found"; then
    say "keeping torch $found and its triton"
    return
  fi
  [ "$SETUP_TORCH" != system ] || die "SETUP_TORCH=system, but $VENV sees no torch: 'make clean' first"
  case "$SETUP_TORCH" in
    newest) say "installing the newest torch"; pip_install --upgrade torch "numpy<2.4" ;;
    [0-9]*) say "installing torch $SETUP_TORCH"; pip_install "torch==$SETUP_TORCH" "numpy<2.4" ;;
    *)
      say "installing torch as constraints.txt pins it (a CUDA wheel is large and takes minutes)"
      pip_install -c constraints.txt torch numpy ;;
  esac
  # The CPU wheel brings no triton, and Triton's interpreter runs the kernels' tests without a GPU.
  if [ "$(uname -s)" = Linux ] && ! "$VENV/bin/python" -c "import triton" 2>/dev/null; then
    say "installing triton $CPU_TRITON"
    pip_install "triton==$CPU_TRITON"
  fi
}

install_fuseops() {
  # Pins what is there now, kept or installed, so that pip neither upgrades nor replaces it.
  "$VENV/bin/python" - > "$VENV/constraints.txt" <<'PY'
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

for line in Path("constraints.txt").read_text().splitlines():
    if not line.startswith(("#", "torch")):
        print(line)
for name in ("torch", "triton"):
    try:
        print(f"{name}=={version(name)}")
    except PackageNotFoundError:
        pass  # not on this platform
PY
  say "installing fuseops and its development tools"
  pip_install -c "$VENV/constraints.txt" -e ".[dev]"
}

find_python
make_venv
install_torch
install_fuseops
"$VENV/bin/python" - <<'PY'
from importlib.metadata import PackageNotFoundError, version

def have(name):
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"no {name}"

print("setup: ready:", ", ".join(map(have, ("fuseops", "torch", "triton", "numpy"))))
PY
