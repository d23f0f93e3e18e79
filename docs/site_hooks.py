"""What the site does to pages that GitHub shows as they are."""

import posixpath
import re
from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """The home page is the README; links to files outside of the documentation go to the repository."""
    home = config["repo_url"].rstrip("/")
    here = page.file.src_uri
    if here == "index.md":
        markdown = README.read_text("utf-8")
        raw = home.replace("github.com", "raw.githubusercontent.com")
        markdown = re.sub(r"^\[!\[.*\n", "", markdown, flags=re.M)  # badges
        markdown = markdown.replace(f"{home}/blob/main/docs/", "").replace(f"{raw}/main/docs/", "")

    def link(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(here), found[1]))
        return found[0] if path.startswith("docs/") else f"]({home}/blob/main/{path})"

    return re.sub(r"\]\((\.\./[^)\s]+)\)", link, markdown)
