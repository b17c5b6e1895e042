"""Writes the parts of the documentation that follow from the code and the results anew: ``python -m tests.docs.renew``.

Those are of pages that users take figures from; a table of a decision is never renewed. They stand between
``<!-- begin NAME -->`` and ``<!-- end NAME -->``. What a command prints is not among them: tests run the commands and
compare.
"""

from collections.abc import Callable
from pathlib import Path

from tests.docs import (
    budgets,
    embedding,
    families,
    kernels,
    machine_code,
    networks,
    paper,
    proxies,
    ranker,
    speedups,
    worked_example,
)
from tests.docs.pages import DOCS, ROOT, with_region

REGIONS: dict[Path, dict[str, Callable[[], str]]] = {
    ROOT / "README.md": speedups.README,
    DOCS / "flow.md": worked_example.REGIONS,
    budgets.PAGE: budgets.REGIONS,
    families.PAGE: families.REGIONS,
    kernels.PAGE: kernels.REGIONS,
    machine_code.PAGE: machine_code.REGIONS,
    networks.PAGE: networks.REGIONS,
    paper.PAGE: speedups.REGIONS | paper.REGIONS,
    proxies.PAGE: proxies.REGIONS,
    ranker.PAGE: ranker.REGIONS,
    embedding.PAGE: embedding.REGIONS,
}


def renewed(page: Path) -> str:
    text = page.read_text()
    for name, content in REGIONS[page].items():
        text = with_region(text, name, content())
    return text


if __name__ == "__main__":
    for path in REGIONS:
        path.write_text(renewed(path))
