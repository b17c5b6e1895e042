"""The program of docs/embedding.md, which is examples/embedding.c."""

from tests.docs.pages import DOCS, ROOT

PAGE = DOCS / "embedding.md"


def program() -> str:
    return f"```c\n{(ROOT / 'examples' / 'embedding.c').read_text()}```\n"


REGIONS = {"program": program}
