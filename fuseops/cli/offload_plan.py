"""`fuseops offload-plan [PATH_OR_MODULE]`: what to keep, to move to the host and to recompute, and
what it costs. Without a target it plans an example; no GPU is needed.

The example is a stack of twelve dense transformer blocks of fuseops ops (width 4096, 32 heads, FFN
14336) on 8192 tokens in bfloat16, for one NVIDIA H200: the model that docs/offload.md speaks of.
"""

import argparse
import shutil
from pathlib import Path

import torch
from torch import Tensor, nn

from fuseops import offload, ops
from fuseops.fusions.explain.layout import size
from fuseops.fusions.sequential import Residual, Sequential
from fuseops.offload.planning.hardware import Hardware
from fuseops.offload.planning.plan import OffloadPlan

from .show import as_json, table
from .target import Target, UsageError, load

FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        nargs="?",
        metavar="PATH_OR_MODULE",
        help="defines build() -> (model, args, side); left out: an example of twelve blocks",
    )
    parser.add_argument("--peak", help="most bytes on the device, such as 11GiB; default: no stall")
    parser.add_argument("--host", help="most bytes of host memory, such as 64GiB")
    parser.add_argument("--layers", action="append", metavar="GLOB", help="units of the schedule")
    parser.add_argument(
        "--hardware", type=Path, metavar="FILE", help="what `fuseops env --measure --json` printed"
    )
    parser.add_argument(
        "--record", action="store_true", help="run the step and measure it, instead of a dry run"
    )
    parser.add_argument(
        "--ranks", type=int, default=1, help="plan every rank of a pipeline of so many"
    )
    parser.add_argument("--micro-batches", type=int, default=8, help="of the pipeline; default 8")
    parser.add_argument(
        "--chunks", type=int, default=1, help="parts of the model a rank; more than 1: interleaved"
    )
    parser.add_argument("--every", action="store_true", help="one line a tensor")
    parser.add_argument(
        "--wide", action="store_true", help="with times on the link; takes 120 columns"
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a timeline page to FILE")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write a Chrome/Perfetto trace to FILE"
    )


def run(args: argparse.Namespace) -> int:
    target = example() if args.target is None else load(args.target)
    plan = offload.plan(
        target.model,
        *target.args,
        hardware=None if args.hardware is None else Hardware.load(args.hardware),
        peak=args.peak,
        host=args.host,
        layers=args.layers,
        record=args.record,
        **target.side,
    )
    if args.ranks > 1:
        return _pipeline(plan, offload.Pipeline(args.ranks, args.micro_batches, args.chunks), args)
    for write, path in ((plan.save_html, args.html), (plan.save_trace, args.trace)):
        if path is not None:
            try:
                write(path)
            except OSError as error:
                raise UsageError(f"cannot write {path}: {error.strerror}.") from None
    if args.json:
        files = {"html": _name(args.html), "trace": _name(args.trace)}
        as_json("offload-plan", target=target.name, **{**plan.to_json(), **files})
    else:
        print(plan.explain(args.every, args.wide, shutil.get_terminal_size((100, 24)).columns))
        for path in filter(None, (args.html, args.trace)):
            print(f"wrote {path}")
    return 0 if plan.fits else FAILED


def _pipeline(plan: OffloadPlan, pipeline: offload.Pipeline, args: argparse.Namespace) -> int:
    """One line a rank; the pages and traces of single plans are for programs to ask for."""
    plans = offload.plan_pipeline(plan.profile, plan.hardware, pipeline, plan.limits)
    if args.json:
        shown = {"target": plan.profile.model, "pipeline": pipeline._asdict()}
        as_json("offload-plan", **shown, ranks=[rank.to_json() for rank in plans])
    else:
        header = ("rank", "peak", "planned", "where", "offload", "stall ms", "step ms")
        table(header, [_rank_row(k, rank) for k, rank in enumerate(plans)])
    return 0 if all(rank.fits for rank in plans) else FAILED


def _rank_row(rank: int, plan: OffloadPlan) -> tuple[str, ...]:
    before, after = plan.before, plan.after
    sizes = (size(before.peak), size(after.peak), plan.owner(after), size(after.moved))
    return (str(rank), *sizes, f"{after.stall * 1e3:.2f}", f"{after.seconds * 1e3:.2f}")


def _name(path: Path | None) -> str | None:
    return None if path is None else str(path)


# --- the example


class Attention(nn.Module):
    """Causal attention over one packed buffer of queries, keys and values."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, qkv: Tensor) -> Tensor:
        tokens, width = qkv.shape
        q, k, v = qkv.view(1, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).reshape(tokens, width // 3)


class Stack(nn.Module):
    """Dense transformer blocks."""

    def __init__(self, blocks: int, width: int, ffn: int, heads: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            Sequential(
                {
                    "attn": Residual(
                        ops.RMSNorm(width),
                        ops.Linear(width, 3 * width, bias=False),
                        Attention(heads),
                        ops.Linear(width, width, bias=False),
                    ),
                    "mlp": Residual(
                        ops.RMSNorm(width),
                        ops.Linear(width, 2 * ffn, bias=False),
                        ops.SwiGLU(),
                        ops.Linear(ffn, width, bias=False),
                    ),
                }
            )
            for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def example(
    blocks: int = 12, width: int = 4096, ffn: int = 14336, heads: int = 32, tokens: int = 8192
) -> Target:
    """The model of the module's docstring, on torch's meta device: it takes no memory."""
    with torch.device("meta"):
        model = Stack(blocks, width, ffn, heads).to(torch.bfloat16)
        x = torch.empty(tokens, width, dtype=torch.bfloat16, requires_grad=True)
    return Target("the example of twelve blocks", model, (x,), {})
