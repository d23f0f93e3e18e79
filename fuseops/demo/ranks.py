"""The demo over many processes: `examples/pretrain.py` under torchrun."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

PRETRAIN = Path(__file__).resolve().parents[2] / "examples" / "pretrain.py"


def run_ranks(args: argparse.Namespace) -> int:
    """Run it, on CPUs unless `--device cuda` is given.  -> the exit code of torchrun, 2 outside of a checkout"""
    if not PRETRAIN.exists():
        print(f"demo --ranks runs {PRETRAIN}, which is not there: use a checkout.", file=sys.stderr)
        return 2
    here = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if not args.device.startswith("cuda"):
        here["CUDA_VISIBLE_DEVICES"] = ""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
    steps = ["--steps", str(args.steps), "--seed", str(args.seed)]
    return subprocess.run([sys.executable, *launch, str(PRETRAIN), *steps], env=here).returncode
