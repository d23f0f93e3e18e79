"""What a user sees of fuseops by name: nothing that is not meant, nothing undocumented, no two names for two things."""

import ast
import importlib
import inspect
import itertools
import json
import pickle
import re
import subprocess
import sys
import types
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import fuseops as fo
from fuseops import offload
from fuseops.ops import scopes

PUBLIC = [
    "fuseops",
    *(f"fuseops.{part}" for part in ("kernels", "offload", "ops", "recipes", "testing")),
    *(p for p in ("fuseops.distributed",) if importlib.util.find_spec(p)),
    "fuseops.integrations.hf",
]

NEARLY = {
    ("Op", "ops"): "the base of every op, and the catalogue of those that are here",
    ("Operand", "operand"): "what a GEMM reads, and the function that makes one",
    ("recipe", "recipes"): "a scope, and what it takes: fo.recipe(fo.recipes.Float8BlockScaling())",
    ("Rule", "rules"): "what a user writes, and the scope that tries it: fo.rules(fo.Rule(...))",
}
"""Names that differ in case or in an s, and why both are there."""


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_package_shows_what_it_states(name: str) -> None:
    module = importlib.import_module(name)
    stated = module.__all__
    assert len(set(stated)) == len(stated)
    assert set(dir(module)) - {"__version__"} == set(stated)
    for public in stated:
        value = getattr(module, public)
        assert not public.startswith("_") and inspect.getdoc(value), f"{name}.{public}"
        if isinstance(value, types.ModuleType):
            assert value.__name__.startswith(name)


@pytest.mark.parametrize(
    "name", [p for p in PUBLIC if p not in ("fuseops.kernels", "fuseops.testing")]
)
def test_what_a_package_exports_is_stated(name: str) -> None:
    """What it imports of the package, it shows: nothing else is looked for there."""
    module = importlib.import_module(name)
    source = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    imports = (node for node in source.body if isinstance(node, ast.ImportFrom) and node.level)
    names = {found.asname or found.name for node in imports for found in node.names}
    assert {name for name in names if not name.startswith("_")} == set(module.__all__)


@pytest.mark.parametrize("name", PUBLIC)
def test_no_two_public_names_are_nearly_one(name: str) -> None:
    def bare(word: str) -> str:
        return word.lower().replace("_", "").removesuffix("s")

    names = sorted(importlib.import_module(name).__all__)
    pairs = {(a, b) for a, b in itertools.combinations(names, 2) if bare(a) == bare(b)}
    assert pairs <= NEARLY.keys(), "one of each is enough, or say in NEARLY why not"


def test_moe_spells_out_the_options_of_its_router() -> None:
    moe, router = (
        inspect.signature(cls, eval_str=True).parameters for cls in (fo.MoE, fo.ops.Router)
    )
    assert not any(p.kind is p.VAR_KEYWORD for p in moe.values())
    for name, p in router.items():
        mine = moe["router_bias" if name == "bias" else name]
        assert (mine.default, mine.annotation, mine.kind) == (p.default, p.annotation, p.kind), name
    chosen = {
        "score": "sigmoid", "normalize": False, "scale": 2.5, "expert_bias": True, "groups": 2,
        "top_groups": 2, "balance_loss": 0.5, "z_loss": 0.25, "given_experts": True,
    }  # fmt: skip
    built = fo.MoE(8, 4, 4, 2, router_bias=True, **chosen)["router"]
    alone = fo.ops.Router(8, 4, 2, bias=True, **chosen)
    assert repr(built) == repr(alone) and built.state_dict().keys() == alone.state_dict().keys()
    for name in (
        "score",
        "normalize",
        "scale",
        "groups",
        "top_groups",
        "balance_loss",
        "z_loss",
        "reads",
    ):
        assert getattr(built, name) == getattr(alone, name) != getattr(fo.ops.Router(8, 4, 2), name)


def test_the_readme_is_clean_for_pyright_and_wrong_names_are_not(tmp_path: Path) -> None:
    """Its rule, its op and its model; a misspelt option of fo.MoE is an error."""
    found = Path(sys.executable).with_name("pyright")
    if not found.exists():
        pytest.skip("pyright is not installed beside this Python")
    readme = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
    snippets = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    ours = [s for s in snippets if "transformers" not in s and "# mine.py" not in s]
    (tmp_path / "readme.py").write_text("\n".join(["import fuseops as fo", "import torch", *ours]))
    (tmp_path / "wrong.py").write_text(
        "import fuseops as fo\nfo.MoE(8, 4, 4, 2, balance_los=1.0)\n"
    )
    command = [str(found), "--pythonpath", sys.executable, "--outputjson", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if not ran.stdout.startswith("{"):
        pytest.skip(f"pyright does not run here: {ran.stderr[-200:]}")
    told = [
        f"{Path(d['file']).name}: {d['message']}"
        for d in json.loads(ran.stdout)["generalDiagnostics"]
        if d["severity"] == "error"
    ]
    assert told == ['wrong.py: No parameter named "balance_los"']


# --- explain(): one thing, three ways to read it ---------------------------------------------------


def stack() -> Any:
    mlp = [
        fo.Sequential(fo.ops.Linear(8, 16), fo.ops.GELU(), fo.ops.Linear(16, 8)) for _ in range(2)
    ]
    return torch.nn.Sequential(*mlp, torch.nn.Tanh()), torch.randn(3, 8, requires_grad=True)


def test_an_explanation_is_its_text_its_page_and_its_data() -> None:
    model, x = stack()
    for said in (fo.explain(model, x), model[0].explain(x)):
        assert isinstance(said, str) and repr(said) == str(said) and type(str(said)) is str
        data = said.to_json()
        assert [p["path"] for p in data["plans"]] == [p.path for p in said.plans]
        assert data["saved_bytes"] == said.saved_bytes == sum(p.saved_bytes for p in said.plans) > 0
        page, shown = (p.replace("<wbr>", "") for p in (said.to_html(), said._repr_html_()))
        for plan in said.plans:
            for tensor in plan.saved:
                # equal plans share a section
                name = tensor.name.removeprefix("0.").removeprefix("1.")
                assert name in said and name in page and name in shown
            assert {m.rule for m in plan.misses} <= {
                m["rule"] for p in data["plans"] for m in p["misses"]
            }
        again = pickle.loads(pickle.dumps(said))
        assert again == said and type(again) is type(said) and again.plans == said.plans


def test_an_explanation_is_written_to_a_page(tmp_path: Path) -> None:
    model, x = stack()
    said = model[0].explain(x)
    said.save_html(tmp_path / "plan.html")
    assert (tmp_path / "plan.html").read_text() == said.to_html()
    assert "linear_act" in said.to_html("of mine") and "<title>of mine</title>" in said.to_html(
        "of mine"
    )


@pytest.mark.parametrize(
    ("made", "shown"),
    [
        (lambda: fo.fusion(False), "fusion=False"),
        (lambda: fo.fusion(strict=["mlp"]), "strict=['mlp']"),
        (lambda: fo.rules("pointwise"), "rules=['pointwise']"),
        (lambda: fo.recipe(None), "recipe=None, strict_recipe=False"),
        (lambda: fo.reference(), "reference=True"),
    ],
    ids=["fusion", "strict", "rules", "recipe", "reference"],
)
def test_a_scope_is_shown_by_what_it_says_and_can_be_entered_again(made: Any, shown: str) -> None:
    model, x = stack()
    scope, outside = made(), scopes.current().layer
    assert repr(scope) == f"<fuseops scope: {shown}>"

    def inside() -> Any:
        model(x)
        return scopes.current().layer

    for _ in range(2):
        with scope:
            said = inside()
        assert said is not outside and scopes.current().layer is outside
    assert scope(inside)() is said and scopes.current().layer is outside


def test_no_public_scope_is_shown_by_its_address() -> None:
    """As a bare generator's is. kernels keep one, which compiled code enters: dynamo knows contextlib's."""
    bare = contextmanager(iter).__code__
    public = [importlib.import_module(name) for name in PUBLIC if name != "fuseops.kernels"]
    found = [
        f"{module.__name__}.{name}"
        for module in public
        for name, thing in vars(module).items()
        if not name.startswith("_") and getattr(thing, "__code__", None) is bare
    ]
    assert found == []


def test_a_written_scope_is_one_of_each_call_and_can_be_entered_again() -> None:
    scope = fo.quantized_init(fo.recipes.Float8BlockScaling())
    assert repr(fo.debug()) == "<fuseops scope: debug()>"
    assert repr(scope).startswith("<fuseops scope: quantized_init(Float8BlockScaling(")
    for _ in range(2):
        with scope:
            op = fo.ops.Linear(128, 128)
        assert "weight_scale_inv" in op.state_dict()
    with (seen := fo.debug()) as outer, seen as inner:
        assert inner is outer
    assert scopes.current().debug is None
    assert fo.debug()(lambda: scopes.current().debug)() is not None


def test_plans_and_scopes_are_shown_in_a_line() -> None:
    model, x = stack()
    fo.configure(model)
    moved = offload.to_host(min_bytes=1)
    assert repr(moved) == "<offload.to_host(min_bytes=1), closed>"
    with moved, offload.keep() as kept, offload.disabled() as off:
        assert (
            repr(moved).endswith(" open>") and "keep()" in repr(kept) and "disabled()" in repr(off)
        )
    assert repr(model[0].plan(x)) == "<FusionPlan of 0: 1 fused, 0 not fused, saves 288 B>"
    scheduler = offload.Scheduler(model, layers=["0", "1"])
    assert repr(scheduler) == "<offload.Scheduler of Sequential, 2 layers, detached>"
    with scheduler:
        assert "attached" in repr(scheduler)
    shown = [moved.report(), scheduler, *fo.plans(model, x), offload.plan(model, x)]
    assert all(len(repr(thing)) < 200 and "\n" not in repr(thing) for thing in shown)
