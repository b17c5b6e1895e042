"""The table of docs/einsum.md, of benchmarks/results/einsum.jsonl."""

from collections.abc import Callable
from typing import Any

from tests.docs.pages import DOCS
from tests.docs.results import records, table

PAGE = DOCS / "einsum.md"

_FAMILIES = ("group_coo", "block_group_coo", "loops", "gather_gemm")
_SPARSE = ("cuSPARSE", "cuSPARSE SDDMM by torch", "torch.sparse")
_OTHERS = ("dense", "torch, gathered")


def _cell(found: dict[str, Any], names: tuple[str, ...]) -> str:
    times = [found[name]["micros"] for name in names if name in found and found[name]["micros"] is not None]
    return f"{min(times):.1f}" if times else "-"


def measured() -> str:
    rows = []
    for record in records("einsum"):
        libraries = record["libraries"]
        for family in (name for name in _FAMILIES if any(one["family"] == name for one in record["kernels"])):
            own = [kernel["micros"] for kernel in record["kernels"] if kernel["family"] == family and kernel["micros"]]
            cells = (f"{min(own):.1f}", f"{own[0]:.1f}") if own else ("-", "-")
            others = (_cell(libraries, _SPARSE), _cell(libraries, _OTHERS))
            rows.append((record["case"], str(record["n"]), record["dtype"], family, *cells, *others))
    head = ("work", "n", "type", "family", "fastest", "first", "cuSPARSE", "dense or gathered")
    return table(head, rows, right=4)


REGIONS: dict[str, Callable[[], str]] = {"einsum": measured}
