"""docs/scale.md: what each way to spread a mixture of experts moves, and where it waits for its links, from formulas.

    python benchmarks/scale.py            # write it
    python benchmarks/scale.py --check    # exit 1 where it is stale

Bytes are those that a rank sends in a training step of one micro-batch, in bf16, by the algorithms that move the fewest
(a ring for collectives). Times put them beside the compute of a layer at the rate that was measured of one, which is
what hides them at best.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "scale.md"
MEASURED = ROOT / "benchmarks" / "results" / "moe_layer_h200.json"
PLANNED = ROOT / "benchmarks" / "scale_planned.json"
RANKS = (8, 16, 32, 64)
LINKS = {"between hosts": 50e9, "inside a host": 330e9}  # bytes a second and rank
BYTES = 2  # of a number of bf16
STATE = 16  # of a parameter: float32 with its gradient and AdamW's two moments
MEMORY = 141e9
TOKENS = 8192  # of a rank


class Sizes(NamedTuple):
    """A model, by its published configuration."""

    layers: int
    dim: int
    ffn: int  # of an expert
    experts: int
    top_k: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @property
    def attention(self) -> int:
        """Parameters of a layer's attention."""
        return self.dim * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def expert(self) -> int:
        return 3 * self.dim * self.ffn

    @property
    def layer(self) -> int:
        return self.attention + self.experts * self.expert + self.experts * self.dim

    @property
    def active(self) -> int:
        return self.attention + self.top_k * self.expert + self.experts * self.dim

    @property
    def total(self) -> int:
        return self.layers * self.layer + 2 * self.vocabulary * self.dim


MODELS = {
    "Qwen3-30B-A3B": Sizes(48, 2048, 768, 128, 8, 32, 4, 128, 151936),
    "Qwen3-235B-A22B": Sizes(94, 4096, 1536, 128, 8, 64, 4, 128, 151936),
}


# --- bytes that a rank sends for a layer, forward and backward


def experts_once(m: Sizes, ranks: int) -> float:
    """A token once to every rank that has some of its experts, and back, forward and backward."""
    return 4 * TOKENS * (ranks - 1) * reached(m, ranks) * m.dim * BYTES


def reached(m: Sizes, ranks: int) -> float:
    """The share of ranks that a token goes to, with even routing."""
    return 1 - (1 - 1 / ranks) ** m.top_k


def experts_by_copy(m: Sizes, ranks: int) -> float:
    """A row for every copy."""
    return 4 * TOKENS * m.top_k * (ranks - 1) / ranks * m.dim * BYTES


def tensor(m: Sizes, ranks: int) -> float:
    """Two all-reduces forward and two backward, or as many gathers and scatters, of the tokens of a group's ranks."""
    return 4 * 2 * (ranks - 1) * TOKENS * m.dim * BYTES


def data(m: Sizes, ranks: int) -> float:
    """FSDP2: weights gathered twice, gradients scattered once."""
    return 3 * (ranks - 1) / ranks * m.layer * BYTES


def dense_data(m: Sizes, ranks: int) -> float:
    """FSDP2 of what is no expert, beside experts that one rank holds."""
    return 3 * (ranks - 1) / ranks * (m.attention + m.experts * m.dim) * BYTES


def pipeline(m: Sizes, ranks: int) -> float:
    """One boundary, forward and backward."""
    return 2 * TOKENS * m.dim * BYTES


WAYS = {
    "experts, a token once a rank": experts_once,
    "experts, a row a copy": experts_by_copy,
    "tensor or sequence": tensor,
    "FSDP2 of everything": data,
    "FSDP2 beside EP over all": dense_data,
    "a boundary of a pipeline": pipeline,
}


def compute(m: Sizes, rate: float) -> float:
    """Seconds of a layer's GEMMs, forward and backward, on a rank."""
    return 6 * m.active * TOKENS / rate


def rate() -> float:
    """FLOP/s of a layer of experts, as it was measured."""
    cells = json.loads(MEASURED.read_text(encoding="utf-8"))["cells"]
    return float(cells["qwen3_30b"]["tflops"]["fwd+bwd"]["fuseops"]) * 1e12


# --- the page


def page() -> str:
    return "\n".join(lines()) + "\n"


def lines() -> Iterator[str]:
    speed = rate()
    yield f"""# Scale

What does each way to spread a mixture of experts send, and where does it wait for its links? Every number is
written by `python benchmarks/scale.py`, from formulas over published sizes, links and one measured rate,
{speed / 1e12:.0f} TFLOP/s of a layer of experts ([All figures](measured.md)). A rank has {TOKENS} tokens, in bf16, and
routing is even.

The numbers are bounds of what links allow, no measurements: All figures has what ran on two and four GPUs.

## How to read the tables

The first table of a model has the MB that a rank sends for a layer in a step, and behind the colon their time as a
share of the layer's compute, at {links()}.

The second one is what the offload planner predicts for a rank that runs all layers over one micro-batch, with experts
over all ranks (`python benchmarks/scale_planned.py`, dry runs of six blocks for one H200):

- **saved, dispatched again**: saved tensors, and those where tokens that arrived are dispatched again in the backward,
  which sends a quarter more for the experts.
- **a layer, leaves**: the time of a layer and what leaves the device without a stall, if tokens travelled in no time.
  **{"** and **".join(LINKS)}** are the same over either link, where nothing hides the tokens' travel.
- **state and saved**: what state and saved tensors take together, in all and with that offload between hosts."""
    for name, m in MODELS.items():
        yield from model(name, m, compute(m, speed))
    yield from walls(speed)


def links() -> str:
    return " and at ".join(f"{b / 1e9:.0f} GB/s {where}" for where, b in LINKS.items())


def model(name: str, m: Sizes, took: float) -> Iterator[str]:
    yield f"""
## {name}

{m.total / 1e9:.1f} billion parameters in {m.layers} layers. A layer has {m.layer / 1e6:.0f} million parameters,
{m.active / 1e6:.0f} million of them active, and computes for {took * 1e3:.2f} ms a step. What a rank sends for it:
"""
    ranks = RANKS
    yield f"| | {' | '.join(f'{n} ranks' for n in ranks)} |"
    yield f"|---|{'---|' * len(ranks)}"
    for way, sends in WAYS.items():
        yield f"| {way} | {' | '.join(share(sends(m, n), took) for n in ranks)} |"
    held = ", ".join(f"{STATE * m.total / n / 1e9:.0f} GB on {n}" for n in ranks)
    yield f"""
A rank's part of weights, gradients and AdamW ({STATE} bytes a parameter) over all ranks:
{held} ranks, of the {MEMORY / 1e9:.0f} GB of a GPU."""
    yield from planner(name, m)


def planner(name: str, m: Sizes) -> Iterator[str]:
    """What its dry runs predict, and the network beside."""
    found = json.loads(PLANNED.read_text(encoding="utf-8"))["planned"]
    yield "\nWhat the planner predicts:\n"
    columns = (
        "saved, dispatched again",
        "a layer, leaves",
        *(f"{where}" for where in LINKS),
        "state and saved",
    )
    yield f"| ranks | {' | '.join(columns)} |"
    yield f"|---|{'---|' * len(columns)}"
    for n in RANKS:
        p = found[f"{name}, experts over {n}"]
        saved, arrived = (p[n] * m.layers / 1e3 for n in ("saved_mb", "dispatched_again_mb"))
        leaves = {
            where: p[where]["leaves_mb"] * (m.layers - 1) / 1e3 for where in ("alone", *LINKS)
        }
        ways = [f"{p[where]['ms']:.1f} ms, {gb:.0f} GB" for where, gb in leaves.items()]
        held = STATE * m.total / n / 1e9
        both = f"{held + saved:.0f} GB, {held + saved - leaves['between hosts']:.0f}"
        yield f"| {n} | {' | '.join((f'{saved:.0f} GB, {saved - arrived:.0f}', *ways, both))} |"


def share(sent: float, took: float) -> str:
    return f"{sent / 1e6:.0f}: " + ", ".join(f"{sent / b / took:.0%}" for b in LINKS.values())


def walls(speed: float) -> Iterator[str]:
    yield "\n## Where the walls are\n"
    slow, fast = LINKS.values()
    for name, m in MODELS.items():
        took = compute(m, speed)
        needed = data(m, 64) / slow / took * TOKENS
        inside, over = experts_once(m, 8) / fast / took, experts_once(m, 64) / slow / took
        yield f"""- **{name}**: over 64 ranks between hosts, FSDP2 of everything hides behind the compute from
  {needed:,.0f} tokens a rank on. Experts take {inside:.0%} of the compute over the 8 ranks of a host, and {over:.1f}
  times it over 64 ranks of many hosts."""
    m = MODELS["Qwen3-30B-A3B"]
    saved = [f"{1 - experts_once(m, n) / experts_by_copy(m, n):.0%} on {n}" for n in (4, 8, 16, 64)]
    yield f"""- Sending a token once a rank, in place of a row a copy, saves {", ".join(saved)} ranks.

So experts stay inside a host, and FSDP2 shards them over hosts, once for many micro-batches."""


def main() -> None:
    written = page()
    if "--check" in sys.argv:
        sys.exit(PAGE.read_text(encoding="utf-8") != written)
    PAGE.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()
