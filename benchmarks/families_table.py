"""The lines of ``families.jsonl``, read back: which family won, by how much, and what was asked of it."""

import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import write_results

__all__ = [
    "BESIDE",
    "ROUNDED",
    "Record",
    "best_sparse",
    "dense_micros",
    "key",
    "library_micros",
    "pruned_micros",
    "read_results",
    "summary",
    "winner",
    "write_results",
]

Record = dict[str, Any]

#: The row of unrolled kernels with 16-bit sums: a user's choice, left out of the other rows.
ROUNDED = "unrolled, 16-bit sums"

#: Of a family that was timed again: the microseconds of the dense multiplication in the same run.
BESIDE = "dense_micros"

#: Of families whose name is longer than a column.
TITLES = {"block_group_coo": "block_g_coo"}

#: Over the 41 shapes against the dense multiplication of the same type: sparsity, type, the geometric mean aimed at.
TARGETS = {(0.95, "tf32"): 1.5, (0.95, "float16"): 1.2, (0.98, "tf32"): 2.5, (0.98, "float16"): 1.8}


def key(record: Mapping[str, Any]) -> str:
    """What a line is about: of two with the same key, the later counts."""
    about = (record["set"], record["name"], record["n"], record["dtype"], record["machine"]["device"])
    return json.dumps(about)


def read_results(path: Path) -> dict[str, Record]:
    """The lines of a file by key; none where there is no file. Raises BadRequest for what is not such a file."""
    return harness.read_results(path, key)


def family_micros(record: Record) -> dict[str, float]:
    """Of the families that computed the product, with sums in float32."""
    return {
        name: found["micros"] for name, found in record["families"].items() if "micros" in found and name != ROUNDED
    }


def rounded_micros(record: Record) -> float | None:
    """Of the fastest kernel where sums may have 16 bits; None where no such kernel was timed."""
    own: float | None = record["families"].get(ROUNDED, {}).get("micros")
    return None if own is None else min(own, *family_micros(record).values())


def dense_micros(record: Record) -> float | None:
    """Of the dense multiplication of the same type, in the run in which the fastest kernel was timed; None: there is
    none."""
    if (best := best_sparse(record)) is not None and BESIDE in record["families"][best[0]]:
        return float(record["families"][best[0]][BESIDE])
    return first_micros(record, "cublas")


def library_micros(record: Record) -> float | None:
    """Of cuSPARSE."""
    micros: float | None = record["baselines"].get("cusparse", {}).get("micros")
    return micros


def pruned_micros(record: Record) -> float | None:
    """Of cuSPARSELt, with A pruned to 2:4."""
    return first_micros(record, "cusparselt")


def coded_micros(record: Record) -> float | None:
    """Of cuBLASLt with a dense A and B of 8 bits."""
    return first_micros(record, "cublas_int8", "cublas_fp8")


def first_micros(record: Record, *names: str) -> float | None:
    """Of the first library whose name begins with one of these."""
    return next((found.get("micros") for name, found in record["baselines"].items() if name.startswith(names)), None)


def winner(record: Record) -> tuple[str, float] | None:
    """The fastest of the families and of the dense multiplication, and its microseconds."""
    times = family_micros(record)
    if (dense := dense_micros(record)) is not None:
        times["dense"] = dense
    return min(times.items(), key=lambda pair: pair[1]) if times else None


def best_sparse(record: Record) -> tuple[str, float] | None:
    return min(family_micros(record).items(), key=lambda pair: pair[1], default=None)


def mean(values: Sequence[float]) -> float:
    """Geometric."""
    return math.exp(statistics.fmean(map(math.log, values)))


def summary(records: Sequence[Record]) -> str:
    parts = [_wins(records), _shapes(records), _graphs(records), _real(records)]
    return "\n\n".join(part for part in parts if part)


def _wins(records: Sequence[Record]) -> str:
    """How often each family is the fastest, by set, and what failed."""
    lines = ["fastest, by set (dense is cuBLAS of the same type):"]
    for name in dict.fromkeys(record["set"] for record in records):
        own = [record for record in records if record["set"] == name]
        found = Counter(won[0] for record in own if (won := winner(record)) is not None)
        counts = ", ".join(f"{family} {count}" for family, count in found.most_common())
        lines.append(f"  {name:8} {len(own):4} problems: {counts}")
    failed = [
        (
            f"  {record['problem']}: {family}: {len(found['failures'])}, as {found['failures'][0]}",
            len(found["failures"]),
        )
        for record in records
        for family, found in record["families"].items()
        if found["failures"]
    ]
    tried = {name for record in records for name in record["families"] if name != ROUNDED}
    fastest = {first[0] for record in records if (first := winner(record)) is not None}
    if idle := sorted(tried - fastest):
        lines.append(f"the fastest of none: {', '.join(idle)}")
    timed = sum(found["plans"] for record in records for found in record["families"].values())
    lines.append(f"{timed} kernels, {sum(count for _, count in failed)} of them failed{':' if failed else ''}")
    return "\n".join(lines + [text for text, _ in failed[:20]])


def _shapes(records: Sequence[Record]) -> str:
    lines = []
    groups: dict[tuple[float, str, str], list[float]] = {}
    for record in records:
        dense, best = dense_micros(record), best_sparse(record)
        if record["set"] == "shapes" and dense is not None and best is not None:
            about = round(record["sparsity"], 2), record["dtype"]
            groups.setdefault((*about, ""), []).append(dense / best[1])
            if (rounded := rounded_micros(record)) is not None:
                groups.setdefault((*about, "16-bit sums"), []).append(dense / rounded)
    for (sparsity, dtype, sums), gains in sorted(groups.items()):
        target = TARGETS.get((sparsity, dtype))
        aim = f", aimed at {target}" if target is not None else ""
        chosen = mean([max(gain, 1.0) for gain in gains])  # dense is a choice too
        lines.append(
            f"  {sparsity:.0%} {dtype:8} {len(gains):2} shapes{f', {sums}' if sums else ''}: {mean(gains):.2f}x dense, "
            f"least {min(gains):.2f}; with dense as a choice {chosen:.2f}x{aim}"
        )
    return "\n".join(
        ["the fastest sparse kernel against dense of the same type, geometric means:", *lines] * bool(lines)
    )


def _graphs(records: Sequence[Record]) -> str:
    own = [record for record in records if record["set"] == "graphs"]
    if not own:
        return ""
    families = list(dict.fromkeys(family for record in own for family in record["families"]))
    titles = [*(TITLES.get(family, family) for family in families), "cuSPARSE", "dense", "bound"]
    lines = [f"{'graphs, us':44}" + "".join(f"{title:>13}" for title in titles)]
    for record in own:
        times = family_micros(record)
        values = [*(times.get(family) for family in families), library_micros(record), dense_micros(record)]
        shown = "".join(
            f"{'-':>13}" if value is None else f"{value:13.1f}" for value in [*values, record["bound_micros"]]
        )
        lines.append(f"{record['problem'][:44]:44}{shown}")
    ratios = [
        library / best[1] for record in own if (library := library_micros(record)) and (best := best_sparse(record))
    ]
    if ratios:
        lines.append(
            f"the fastest family against cuSPARSE: {min(ratios):.2f}x to {max(ratios):.2f}x, mean {mean(ratios):.2f}x"
        )
    return "\n".join(lines)


def _real(records: Sequence[Record]) -> str:
    """Which families were right on every matrix that they take."""
    own = [record for record in records if record["set"] == "real"]
    if not own:
        return ""
    lines = [f"real layers, {len({record['name'] for record in own})} matrices:"]
    for family in dict.fromkeys(family for record in own for family in record["families"]):
        found = [record["families"][family] for record in own if family in record["families"]]
        wrong = sum(bool(one["failures"]) for one in found)
        lines.append(f"  {family}: right on {len(found) - wrong} of {len(found)}")
    return "\n".join(lines)
