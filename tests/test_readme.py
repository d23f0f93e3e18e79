"""The README's code runs as it stands, and what it says it prints is what it prints."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"


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
    assert blocks("text")[0].strip() == printed[0]
    assert "fc1.x" in printed[-1]


def test_the_first_code_is_on_the_first_screen() -> None:
    assert README.read_text().split("```python")[0].count("\n") < 15
