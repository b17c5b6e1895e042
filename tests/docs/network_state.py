"""The tables of docs/measuring.md about times as in a network, from ``network_state.jsonl``."""

import statistics
from collections.abc import Callable, Mapping

from benchmarks.network_state import EFFORTS, LIBRARIES
from tests.docs.results import Record, records, table

KERNEL = "kernel 0"


def _problems() -> dict[tuple[str, str], list[Record]]:
    """By the problem and the state of the cache."""
    found: dict[tuple[str, str], list[Record]] = {}
    for record in records("network_state"):
        name = f"{record['m']} x {record['k']}, n {record['n']}, {record['sparsity']:.0%}"
        found.setdefault((name, record["cache"]), []).append(record)
    return found


def _median(rows: list[Record], what: str, effort: str) -> float | None:
    micros = [micros for row in rows if (row["what"], row["effort"]) == (what, effort) for micros in row["micros"]]
    return statistics.median(micros) if micros else None


def noise() -> str:
    """How far times of a kernel are apart, of two kernels the further, and what a brief one takes."""
    lines = []
    for (name, cache), rows in _problems().items():
        own = [row for row in rows if row["what"].startswith("kernel") and row["micros"]]
        apart = {
            effort: max(
                (max(row["micros"]) / min(row["micros"]) - 1 for row in own if row["effort"] == effort), default=0.0
            )
            for effort in EFFORTS
        }
        brief = [seconds for row in own if row["effort"] == "brief" for seconds in row["seconds"]]
        cells = (f"{apart[effort]:.1%}" for effort in EFFORTS)
        full = _median(rows, KERNEL, "full") or 0.0
        lines.append((name, cache, f"{full:.2f}", *cells, f"{1e3 * statistics.median(brief):.0f}"))
    heads = ("A, B and zeros", "cache", "us", *(f"apart, {effort}" for effort in EFFORTS), "ms, brief")
    return table(heads, lines, right=len(EFFORTS) + 2)


def libraries() -> str:
    """The kernel that the rank model puts first beside the libraries, both in the same state."""
    lines = []
    for (name, cache), rows in _problems().items():
        own = _median(rows, KERNEL, "beside") or 0.0
        times = [_median(rows, library, "beside") for library in LIBRARIES]
        cells = ("-" if micros is None else f"{micros:.2f} ({micros / own:.2f})" for micros in times)
        lines.append((name, cache, f"{own:.2f}", *cells))
    titles = ("cuSPARSE (ratio)", "cuBLAS fp32 (ratio)", "cuBLAS TF32 (ratio)")
    return table(("A, B and zeros", "cache", "us", *titles), lines, right=len(titles) + 1)


REGIONS: Mapping[str, Callable[[], str]] = {"network noise": noise, "network libraries": libraries}
