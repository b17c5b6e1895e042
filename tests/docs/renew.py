"""Writes the parts of the documentation that follow from the code and the results anew: ``python -m tests.docs.renew``.

They stand between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``. What a command prints is not among them: tests
run the commands and compare.
"""

from collections.abc import Callable
from pathlib import Path

from tests.docs import (
    code_traffic,
    cold_code,
    columns,
    einsums,
    embedding,
    families,
    kernels,
    machine_code,
    network_state,
    networks,
    paper,
    ranker,
    results,
    searches,
    service,
    short,
    speedups,
    splits,
    worked_example,
)
from tests.docs.pages import DOCS, ROOT, with_region

REGIONS: dict[Path, dict[str, Callable[[], str]]] = {
    ROOT / "README.md": speedups.README,
    DOCS / "accuracy.md": columns.REGIONS,
    DOCS / "library.md": columns.LIBRARY,
    DOCS / "flow.md": worked_example.REGIONS,
    DOCS / "estimate.md": {"against the clock": results.against_the_clock},
    families.PAGE: families.REGIONS,
    kernels.PAGE: kernels.REGIONS,
    machine_code.PAGE: machine_code.REGIONS,
    networks.PAGE: networks.REGIONS,
    paper.PAGE: speedups.REGIONS | paper.REGIONS,
    ranker.PAGE: ranker.REGIONS,
    service.PAGE: service.REGIONS,
    embedding.PAGE: embedding.REGIONS,
    einsums.PAGE: einsums.REGIONS,
    DOCS / "decisions" / "0002-ptxas-at-level-1.md": {"levels": results.optimization_levels},
    DOCS / "decisions" / "0008-code-is-the-traffic.md": code_traffic.REGIONS,
    DOCS / "decisions" / "0010-blocks-share-a-tile.md": {"splits": splits.fastest_by_split},
    DOCS / "decisions" / "0026-what-a-short-kernel-waits-for.md": short.REGIONS | cold_code.EARLY,
    DOCS / "decisions" / "0027-warpgroups.md": families.WARPGROUPS,
    DOCS / "decisions" / "0032-float32-of-halves.md": families.HALVES,
    DOCS / "decisions" / "0033-columns-in-fours.md": families.FOURS,
    DOCS / "decisions" / "0030-timed-as-in-a-network.md": cold_code.CHOICES,
    DOCS / "measuring.md": {"network noise": network_state.noise},
    DOCS / "benchmarking.md": {"network libraries": network_state.libraries},
    DOCS / "decisions" / "0015-small-rounds.md": {
        "search cost": searches.cost,
        "search replay": searches.replayed,
    },
}


def renewed(page: Path) -> str:
    text = page.read_text()
    for name, content in REGIONS[page].items():
        text = with_region(text, name, content())
    return text


if __name__ == "__main__":
    for path in REGIONS:
        path.write_text(renewed(path))
