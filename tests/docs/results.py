"""The tables of measured figures, made from benchmarks/results/*.jsonl: a file that is not there has no rows."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import read_lines
from tests.docs.pages import ROOT

RESULTS = ROOT / "benchmarks" / "results"

Record = dict[str, Any]
Row = tuple[str, str]


def records(name: str, folder: Path = RESULTS) -> list[Record]:
    paths = (folder / f"{name}.jsonl", folder / f"{name}.jsonl.gz")
    return [line for path in paths if path.exists() for line in read_lines(path)]


def table(headings: Sequence[str], lines: Sequence[Sequence[str]], right: int = 0) -> str:
    """A table whose last ``right`` columns are aligned to the right."""
    marks = ["---"] * (len(headings) - right) + ["---:"] * right
    return "".join(f"| {' | '.join(line)} |\n" for line in (headings, marks, *lines))


def middle(values: Sequence[float], digits: str = ".2f") -> str:
    return f"{statistics.median(values):{digits}} ({min(values):{digits}} to {max(values):{digits}})"


def _real_weights(found: list[Record]) -> list[Row]:
    seconds = middle([record["wall_seconds"] for record in found])
    error = max(record["max_relative_error"] for record in found)
    spilled = sum(record["spill_bytes"] > 0 for record in found)
    return [
        (f"file to verified cubin, {len(found)} real pruned layers, {_emitter(found[0])}", f"{seconds} s"),
        ("their largest error relative to \\|A\\|\\|B\\|; spills", f"{error:.1e}; {spilled}"),
    ]


def _emitter(record: Record) -> str:
    """Files from before machine code do not name it."""
    return str(record.get("emitter", "ptx"))


def to_cubin_seconds(record: Record) -> float:
    """Machine code from a candidate to its cubin, ptxas left out; the graft has the encoding in it."""
    return float(sum(record["seconds"][name] for name in ("program", "schedule", "graft")))


def _sizes(record: Record) -> str:
    return f"{record['m']:,} x {record['k']:,}, {record['nnz']:,} nonzeros"


def _emission(found: list[Record]) -> list[Row]:
    return [
        (
            f"machine code, {_sizes(record)}",
            f"{to_cubin_seconds(record):.2f} s, {record['peak_bytes']['cubin'] >> 20:,} MiB",
        )
        for record in found
    ]


def _compile_time(found: list[Record]) -> list[Row]:
    return [
        (
            f"{_compiled(record)}, {_sizes(record)}",
            f"{record['wall_seconds']:.1f} s, {record['peak_tree_bytes'] >> 20:,} MiB",
        )
        for record in found
    ]


def _compiled(record: Record) -> str:
    is_ours = record["what"] == "lospmm tune"
    return f"`lospmm tune`, {_emitter(record)}" if is_ours else str(record["what"])


def _choosing(found: list[Record]) -> list[Row]:
    large = [record["best_ms"] for record in found if record["side"] == 4096]
    what = "family choice without timing, 4,096 x 4,096, float16"
    return [(what, f"{min(large):.0f} to {max(large):.0f} ms")]


Sources = dict[str, Callable[[list[Record]], list[Row]]]

#: The benchmarks behind the table, and the rows that each contributes.
TUNING_COST: Sources = {
    "emission": _emission,
    "real_weights": _real_weights,
    "compile_time": _compile_time,
    "choosing": _choosing,
}


def tuning_cost() -> str:
    """Each figure with the benchmark that writes its file."""
    lines = [
        (what, figure, f"`{name}`")
        for name, rows in TUNING_COST.items()
        if (found := records(name))
        for what, figure in rows(found)
    ]
    return table(("what", "measured", "by"), lines)
