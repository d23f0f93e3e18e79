"""FP8 GEMMs beside ours in bf16, torch's grouped ones in bf16 and in FP8 (scales of rows), and dense cuBLAS per tensor.

    python benchmarks/fp8.py --out benchmarks/results/fp8_h200.json

Operands are quantized before: GEMM alone, with the tile table made inside every call. Each candidate makes the GEMMs
of a training step of an expert MLP (fc1 and fc2 forward, their input and weight gradients) one after another and over
again for `--settle` seconds to warm up and as long again, in turn, so that each runs at the clock that the power of its
own kernels leaves it. Ratios are a peer's time over ours, round by round, with the interval of their median.
`into` has weight gradients that are added to float32 ones; `splits` Zipf's law and two empty groups; `tiles` every
tile that there is. Three groups of every kind are compared with float32 before; scales change 64-fold from block to
block. TFLOP/s count the rows inside groups.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import measure, runs
from common.fp8_problems import Operands, candidates, flops_of, operands, wrong
from common.grouped_problems import SHAPES, SPLITS, entry, split

from fuseops.kernels import fp8_paths
from fuseops.kernels.configs import forced

PARTS = ("settled", "into", "splits", "tiles")
Mixes = dict[str, dict[str, measure.Call]]


class FP8Run(runs.Run):
    """The parts of every shape."""

    def shapes(self) -> None:
        for shape in (name for name in SHAPES if name in self.options.shapes):
            for kind_of_split in SPLITS if "splits" in self.options.parts else SPLITS[:1]:
                if parts := self.lacking(shape, kind_of_split):
                    self.shape(shape, kind_of_split, parts)
                    torch.cuda.empty_cache()

    def shape(self, shape: str, kind_of_split: str, parts: list[str]) -> None:
        """Some parts of one shape and split, whose operands are compared first."""
        title, t = f"{shape}/{kind_of_split}", dict[str, Operands]()
        self.note("wrong", "", partial(self.compared, t, shape, kind_of_split), title)
        if not t:
            return
        name = partial("{}/{}/{}/{}".format, shape)
        mixes: dict[str, Callable[[], Mixes]] = {
            "settled": lambda: self.mixes(t, "wgrad", None, kind_of_split, name),
            "into": lambda: self.mixes(t, "wgrad_into", None, kind_of_split, name),
            "splits": lambda: self.mixes(t, "wgrad", ("fp8", "bf16"), kind_of_split, name),
            "tiles": lambda: self.tiles(t, kind_of_split, name),
        }
        for part in parts:
            self.note(part, "", partial(self.timed, part, mixes[part], t), title)

    def compared(self, t: dict[str, Operands], shape: str, kind_of_split: str) -> dict[str, str]:
        """Puts the operands of both layers into `t`.   -> what is wrong with their products"""
        groups, rows, d, f, _ = SHAPES[shape]
        offs, found = split(kind_of_split, groups, rows), {}
        for layer, (n, k) in {"fc1": (2 * f, d), "fc2": (d, f)}.items():
            t[layer] = operands(groups, rows, n, k, offs)
            bad = wrong(t[layer])
            found |= {f"{shape}/{layer}/{kind}/{kind_of_split}": bad[kind] for kind in bad}
        return found

    def lacking(self, shape: str, kind_of_split: str) -> list[str]:
        """The parts of a shape and a split that are wanted and not there."""
        parts = [part for part in self.options.parts if part != "splits"]
        if kind_of_split != SPLITS[0]:
            parts = ["splits"]
        there = f"{shape}/fc2/fwd/{kind_of_split}"
        return [part for part in parts if there not in self.report[part]]

    def mixes(
        self, t: dict[str, Operands], last: str, only: Any, kind_of_split: str, name: Any
    ) -> Mixes:
        """The step of each candidate that has all of its GEMMs, or, of torch's in FP8, those that it has."""
        mixes: Mixes = {}
        for layer, each in t.items():
            for kind in ("fwd", "dgrad", last):
                for candidate, call in candidates(kind, each).items():
                    if only is None or candidate in only:
                        mixes.setdefault(candidate, {})[name(layer, kind, kind_of_split)] = call
        return {candidate: mix for candidate, mix in mixes.items() if self.works(candidate, mix)}

    def works(self, candidate: str, mix: dict[str, measure.Call]) -> bool:
        try:
            measure.run(mix)
            torch.cuda.synchronize()
        except Exception as error:  # reported, not hidden
            self.report["failed"][f"{candidate} {next(iter(mix))}"] = (
                f"{type(error).__name__}: {error}"[:300]
            )
            return False
        return True

    def tiles(self, t: dict[str, Operands], kind_of_split: str, name: Any) -> Mixes:
        """Each tile for all GEMMs of the step."""
        ours = self.mixes(t, "wgrad", ("fp8",), kind_of_split, name)["fp8"]
        every = fp8_paths.MM.candidates((1, 256, 256), 1)

        def under(number: int, call: measure.Call) -> None:
            with forced(fp8_paths.MM, every[number]), forced(fp8_paths.WGRAD, every[number]):
                call()

        words = {number: f"{c['BLOCK_M']}x{c['BLOCK_N']}" for number, c in enumerate(every)}
        return {
            words[number]: {part: partial(under, number, call) for part, call in ours.items()}
            for number in words
        }

    def timed(
        self, part: str, mixes: Callable[[], Mixes], t: dict[str, Operands]
    ) -> dict[str, Any]:
        """Of every GEMM of the mixes, the rate of each tile, or times, rates and ratios."""
        found = {}
        us = measure.mixes_in_turn(mixes(), self.options.rounds, self.options.settle)
        for name, each in us.items():
            flops = flops_of(t[name.split("/")[1]])
            if part == "tiles":
                medians = measure.medians(each)
                found[name] = {tile: round(flops / m / 1e6, 1) for tile, m in medians.items()}
            else:
                ours = {"fp8": "fuseops"}
                found[name] = entry({ours.get(peer, peer): u for peer, u in each.items()}, flops)
        return found


def main() -> None:
    parser = runs.parser_of(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", nargs="*", default=tuple(SHAPES), choices=tuple(SHAPES))
    parser.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--settle", type=float, default=0.2, help="seconds of a mix in a round")
    parser.add_argument("--budget", type=float, default=200.0, help="seconds; no new part after it")
    parser.add_argument("--resume", action="store_true", help="make the parts that --out lacks")
    options = parser.parse_args()
    torch.manual_seed(0)
    parts: dict[str, Any] = {part: {} for part in PARTS}
    run = FP8Run(options, wrong={}, **parts)
    run.shapes()
    run.write()
    print(json.dumps({key: run.report[key] for key in ("wrong", "failed", "skipped")}))


if __name__ == "__main__":
    main()
