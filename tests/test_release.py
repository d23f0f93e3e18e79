"""What a release is made of agrees with itself: versions of torch, extras, URLs; and a wheel with a fault is seen."""

import importlib.util
import re
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_rows_are_the_oldest_torch_the_pinned_one_and_the_newest() -> None:
    (oldest,) = (
        d.removeprefix("torch>=") for d in PROJECT["dependencies"] if d.startswith("torch>=")
    )
    pinned = re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text("utf-8"), re.M)
    (rows,) = re.findall(r"ROWS=\(([\w. ]+)\)", (ROOT / ".ci" / "rows").read_text("utf-8"))
    assert rows.split() == [f"{oldest}.0", *pinned, "newest"]
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8")
    assert re.findall(r'torch: "?([\w.]+)"?', workflow) == rows.split()
    oldest_python = PROJECT["requires-python"].removeprefix(">=")
    assert f'python: "{oldest_python}"' in workflow
    readme = (ROOT / "README.md").read_text("utf-8")
    assert f"| torch | {oldest} |" in readme and f"| Python | {oldest_python} |" in readme


def test_the_citation_is_of_this_version_and_place() -> None:
    cited = (ROOT / "CITATION.cff").read_text("utf-8")
    version = re.findall(
        r'^__version__ = "(.*)"$', (ROOT / "fuseops/__init__.py").read_text(), re.M
    )
    assert re.findall(r"^version: (.*)$", cited, re.M) == version
    assert re.findall(r"^url: (.*)$", cited, re.M) == [PROJECT["urls"]["Repository"]]
    assert f"{{{PROJECT['urls']['Repository']}}}" in (ROOT / "README.md").read_text("utf-8")


def test_every_link_to_the_project_is_to_the_place_that_pyproject_names() -> None:
    """Moved there, all the others are told by this test."""
    owner = PROJECT["urls"]["Repository"].removeprefix("https://").split("/")[1]
    pages = [ROOT / name for name in ("README.md", "mkdocs.yml", "CITATION.cff", "pyproject.toml")]
    link = r"(?:github\.com|githubusercontent\.com|colab\.research\.google\.com/github)/([\w.-]+)/fuseops\b"
    for page in (*pages, *(ROOT / "docs").rglob("*.md")):
        text = page.read_text("utf-8")
        found = {*re.findall(link, text), *re.findall(r"//([\w-]+)\.github\.io/fuseops", text)}
        assert found <= {owner}, f"{page} has links to {found - {owner}}, the project is {owner}'s"
    for code in (ROOT / "fuseops").rglob("*.py"):
        assert f"github.com/{owner}/fuseops" not in code.read_text("utf-8"), code


def test_every_script_that_ci_calls_is_there() -> None:
    called = (ROOT / ".ci" / "run").read_text("utf-8")
    targets = set(re.findall(r"^step make (\w+)", called, re.M))
    made = (ROOT / "Makefile").read_text("utf-8")
    assert {"docs", "package", "test", "types", "lint"} <= targets
    assert all(re.search(rf"^{target}:", made, re.M) for target in targets)
    assert all((ROOT / path).exists() for path in re.findall(r"scripts/\w+\.\w+", made))


def test_the_documentation_names_extras_that_there_are() -> None:
    extras = PROJECT["optional-dependencies"]
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        named = set(re.findall(r"(?:fuseops|\.)\[(\w+)\]", page.read_text("utf-8")))
        assert named <= extras.keys(), page.name
    files = [*(ROOT / "fuseops").rglob("*.py"), *(ROOT / "docs").glob("*.md")]
    used = "\n".join(path.read_text("utf-8") for path in files)
    for extra in ("cli", "hf"):  # none that nothing uses
        for package in (re.match(r"\w+", wanted)[0] for wanted in extras[extra]):  # type: ignore[index]
            assert re.search(rf"\b{package}\b", used), (
                f"{package} of the extra {extra} is used by nothing"
            )


def test_a_wheel_with_a_fault_is_seen(tmp_path: Path) -> None:
    check = script("check_package")
    metadata = "\n".join([
        "Metadata-Version: 2.4", "Name: fuseops", "Provides-Extra: hf",
        "Project-URL: Homepage, https://example.org", "",
        "See [here](docs/ops.md), [there](https://a.b), `fuseops[plot]`.",
    ])  # fmt: skip
    wheel = tmp_path / "fuseops-0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as made:
        made.writestr("fuseops-0.dist-info/METADATA", metadata)
        made.writestr("fuseops/kernels/aot.json", "{}")
        made.writestr("tests/conftest.py", "")
    wrong = check.wrong_in_wheel(wheel)
    for fault in (
        "fuseops/py.typed is not in the wheel", "tests/conftest.py is in the wheel",
        "fuseops/kernels/aot.json is in the wheel", "fuseops/ops/op.py is not in the wheel",
        "the metadata lacks URLs", "the description links to docs/ops.md",
        "the documentation names the extra plot",
    ):  # fmt: skip
        assert fault in wrong
    assert any(fault.startswith("extras are ['hf']") for fault in wrong)


def test_what_the_site_needs_and_has_not_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    check = script("check_docs")
    monkeypatch.setattr(check, "NEEDS", ("no_such_package", "json"))
    assert check.missing() == ["no_such_package"]
