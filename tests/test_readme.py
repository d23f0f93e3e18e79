"""The README's code runs as it stands, what it says it prints is what it prints, and its links lead somewhere."""

import contextlib
import io
import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_snippets_run_in_order_and_print_what_is_shown() -> None:
    namespace: dict[str, Any] = {}
    printed = []
    for snippet in blocks("python"):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(snippet, str(README), "exec"), namespace)
        printed.append(out.getvalue().strip())
    (shown,) = blocks("text")
    assert shown.strip() in printed
    assert any("fc1.x" in text and "moved" in text for text in printed)


def test_the_first_code_is_on_the_first_screen() -> None:
    before, first, *_ = README.read_text().split("```python")
    assert before.count("\n") < 20 and "hf.apply(model)" in first


def test_links_are_absolute_and_lead_to_files_that_are_there() -> None:
    """The package index shows the README without the repository around it."""
    text = README.read_text("utf-8")
    links = re.findall(r'\]\(([^)\s]+)\)|(?:src|href)="([^"]+)"', text)
    assert len(links) > 30
    home = PROJECT["urls"]["Repository"]
    raw = home.replace("github.com", "raw.githubusercontent.com")
    titles = {slug(title) for title in titles_of(text)}
    for link in (a or b for a, b in links):
        if link.startswith("#"):
            assert link[1:] in titles, link
            continue
        assert link.startswith("https://"), f"{link} is relative"
        for base in (f"{home}/blob/main/", f"{home}/tree/main/", f"{raw}/main/"):
            if link.startswith(base):
                path, _, anchor = link.removeprefix(base).partition("#")
                assert (ROOT / path).exists(), link
                if anchor:
                    found = {slug(title) for title in titles_of((ROOT / path).read_text("utf-8"))}
                    assert anchor in found, link


def titles_of(text: str) -> list[str]:
    return re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)


def slug(title: str) -> str:
    """As GitHub makes the anchor of a title."""
    return re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-")
