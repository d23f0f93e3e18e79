"""docs/measured.md, the figures of the README, and the pictures, so that none is typed or drawn by hand.

python benchmarks/tables.py            # write them
python benchmarks/tables.py --check    # exit 1 where one is stale
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path

from subjects import Rows, measured, overview, page, span, table

ROOT = Path(__file__).resolve().parent.parent
PAGE, README, HUGGINGFACE = (
    ROOT / "docs/measured.md",
    ROOT / "README.md",
    ROOT / "docs/huggingface.md",
)
PROJECT, TRIED = ROOT / "pyproject.toml", ROOT / ".ci" / "rows.json"
MEASURED = "https://github.com/fuseops/fuseops/blob/main/docs/measured.md"
TOLD = (  # of the subjects by the README
    "Models of transformers", "A MoE layer", "The MLP of experts", "Grouped GEMMs in bf16", "Layers in FP8",
    "Grouped GEMMs in FP8", "Memory-bound kernels", "The loss of a head", "Saved tensors to the host: dense blocks",
    "Saved tensors to the host: MoE blocks", "Experts over four GPUs",
)  # fmt: skip


def readme(text: str) -> str:
    """The README with its figures between the marks `<!-- name: ... -->` and `<!-- end -->`."""
    made_of = {
        "headline": headline(),
        "versions": "\n".join(table(versions())),
        "models": "\n".join(table(models())),
        "figures": "\n".join(table([row[:2] for row in overview(TOLD, MEASURED)])),
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


def moe_layer() -> str:
    rows = measured("moe_layer_h200")["summary"].items()
    steps = [row["fuseops"]["ratio"] for name, row in rows if name.endswith("/fwd+bwd")]
    return f"{span(steps)} times"


def offload(model: str) -> str:
    """What left the device for how much of the step: by the plan that moves most."""
    rounds = measured(f"offload_{model}_h200")["rounds"]
    plan = max(rounds.values(), key=lambda way: way.get("moved_gib", 0))
    return (
        f"the peak falls from {rounds['nothing']['peak_gib']:.1f} to {plan['peak_gib']:.1f} GiB, and the step "
        f"takes {100 * (plan['ratio'] - 1):.1f} % longer"
    )


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
