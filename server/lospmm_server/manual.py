"""The manual: the pages of docs/, rendered from Markdown, and the images in them."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path, PurePosixPath
from posixpath import normpath

from markdown_it import MarkdownIt
from markdown_it.token import Token

#: The page that lists the others.
INDEX = "index.md"

#: Where the pages are in an installation, and in a checkout.
_FOLDERS = (Path(__file__).with_name("manual"), Path(__file__).parents[2] / "docs")

_MARKDOWN = MarkdownIt("js-default", {"xhtmlOut": True})  # HTML in a page is text


@cache
def files() -> Mapping[str, Path]:
    """Return the files of the manual by their names, such as ``decisions/0006-a-guard-process.md``."""
    folder = next((folder for folder in _FOLDERS if folder.is_dir()), _FOLDERS[0])
    return {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}


def title_of(text: str) -> str:
    """Return the title of a page."""
    return text.partition("\n")[0].lstrip("# ")


def html_of(name: str, text: str) -> str:
    """Return a page as HTML; what it links to outside the manual, in a checkout, is text."""
    tokens = _MARKDOWN.parse(text)
    for at, token in enumerate(tokens):
        if token.type == "heading_open":
            heading = tokens[at + 1].content.lower()
            token.attrSet("id", re.sub(r"[^\w\- ]", "", heading).replace(" ", "-"))  # as on GitHub
        elif token.type == "th_open":
            token.attrSet("scope", "col")
        elif token.type == "td_open" and tokens[at - 1].type == "tr_open":  # the head of its row
            token.tag = tokens[at + 2].tag = "th"
            token.attrSet("scope", "row")
        token.attrs.pop("style", None)  # of a column's alignment, which the pages' policy forbids
        for part in token.children or ():
            _check_target(part, PurePosixPath(name).parent)
    return str(_MARKDOWN.renderer.render(tokens, _MARKDOWN.options, {}))


def _check_target(part: Token, folder: PurePosixPath) -> None:
    """Remove a link's or an image's target unless it is of the manual or of another site."""
    attribute = {"link_open": "href", "image": "src"}.get(part.type, "")
    target = str(part.attrs.get(attribute, "")).partition("#")[0]
    if target and "://" not in target and normpath(f"{folder}/{target}") not in files():
        del part.attrs[attribute]
