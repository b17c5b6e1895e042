"""The table of docs/decisions/0010: the fastest kernel of each split, of rank_model/data/estimate_on_gpu.jsonl."""

from fitting import DATA
from lospmm.problem.problem import SPLITS
from tests.docs.results import records, table


def fastest_by_split() -> str:
    """Of every problem for which kernels of several splits were timed: microseconds, M1 and N1."""
    found: dict[str, dict[int, tuple[float, int, int]]] = {}
    for record in records("estimate_on_gpu", DATA):
        if record.get("micros") is None or "split_k" not in record:
            continue
        sparsity = 1 - record["nnz"] / record["m"] / record["k"]
        name = f"{record['m']} x {record['k']}, n {record['n']}, {sparsity:.0%}"
        times = found.setdefault(name, {})
        one = record["micros"], record["rows"], record["cols"]
        times[record["split_k"]] = min(times.get(record["split_k"], one), one)
    lines = [
        (name, *(_cell(times.get(split)) for split in SPLITS)) for name, times in found.items() if set(times) > {1}
    ]
    return table(("problem", *(f"split {split}" for split in SPLITS)), lines, right=len(SPLITS))


def _cell(one: tuple[float, int, int] | None) -> str:
    return "-" if one is None else f"{one[0]:.1f} ({one[1]} x {one[2]})"
