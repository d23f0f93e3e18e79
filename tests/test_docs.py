"""The code of the documentation pages runs as it stands."""

import ast
import json
import linecache
import pkgutil
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fuseops as fo
from fuseops.kernels import configs, registry
from fuseops.ops import te_names
from fuseops.rules.builtin_rules import BUILTIN_RULES
from fuseops.testing.catalogue import exported
from fuseops.testing.strategies import DRAWN

DOCS = Path(__file__).parents[1] / "docs"


def run(page: str, namespace: dict[str, Any]) -> None:
    """All snippets of a page, in order, in one namespace."""
    snippets = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL)
    assert snippets
    for number, snippet in enumerate(snippets):
        name = f"<{page}, snippet {number}>"
        linecache.cache[name] = len(snippet), None, snippet.splitlines(True), name  # for triton.jit
        exec(compile(snippet, name, "exec"), namespace)


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
        (rule.name, rule.kind) for rule in BUILTIN_RULES
    ]


def test_who_types_the_name_of_an_op_of_te_is_told_ours() -> None:
    """Those of docs/ops.md, and those alone."""
    table = (DOCS / "ops.md").read_text("utf-8").split("## Options")[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| `")]
    others = {name: ours for ours, _, te in rows for name in re.findall(r"`(\w+)`", te)}
    others = {n: o for n, o in others.items() if n[0].isupper() and n not in fo.ops.__all__}
    assert {*others} == {*te_names.OURS} - {"Sequential"}
    for name, ours in te_names.OURS.items():
        assert ours == "Sequential" or f"`{ours.removeprefix('ops.')}`" in others[name]
        for module in (fo, fo.ops):
            if not hasattr(module, name):
                with pytest.raises(AttributeError, match=rf"{name}'; here it is fo\.{ours} "):
                    getattr(module, name)
    with pytest.raises(AttributeError, match=r"'Linear'; here it is fo\.ops\.Linear "):
        _ = fo.Linear  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"has no attribute 'BasicOp'$"):
        _ = fo.ops.BasicOp  # type: ignore[attr-defined]


def test_every_recipe_has_its_line() -> None:
    page = (DOCS / "howto" / "recipe.md").read_text("utf-8")
    public = [getattr(fo.recipes, name) for name in fo.recipes.__all__]
    made = {p.__name__ for p in public if isinstance(p, type) and issubclass(p, fo.recipes.Recipe)}
    missing = {name for name in made - {"Recipe"} if name not in page}
    assert not missing, f"give {missing} a line in docs/howto/recipe.md"
    # of a ByName are recipes that are drawn
    missing = made - {"Recipe", "ByName"} - {recipe.__name__ for recipe in DRAWN}
    assert not missing, f"draw {missing} in `recipes()` of fuseops/testing/strategies.py"


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What torchrun sets for a run of one process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    for name, value in {**where, "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


WITH_NAMES = {"adopt.md", "offload.md"}  # of their own tests
CODE = sorted(
    str(page.relative_to(DOCS))
    for page in DOCS.rglob("*.md")
    if page.name not in WITH_NAMES and "```python" in page.read_text("utf-8")
)


@pytest.mark.parametrize("page", CODE)
@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("ignore")  # of transformers and torch, not ours
def test_the_code_of_a_page_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page == "distributed.md" and torch.__version__.startswith("2.11."):
        pytest.skip("fully_shard of torch 2.11 knows one mesh, and experts have their own")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fuseops.kernels.configs.SPACES", dict(configs.SPACES))
    monkeypatch.setattr("fuseops.kernels.registry.KERNEL_OPS", dict(registry.KERNEL_OPS))
    run(page, {"__name__": f"docs_{Path(page).stem}"})


@pytest.mark.parametrize("book", sorted(DOCS.rglob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs(book: Path) -> None:
    """Every cell, in one namespace; what a cell ends with is shown as a notebook shows it."""
    cells = json.loads(book.read_text("utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    namespace: dict[str, Any] = {"__name__": book.stem}
    shown = []
    for source in sources:
        body = ast.parse(source, book.name)
        last = body.body.pop() if isinstance(body.body[-1], ast.Expr) else None
        exec(compile(body, book.name, "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), book.name, "eval"), namespace)
            shown += [value._repr_html_()] if hasattr(value, "_repr_html_") else []
    assert len(shown) >= 2 and all("<svg" in page for page in shown)
    assert all(not cell.get("outputs") for cell in cells), "outputs are made where it runs"


@pytest.mark.cxx
@pytest.mark.filterwarnings("ignore")  # of transformers and torch, not ours
def test_a_model_of_transformers_is_adopted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    run("adopt.md", namespace)
    assert namespace["plan"].after.moved > 0
    assert "routed_mlp (joint)" in namespace["moe"].explain(namespace["x"])
    trained = {n for n, p in namespace["adapted"].named_parameters() if p.requires_grad}
    assert any("mlp.fc1" in name for name in trained) and all("lora_" in name for name in trained)


PAGES = sorted([*DOCS.rglob("*.md"), *DOCS.parent.glob("*.md")])


def anchors(page: Path) -> set[str]:
    """Of every heading, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("http"):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


ROOTS = {
    "fo": "fuseops",
    "fuseops": "fuseops",
    "offload": "fuseops.offload",
    "hf": "fuseops.integrations.hf",
}
FOLDERS = [DOCS.parent / at for at in (".", "fuseops", "fuseops/kernels", "docs", "benchmarks")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_and_files_in_the_text_are_there(page: Path) -> None:
    if page.name == "CHANGELOG.md":  # of every version
        return
    for code in re.findall(r"`([^`\n]+)`", page.read_text("utf-8")):
        for file in re.findall(r"^(?:[\w.-]+/)+[\w-]+\.(?:py|json|md)$", code):
            assert any((folder / file).exists() for folder in FOLDERS), file
        for root, names in re.findall(r"(?<![\w./-])(\w+)((?:\.[A-Za-z_]\w*)+)(?![\w/])", code):
            if root in ROOTS and not names.endswith((".py", ".json", ".html", ".md")):
                pkgutil.resolve_name(f"{ROOTS[root]}{names}")


def test_offload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, x = Stack(), torch.randn(8, 16)

    def train(model: nn.Module) -> None:
        for _ in range(2):
            model(x).sum().backward()

    names = {"model": model, "head": nn.Linear(16, 4), "x": x, "batch": x, "data": [x, x]}
    run("offload.md", {**names, "optimizer": torch.optim.SGD(model.parameters()), "train": train})
    assert (tmp_path / "plan.html").exists() and (tmp_path / "plan.json").exists()
