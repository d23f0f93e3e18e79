"""Offload of mixed dense and MoE layers over ranks, several modules at once, one plan a rank. The layouts:

    reference  that in which the reference system reports its offload: data parallel 4, experts over 4 ranks, a pipeline
               of 2 with 2 virtual stages
    fsdp       FSDP2 over all ranks, each with all experts
    experts    experts over all ranks, FSDP2 of the rest: tokens travel, copies and compute share a step

    python benchmarks/distributed_layout.py --layout reference --out FILE                        (eight CUDA devices)
    python benchmarks/distributed_layout.py --layout reference --backend gloo --ranks 8 --small  (eight CPU processes)
    python benchmarks/distributed_layout.py --layout fsdp --out FILE                             (any number of them)

Built with `examples/pretrain.py`: whole steps, optimizer included, in turn without offload and with the Scheduler that
follows the rank's plan of `offload.plan_pipeline`. What was to leave is the decrease of the peak that it predicts.
With NCCL each dispatcher runs: what `host_counts` takes longer than `peer_memory` is what its host synchronisation
costs. Steps of each kind are traced: where computing waits for a copy, beside the stalls that the plan predicts, the
rates of copies while all ranks copy, and how long the GPU takes from one kernel to the next beside them.
`examples/pretrain.py` on 1, 2, 4 and 8 ranks, as many tokens on each, is the weak scaling.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import measure
from common.offload_ranks import GIB, OffloadedRank
from common.offload_trace import Trace
from torch.profiler import ProfilerActivity, profile

import fuseops as fo
from fuseops import offload

ROOT = Path(__file__).resolve().parent.parent
PRETRAIN = ROOT / "examples" / "pretrain.py"
LARGE = {
    "dim": 2048, "heads": 16, "layers": 16, "ffn": 768, "experts": 64, "top-k": 8, "context": 4096,
    "batch": 16, "micro-batches": 8, "dense-every": 2,
}  # fmt: skip
SMALL = {
    "dim": 16, "heads": 2, "layers": 4, "ffn": 8, "experts": 8, "top-k": 2, "context": 16,
    "batch": 8, "micro-batches": 4, "dense-every": 2,
}  # fmt: skip
LAYOUTS: dict[str, dict[str, int]] = {
    "reference": {"pp": 2, "chunks": 2, "capacity": 4},
    "fsdp": {"ep": 1, "batch": 4, "micro-batches": 1},
    "experts": {"batch": 4, "micro-batches": 1, "capacity": 4},
}
"""A capacity of as many ranks as share the experts: room for all tokens, wherever they go."""
MODULES = {  # what may leave, by module
    "attention": "blocks.*.attention.**",
    "norms": "blocks.*.norm.**",
    "activations of experts and of dense layers": "blocks.*.mlp.**",
}
BARS = {
    "left_of_it": {"at least": 0.997},
    "step_ratio": {"at most": 1.0033},
    "peak_error_over_moved": {"at most": 0.02},
    "copies_stall_not_predicted_ms": {"at most": 1.0},
    "rate_over_planned": {"at least": 1.0},
}


def pretrain() -> Any:
    """`examples/pretrain.py` as a module."""
    spec: Any = importlib.util.spec_from_file_location("pretrain", PRETRAIN)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


def words(sizes: dict[str, Any], **more: Any) -> list[str]:
    return [w for k, v in {**sizes, **more}.items() for w in (f"--{k}", str(v))]


# --- what a rank does


class Rank(OffloadedRank):
    """A rank of the layout under one dispatcher, with its plan."""

    def __init__(self, way: str | None, options: argparse.Namespace, device: torch.device) -> None:
        super().__init__(options, device)
        sizes = SMALL if options.small else LARGE
        more = LAYOUTS[options.layout] | ({} if way is None else {"dispatcher": way})
        self.run = pretrain().Run(pretrain().parsed(words({**sizes, **more})), device)
        self.step = self.run.train
        least = 1 if options.small else 1 << 20
        policy = offload.Policy(offload=tuple(MODULES.values()), min_bytes=least)
        self.plan = self.run.plans(policy=policy)[self.run.mesh.get_local_rank("pp")]
        self.follow("offload", self.run.model, self.plan)

    def gradients(self, name: str) -> list[torch.Tensor]:
        """Of one batch, from the weights as they are."""
        c = self.run.c
        torch.manual_seed(dist.get_rank() % self.run.every.size())
        text = torch.randint(0, 256, (c.batch, c.context), device=self.run.device)
        self.run.optimizer.zero_grad()
        with self.way(name):
            self.run.backward(text, text)
        found = [p.grad for p in self.run.model.parameters()]
        self.run.optimizer.zero_grad()
        return [g.to_local().clone() if hasattr(g, "to_local") else g.clone() for g in found]

    def trace(self, name: str) -> dict[str, float]:
        """What the trace of as many steps as a visit has says."""
        with self.way(name), tempfile.TemporaryDirectory() as folder:
            self.step()
            self.sync()
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                for _ in range(self.options.steps):
                    self.step()
                self.sync()
            seen.export_chrome_trace(path := str(Path(folder) / "trace.json"))
            events = json.loads(Path(path).read_text())["traceEvents"]
            return Trace(events).found(self.options.steps)

    def found(self) -> dict[str, Any]:
        """Everything that this rank measured."""
        leave = {name: leaving(self.plan, glob) / GIB for name, glob in MODULES.items()}
        record = self.summary(self.rounds(), "offload") | {"leave": leave}
        record |= self.same(self.gradients)["offload"]
        if self.cuda:
            traces = {name: self.trace(name) for name in ("nothing", "offload")}
            stall = traces["offload"]["behind_copies_ms"]
            link = self.plan.hardware.both.peak / 2
            record |= {
                "traces": traces,
                "copies_stall_not_predicted_ms": stall - self.plan.after.stall * 1e3,
                "planned_rate_gb_s": link,
                "rate_over_planned": traces["offload"]["out_gb_s"] / link,
            }
        record["not_as_planned"] = self.differences()
        return record

    def differences(self) -> list[str]:
        try:
            self.schedulers["offload"].assert_matched()
        except fo.FuseOpsError as error:
            return str(error).splitlines()[1:]
        return []


def leaving(plan: Any, glob: str) -> int:
    """Bytes that a plan moves of the modules of a glob."""
    part = glob.split(".")[2]
    return sum(
        t.nbytes
        for t in plan.tensors
        if t.decision == "offload" and t.name.split(".")[2:3] == [part]
    )


def on_every_rank(options: argparse.Namespace) -> None:
    """What torchrun starts: all ranks run the layout, the first one writes what all have found."""
    cuda = options.backend == "nccl"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group(options.backend, device_id=device if cuda else None)
    pair = options.layout == "reference" and dist.get_world_size() == 2
    alone = options.layout == "fsdp" or pair  # nobody to send tokens to
    ways: list[str | None] = [None] if alone or not cuda else options.ways
    found: dict[str, Any] = {}
    for way in ways:
        mine = Rank(way, options, device)
        layout = {"mesh": dict(zip(("pp", "dp", "ep"), mine.run.mesh.shape, strict=True))}
        rows: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(rows, mine.found())
        found[way or ("none" if alone else "host_counts")] = rows
        if mine.cuda and dist.get_rank() == 0:
            print(f"{way}\n{mine.plan.explain()}", flush=True)
        del mine
        if cuda:
            torch.cuda.empty_cache()
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps({**layout, "ways": found}))
    dist.destroy_process_group()


# --- the command


def torchrun(ranks: int, *command: str) -> str:
    """Run it on so many ranks.   -> what it printed"""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    env |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    env |= {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "OMP_NUM_THREADS": env.get("OMP_NUM_THREADS", "1"),
    }
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    ran = subprocess.run(
        [sys.executable, *launch, *command], env=env, capture_output=True, text=True, check=False
    )
    if ran.returncode:
        sys.exit(f"{' '.join(command)} on {ranks} ranks failed:\n{ran.stderr[-4000:]}")
    return ran.stdout


def weak_scaling(ranks: int, small: bool) -> Iterator[tuple[str, dict[str, float]]]:
    """Of `examples/pretrain.py`, experts over all ranks."""
    sizes = {k: v for k, v in (SMALL if small else LARGE).items() if k != "micro-batches"}
    if not small:
        sizes |= {"batch": 4, "layers": 8}
    for n in (n for n in (1, 2, 4, 8) if n <= ranks):
        # room for all tokens, wherever they go
        said = torchrun(n, str(PRETRAIN), *words(sizes, steps=24, capacity=n, show=4))
        rates = [float(r.replace(",", "")) for r in re.findall(r"([\d,]+) tokens/s", said)]
        yield str(n), {"tokens_s_a_rank": statistics.median(rates[2:])}


def shares(found: dict[str, Any]) -> dict[str, Any]:
    """Of all ranks: the worst of each figure beside its bar, and what host synchronisation costs."""
    first = next(iter(found["ways"].values()))
    bars = {}
    for name, bar in BARS.items():
        values = [row[name] for row in first if name in row]
        if values:
            least = "at least" in bar
            worst = min(values) if least else max(values)
            met = worst >= bar["at least"] if least else worst <= bar["at most"]
            bars[name] = {"found": worst, **bar, "met": met}
    ms = {way: max(row["ms"] for row in rows) for way, rows in found["ways"].items()}
    cost = ms["host_counts"] / ms["peer_memory"] - 1 if len(ms) == 2 else None
    return {"bars": bars, "host_synchronisation_over_step": cost}


def run(options: argparse.Namespace) -> None:
    """The whole of it, on `options.ranks` processes."""
    count = options.ranks or torch.cuda.device_count()
    if count % LAYOUTS[options.layout].get("pp", 1):
        sys.exit(f"--layout {options.layout} has a pipeline of 2: {count} ranks are none.")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        same = ["--layout", options.layout, "--backend", options.backend, "--ways", *options.ways]
        same += ["--seconds", str(options.seconds)]
        same += ["--steps", str(options.steps), *["--small"] * options.small, "--out", str(out)]
        print(torchrun(count, __file__, *same), end="")
        found = json.loads(out.read_text())
    result = {
        "environment": {**measure.environment(), "backend": options.backend, "ranks": count},
        "model": (SMALL if options.small else LARGE) | LAYOUTS[options.layout],
        "may_leave": MODULES,
        **found,
        **shares(found),
    }
    if options.layout == "reference":
        result["weak_scaling"] = dict(weak_scaling(count, options.small))
    for way, rows in result["ways"].items():
        for rank, row in enumerate(rows):
            print(
                f"{way}, rank {rank}: {json.dumps({k: v for k, v in row.items() if k != 'schedule'})}"
            )
    for name in ("mesh", "bars", "host_synchronisation_over_step", "weak_scaling"):
        print(f"{name}: {json.dumps(result.get(name))}")
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    """The command, and what `torchrun` starts of it on every rank."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(".")[0])
    parser.add_argument("--layout", choices=LAYOUTS, required=True)
    parser.add_argument("--backend", default="nccl", choices=("nccl", "gloo"))
    parser.add_argument("--ranks", type=int, default=0, help="all GPUs unless it is given")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--ways", nargs="+", default=["peer_memory", "host_counts"])
    parser.add_argument("--steps", type=int, default=12, help="of a visit")
    parser.add_argument("--seconds", type=float, default=60, help="of rounds, of each way")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    (on_every_rank if "LOCAL_RANK" in os.environ else run)(options)


if __name__ == "__main__":
    main()
