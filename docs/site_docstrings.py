"""Docstrings as the reference shows them: lines of `name: what it is` become a list."""

import re
from typing import Any

import griffe

ITEM = re.compile(
    r"^((?:\*{0,2}[a-z_][\w.]*)(?:,? (?:and )?\*{0,2}[a-z_][\w.]*)*)(?::\s+|\s{2,})(?=\S)"
)
ALONE = ("Raises ", "-> ")


def as_markdown(text: str, is_module: bool) -> str:
    """The docstring in Markdown. Of a module only what it is: where its files are is for who reads the code."""
    if is_module:
        return text.split("\n\n")[0]
    blocks = re.split(r"\n\s*\n", text)
    return "\n\n".join(b if b.startswith("    ") else "\n".join(_lines(b)) for b in blocks)


def _lines(block: str) -> list[str]:
    found: list[str] = []
    inside = False  # of an item
    for line in block.split("\n"):
        item = ITEM.match(line)
        if item and not (found and not inside and found[-1].strip() and not _ends(found[-1])):
            names = ", ".join(f"`{name}`" for name in re.split(r",\s*(?:and )?| and ", item[1]))
            found += (
                ["", f"- {names}: {line[item.end() :]}"]
                if not inside
                else [f"- {names}: {line[item.end() :]}"]
            )
            inside = True
        elif inside and line.startswith(" "):
            found.append(f"  {line.strip()}")
        else:
            if inside or line.startswith(ALONE):
                found.append("")
            inside = False
            found.append(line)
    return found


def _ends(line: str) -> bool:
    """Whether a sentence ends there, so that the next line may begin a list."""
    return line.rstrip().endswith((".", ":", ")", "]"))


class Docstrings(griffe.Extension):
    """Applies it to every object."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value, obj.is_module)
