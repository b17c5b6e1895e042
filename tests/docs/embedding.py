"""The part of examples/embedding.c that docs/embedding.md shows."""

import re

from tests.docs.pages import DOCS, ROOT

PAGE = DOCS / "embedding.md"


def program() -> str:
    """Return the functions that load and launch a kernel, as a block of C."""
    source = (ROOT / "examples" / "embedding.c").read_text()
    functions = re.findall(r"^static void (?:load|launch)\(.*?^}\n", source, re.MULTILINE | re.DOTALL)
    assert len(functions) == 2, "examples/embedding.c: load and launch"
    return "```c\n" + "\n".join(functions) + "```\n"


REGIONS = {"program": program}
