"""The code of the documentation pages runs as it stands."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fuseops as fo
from fuseops.fusions.tables import TABLES
from fuseops.testing.catalogue import exported

DOCS = Path(__file__).parents[1] / "docs"


def run(page: str, namespace: dict[str, Any]) -> None:
    """All snippets of a page, in order, in one namespace."""
    snippets = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL)
    assert snippets
    for snippet in snippets:
        exec(compile(snippet, page, "exec"), namespace)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        block = (fo.ops.RMSNorm(16), fo.ops.Linear(16, 32), fo.ops.GELU(), fo.ops.Linear(32, 16))
        self.blocks = nn.ModuleList(fo.Residual(*block) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_every_op_and_rule_has_its_line() -> None:
    ops, rules = (DOCS / "ops.md").read_text("utf-8").split("## Rules")
    first = [line.split("|")[1] for line in ops.splitlines() if line.startswith("| `")]
    listed, public = re.findall(r"`(\w+)`", " ".join(first)), {o.__name__ for o in exported()}
    assert set(listed) == public, f"give {public - set(listed)} a line in docs/ops.md"
    assert len(listed) == len(public)
    assert re.findall(r"^\| `([a-z_]+)` \| (\w+)", rules, re.MULTILINE) == [
        (rule.name, rule.kind) for rule in TABLES
    ]


def test_grouped_linear() -> None:
    run("grouped_linear.md", {})


def test_offload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, x = Stack(), torch.randn(8, 16)

    def train(model: nn.Module) -> None:
        for _ in range(2):
            model(x).sum().backward()

    names = {"model": model, "head": nn.Linear(16, 4), "x": x, "batch": x, "data": [x, x]}
    run("offload.md", {**names, "optimizer": torch.optim.SGD(model.parameters()), "train": train})
    assert (tmp_path / "plan.html").exists() and (tmp_path / "plan.json").exists()
