"""The house rules that a machine can check. Each failure says where and what to do instead."""

import ast
import functools
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import fresh
import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fuseops"
FILES = sorted(PACKAGE.rglob("*.py"))

MAX_FUNCTION_LINES = 65
MAX_KERNEL_LINES = 95  # of what Triton compiles, which calls less
MAX_IMPORT_CALLS = 90_000  # 70,000 take 0.25 s beyond torch

# Lowest first: a file imports from its own layer and those before it.
LAYERS = [
    {"arguments", "attributes", "errors", "globs", "machine", "plain", "torch_private", "words"},
    {"kernels"},
    {"recipes"},
    {"ops"},
    {"rules"},
    {"plan"},
    {"run"},
    {"observe"},
    {"explain"},
    {"distributed"},
    {"layers"},
    {"offload"},
    {"testing", "integrations", "demo", "cli", "__main__"},
    {"__init__"},  # the front door, `import fuseops as fo`, shows all of them
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


@functools.cache
def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def at(file: Path, node: ast.AST) -> str:
    return f"{file.relative_to(ROOT)}:{node.lineno}"  # type: ignore[attr-defined]


def part_of(dotted: str) -> str:
    """The part of the package that a module belongs to: fuseops.ops.linear -> ops."""
    return [*dotted.split("."), "__init__"][1]


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def run_time_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below `node`, inside functions too, except what only a type checker reads."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and is_type_checking(child.test):
            for other in child.orelse:
                yield other
                yield from run_time_nodes(other)
        else:
            yield child
            yield from run_time_nodes(child)


def imported_parts(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[ast.AST, str]]:
    """(node, part) for every import of the package in `tree`."""
    for node in run_time_nodes(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: None if is_package else -1]
                parents = parents[: len(parents) - node.level + 1]
                base = ".".join([*parents, *filter(None, [node.module])])
            # `from fuseops import ops` names a layer, `from fuseops import Rule` the front door.
            targets = (
                [f"fuseops.{a.name}" if a.name in LEVEL else base for a in node.names]
                if base == "fuseops"
                else [base]
            )
        else:
            continue
        for target in targets:
            if target.split(".")[0] == "fuseops":
                yield node, part_of(target)


def test_the_layers_are_those_that_the_guide_lists() -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    listed = guide.partition("## The layers")[2].split("```")[1].strip().splitlines()
    names = [set(re.findall(r"\w+", re.match(r"\w+(, \w+)*", line)[0])) for line in listed]
    ours = [level - {"__main__", "__init__"} for level in LAYERS]
    assert names[::-1] == [level for level in ours if level]


def test_imports_point_down() -> None:
    wrong = []
    for file in FILES:
        module = module_name(file)
        own = part_of(module)
        for node, part in imported_parts(parse(file), module, file.name == "__init__.py"):
            for name in {own, part} - LEVEL.keys():
                wrong.append(f"{at(file, node)}: {name} has no place in LAYERS of {__file__}")
            if LEVEL.get(part, 0) > LEVEL.get(own, len(LAYERS)):
                wrong.append(f"{at(file, node)}: {own} imports {part}, which is above it")
    assert not wrong, "\n".join(wrong)


def imported_modules(file: Path) -> set[str]:
    """The modules of the package that `file` imports anywhere, inside functions and for types alone too."""
    module, found = module_name(file), set()
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(parents if node.level else []), *filter(None, [node.module])])
            inner = {f"{base}.{alias.name}" for alias in node.names}
            found |= inner & MODULES or {base}
    return found & MODULES - {module}


MODULES = {module_name(file) for file in FILES}


def test_no_imports_go_in_a_circle() -> None:
    left = {module_name(file): imported_modules(file) for file in FILES}
    while done := {module for module, needs in left.items() if not needs & left.keys()}:
        left = {module: needs for module, needs in left.items() if module not in done}
    # what is left lies on a circle, or imports what does
    assert not left, f"a circle is among {sorted(left)}: move what both sides need below them"


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("import fuseops as fo", ["__init__"]),
        ("from fuseops import Rule, offload", ["__init__", "offload"]),
        ("import fuseops.cli", ["cli"]),
        ("def f():\n  from fuseops.rules.rule import Rule", ["rules"]),
        ("from ..offload import keep", ["offload"]),
        ("from . import base", ["ops"]),
        ("if TYPE_CHECKING:\n  import fuseops.cli\nelse:\n  import fuseops.demo", ["demo"]),
        ("import torch", []),
    ],
)
def test_the_import_rule_sees(source: str, parts: list[str]) -> None:
    found = imported_parts(ast.parse(source), "fuseops.ops.linear", is_package=False)
    assert [part for _, part in found] == parts


def test_every_function_and_class_is_named_elsewhere() -> None:
    """In the package, its docs, examples, benchmarks or tests: what nothing names is dead, or found by nobody."""
    elsewhere = (
        f
        for folder in ("docs", "examples", "benchmarks", "tests")
        for f in (ROOT / folder).rglob("*.*")
    )
    texts = [*FILES, *(f for f in elsewhere if f.suffix in (".py", ".md")), ROOT / "README.md"]
    said = Counter(
        word for f in texts for word in re.findall(r"\w+", f.read_text(encoding="utf-8"))
    )
    dead = [
        f"{at(file, node)}: {node.name}"
        for file in FILES
        for node in parse(file).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and said[node.name] == 1
        and not node.name.startswith("__")
    ]
    assert not dead, "\n".join(dead)


def test_hooks_on_all_modules_have_one_home() -> None:
    """Who wants to know which module runs takes `observe.modules.calls_watched`, or the stack of modules kept there."""
    home = PACKAGE / "observe" / "modules.py"
    hook = re.compile(r"register_module_(?:full_)?(?:forward|backward)\w*hook")
    homes = {file for file in FILES if hook.search(file.read_text(encoding="utf-8"))}
    assert homes == {home}, [str(file.relative_to(ROOT)) for file in homes - {home}]


def test_no_part_is_without_a_layer() -> None:
    parts = {part_of(module_name(file)) for file in FILES}
    assert parts <= LEVEL.keys(), f"give {parts - LEVEL.keys()} a place in LAYERS"


IMPORT_PROBE = """
import json, sys
import torch
before, calls = set(sys.modules), 0

def seen(frame, event, arg):
    global calls
    calls += event == "call"

sys.setprofile(seen)
import fuseops
sys.setprofile(None)
print(json.dumps({"calls": calls, "modules": sorted(set(sys.modules) - before)}))
"""

HEAVY = {
    *("triton", "torch._dynamo", "torch._inductor", "torch.utils.cpp_extension"),
    *("rich", "matplotlib", "transformers", "safetensors", "hypothesis", "pytest"),
}


def test_import_is_light() -> None:
    """By what it imports and the Python functions that run, which no clock makes noisy."""
    ran = fresh.run("-c", IMPORT_PROBE, cwd=ROOT)
    assert not ran.returncode, ran.stderr
    found = json.loads(ran.stdout)
    loaded = HEAVY & set(found["modules"])
    assert not loaded, f"`import fuseops` imports {loaded}: import them where they are used"
    assert found["calls"] <= MAX_IMPORT_CALLS


def test_functions_are_short() -> None:
    # A file is as long as its subject; a function is what a reader holds in his head at once.
    long = []
    for file in FILES:
        most = MAX_KERNEL_LINES if file.parent.name == "device" else MAX_FUNCTION_LINES
        for node in ast.walk(parse(file)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > most:
                    long.append(f"{at(file, node)}: {node.name} has {lines} lines of {most}")
    assert not long, "take a step out of it, under a name of its own:\n" + "\n".join(long)


@pytest.mark.parametrize(
    "folder",
    ["ops", "rules", "plan", "run", "observe", "explain", "offload", "offload/planning", "kernels"],
    ids=str,
)
def test_a_large_folder_says_where_everything_is(folder: str) -> None:
    init = PACKAGE / folder / "__init__.py"
    words = set(re.findall(r"\w+", ast.get_docstring(parse(init)) or ""))
    missing = {file.stem for file in init.parent.glob("*.py")} - words - {"__init__"}
    assert not missing, f"give {sorted(missing)} a place in the docstring of {init}"


def test_classes_have_names_of_their_own() -> None:
    where: dict[str, list[str]] = {}
    for file in FILES:
        for node in ast.walk(parse(file)):
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, []).append(at(file, node))
    twice = [f"{name}: {', '.join(places)}" for name, places in where.items() if len(places) > 1]
    assert not twice, "one word for two things:\n" + "\n".join(twice)


OTHER_WORDS = {
    **dict.fromkeys(("probabilities", "probability"), "probs"),
    **dict.fromkeys(("grad_x", "x_grad", "grad_input"), "dx"),
    **dict.fromkeys(("grad_w", "w_grad", "grad_weight"), "dw"),
    **dict.fromkeys(("grad_y", "y_grad", "grad_out"), "dy"),
    **dict.fromkeys(("evict", "swap_out"), "offload"),
    **dict.fromkeys(("prefetch", "swap_in"), "reload"),
    **dict.fromkeys(("group_ends", "group_offsets"), "offs"),
    "exchange": "dispatcher",
}
"""What the words of CONTRIBUTING.md are called elsewhere."""


def test_names_are_words_of_the_list() -> None:
    wrong = []
    for file in FILES:
        for node in ast.walk(parse(file)):
            name = getattr(node, "name", None) or getattr(node, "arg", None)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                name = node.id
            if isinstance(name, str) and name.strip("_") in OTHER_WORDS:
                wrong.append(f"{at(file, node)}: {name} is called {OTHER_WORDS[name.strip('_')]}")
    assert not wrong, "\n".join(wrong)


def test_test_files_have_names_of_their_own() -> None:
    # pytest imports them by their bare names: of two of one name it collects none.
    names = Counter(file.stem for file in (ROOT / "tests").rglob("test_*.py"))
    twice = [name for name, times in names.items() if times > 1]
    assert not twice, f"two files are called {twice}"


def test_no_block_pointers() -> None:
    # Triton is removing them; tensor descriptors do the same and compile from sm_80 on.
    found = [f for f in FILES if "make_block_ptr" in f.read_text(encoding="utf-8")]
    assert not found, f"make_block_ptr in {found}"


def test_only_the_programs_print() -> None:
    found = []
    for file in FILES:
        if part_of(module_name(file)) in {"cli", "demo", "__main__"}:
            continue
        for node in ast.walk(parse(file)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
                found.append(f"{at(file, node)}: print: use a logger, or return the text")
    assert not found, "\n".join(found)


def test_no_assert_statements() -> None:
    # `python -O` removes them, and their messages name neither the module path nor the tensor.
    found = [
        f"{at(file, node)}: assert: raise an error of fuseops.errors instead"
        for file in FILES
        for node in ast.walk(parse(file))
        if isinstance(node, ast.Assert)
    ]
    assert not found, "\n".join(found)


def test_environment_variables_are_documented() -> None:
    documented = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    for file in FILES:
        for name in re.findall(r"FUSEOPS_[A-Z][A-Z_]*[A-Z]", file.read_text(encoding="utf-8")):
            assert f"`{name}`" in documented, f"{name} ({file}) is missing in docs/environment.md"


@pytest.mark.skipif(os.name == "nt", reason="no file modes")
@pytest.mark.parametrize("script", [".ci/run", "scripts/setup.sh"])
def test_scripts_are_executable(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK), f"chmod +x {script}"
