"""docs/measured.md, the figures of the README, and the pictures, so that none is typed or drawn by hand.

python benchmarks/tables.py            # write them
python benchmarks/tables.py --check    # exit 1 where one is stale
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from subjects import Rows, measured, page, span, table

ROOT = Path(__file__).resolve().parent.parent
PAGE, README, HUGGINGFACE = (
    ROOT / "docs/measured.md",
    ROOT / "README.md",
    ROOT / "docs/huggingface.md",
)
PROJECT, TRIED = ROOT / "pyproject.toml", ROOT / ".ci" / "rows.json"
NEAR = 0.9  # of the bandwidth of a copy


def readme(text: str) -> str:
    """The README with its figures between the marks `<!-- name: ... -->` and `<!-- end -->`."""
    made_of = {
        "headline": headline(),
        "versions": "\n".join(table(versions())),
        "models": "\n".join(table(models())),
        "figures": "\n".join(table(figures())),
    }
    for name, made in made_of.items():
        block = re.compile(rf"(<!-- {name}: .*? -->\n).*?(<!-- end -->)", re.DOTALL)
        text = block.sub(lambda found, made=made: f"{found[1]}\n{made}\n\n{found[2]}", text)
    return text


def headline() -> str:
    env = measured("moe_layer_h200")["environment"]
    step = measured("hf_step_h200")["steps"]["qwen3_moe"]
    over = step["over_fuseops"]
    return (
        f"Forward and backward of a Qwen3-MoE of transformers run {over['stock']['ratio']:.1f} times as fast after "
        f"`hf.apply` as before it, and {over['stock_compiled']['ratio']:.1f} times\n"
        f"as fast as compiled by `torch.compile`. A MoE layer runs at {moe_layer()} the speed of the best of\n"
        f"SonicMoE and `torch.compile`. When saved tensors of a stack of MoE blocks go to the host as planned,\n"
        f"{offload('moe')} ([all figures](#measured)).\n"
        f"\n"
        f"Conditions: one {env['gpu']}, bf16, torch {env['torch'].partition('-')[0]}, triton {env['triton']}; "
        "candidates ran in turns in one process;\n"
        f"peaks count what a step adds to what is there before it."
    )


def versions() -> Rows:
    """The oldest that `pyproject.toml` allows, and the newest with which the whole suite was run or CI runs."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    needs = [*project["dependencies"], *project["optional-dependencies"]["hf"]]
    oldest = dict(re.findall(r"^(\w+)>=([\d.]+)", "\n".join(needs), re.MULTILINE))
    rows = json.loads(TRIED.read_text(encoding="utf-8")).values()
    found = [["", "oldest", "newest tried"]]
    pythons = re.findall(r":: (3\.\d+)", "\n".join(project["classifiers"]))
    found.append(["Python", project["requires-python"].removeprefix(">="), pythons[-1]])
    for name in ("torch", "triton", "transformers"):
        tried = max(tuple(map(int, row["versions"][name].split("+")[0].split("."))) for row in rows)
        major, minor = [*oldest[name].split("."), "0"][:2]
        found.append([name, f"{major}.{minor}", f"{tried[0]}.{tried[1]}"])
    return found


def models() -> Rows:
    """What `hf.apply` replaces in each family, in short: from the table that the tests have written."""
    text = HUGGINGFACE.read_text(encoding="utf-8")
    lines = re.findall(r"^\|(.*)\|$", text[text.index("<!-- replaced -->") :], re.MULTILINE)
    head, _, *rows = ([cell.strip() for cell in line.split("|")] for line in lines)
    parts = [title for title in head if title not in ("family", "left to stock")]
    found: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        if len(row) == len(head):
            of = dict(zip(head, row, strict=True))
            found.setdefault(tuple("yes" if of[part] else "" for part in parts), []).append(
                of["family"]
            )
    return [["", *parts], *([", ".join(names), *cells] for cells, names in found.items())]


def figures() -> Rows:
    rows = [*model_figures(), *moe_figures(), *kernel_figures(), *offload_figures()]
    return [["what", "beside", "measured"], *rows]


def model_figures() -> Iterator[list[str]]:
    """Of a model of transformers whose modules `hf.apply` has replaced."""
    step = measured("hf_step_h200")["steps"]["qwen3_moe"]
    over, peak = step["over_fuseops"], step["peak_gib"]
    yield [
        "Qwen3-MoE of transformers (4 layers, 16k tokens) after `hf.apply`, forward and backward",
        "as it is; the same compiled",
        f"{over['stock']['ratio']:.2f} and {over['stock_compiled']['ratio']:.2f} times its speed; a peak of "
        f"{peak['fuseops']:.1f} instead of {peak['stock']:.1f} and {peak['stock_compiled']:.1f} GiB",
    ]


def moe_figures() -> Iterator[list[str]]:
    layer, mlp = measured("moe_layer_h200"), measured("grouped_mlp_h200")
    saved = [cell["saved_bytes"] for cell in layer["cells"].values() if "saved_bytes" in cell]
    sonic = f"SonicMoE {layer['environment']['sonic-moe']}"
    yield [
        f"MoE layer, forward and backward, {len(steps(layer))} shapes",
        f"the best of {sonic} (default and autotuned tiles) and `torch.compile`",
        f"{moe_layer()} its speed",
    ]
    yield [
        "the same, bytes saved for the backward",
        "SonicMoE; `torch.compile`",
        f"{span(share(saved, 'sonic'))} of SonicMoE's; {span(share(saved, 'compile'))} of compile's",
    ]
    yield [
        f"expert MLP, forward and backward, {len(steps(mlp))} shapes",
        "`torch.compile` over `F.grouped_mm`",
        f"{grouped_mlp()} its speed",
    ]


def kernel_figures() -> Iterator[list[str]]:
    summary = measured("grouped_gemm_h200")["summary"]
    gemm = [summary[f"{kind}/torch/settled"] for kind in ("fwd", "dgrad", "wgrad")]
    means = ", ".join(f"{found['geomean']:.2f}" for found in gemm)
    least = min(found["least"][-1] for found in gemm)
    yield [
        "grouped GEMM: forward, gradients of input and weight",
        "`F.grouped_mm`",
        f"{means} times its speed (geometric means; least {least:.2f})",
    ]
    fp8 = measured("fp8_h200")["settled"]
    found = {
        kind: times([c["ratios"]["bf16"]["ratio"] for n, c in fp8.items() if f"/{kind}/" in n])
        for kind in ("fwd", "dgrad", "wgrad")
    }
    yield [
        f"the same in FP8 with block scales, operands quantized before, {len(fp8)} products",
        "our own bf16",
        f"{found['fwd']}, {found['dgrad']} and {found['wgrad']} its speed",
    ]
    cells = measured("memory_bound_h200")["bandwidth"]
    near = sum((cell.get("share_of_copy") or 0) >= NEAR for cell in cells)
    behind = sum(bool(cell.get("faster_peers")) for cell in cells)
    yield [
        f"memory-bound kernels, {len(cells)} cases",
        "`torch.compile`, Liger-Kernel, eager torch",
        f"{f'a peer is faster in {behind}' if behind else 'no peer is faster in any'}; "
        f"{near} reach {NEAR} of the bandwidth of a copy",
    ]


def offload_figures() -> Iterator[list[str]]:
    """Beside other ways to train, where the file holds them."""
    dense, moe = measured("offload_dense_h200"), measured("offload_moe_h200")
    if slow := dense.get("others", {}).get("checkpoint"):
        plan = min(
            dense["rounds"].values(), key=lambda plan: abs(plan["peak_gib"] - slow["peak_gib"])
        )
        before = dense["rounds"]["nothing"]["peak_gib"]
        yield [
            f"12 dense blocks that peak at {before:.1f} GiB, held to {plan['peak_gib']:.1f}",
            f"`torch.utils.checkpoint` of every block: {slow['peak_gib']:.1f} GiB, {slow['ratio']:.2f} times the step",
            f"{plan['ratio']:.2f} times the step",
        ]
    if hooks := moe.get("others", {}).get("async hooks"):
        yield [
            "32 MoE blocks, saved tensors to the host",
            f"hooks with `record_stream`: {hooks['peak_gib']:.1f} GiB, {hooks['ratio']:.2f} times the step",
            offload("moe"),
        ]


def steps(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What a file says of forward and backward, shape by shape."""
    rows = result["summary"].items()
    return [row for name, row in rows if name.endswith("/fwd+bwd")]


def moe_layer() -> str:
    return times([row["fuseops"]["ratio"] for row in steps(measured("moe_layer_h200"))])


def grouped_mlp() -> str:
    return times([row["eager"]["ratio"] for row in steps(measured("grouped_mlp_h200"))])


def offload(model: str) -> str:
    """What left the device for how much of the step: by the plan that moves most."""
    rounds = measured(f"offload_{model}_h200")["rounds"]
    plan = max(rounds.values(), key=lambda way: way.get("moved_gib", 0))
    return (
        f"the peak falls from {rounds['nothing']['peak_gib']:.1f} to {plan['peak_gib']:.1f} GiB, and the step "
        f"takes {100 * (plan['ratio'] - 1):.1f} % longer"
    )


def share(saved: Sequence[Mapping[str, int]], peer: str) -> list[float]:
    return [cell["fuseops"] / cell[peer] for cell in saved if peer in cell]


def times(ratios: Sequence[float]) -> str:
    return f"{span(ratios)} times"


def main() -> int:
    from pictures import pictures  # this script's folder is on the path when it runs

    pages = {PAGE: page, README: readme}
    texts = {
        path: make(path.read_text(encoding="utf-8")) for path, make in pages.items()
    } | pictures()
    if "--check" not in sys.argv[1:]:
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
        return 0
    stale = [
        p for p, text in texts.items() if not p.exists() or p.read_text(encoding="utf-8") != text
    ]
    for path in stale:
        print(f"{path.relative_to(ROOT)} is stale: python benchmarks/tables.py", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
