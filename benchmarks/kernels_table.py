"""What follows from the lines of ``kernels.jsonl``: ratios, geometric means, and the table that a run prints."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

#: One line of the file: docs/kernels.md has its fields.
Record = dict[str, Any]


class Baseline(NamedTuple):
    """What a kernel is compared with: the key of its microseconds, and the key of the speed-up over it."""

    title: str
    micros: str
    ratio: str


BASELINES = (
    Baseline("cuSPARSE", "cusparse_micros", "cusparse"),
    Baseline("cuBLAS fp32", "cublas_fp32_micros", "cublas_fp32"),
    Baseline("cuBLAS TF32", "cublas_tf32_micros", "cublas_tf32"),
    Baseline("Sputnik", "sputnik_micros", "sputnik"),
    Baseline("cuBLAS fp16", "cublas_fp16_micros", "cublas_fp16"),
    Baseline("cuBLAS bf16", "cublas_bf16_micros", "cublas_bf16"),
)

#: cuSPARSE without the preprocessing of A that its other algorithm profits from.
ALG2 = Baseline("ALG2", "cusparse_alg2_micros", "cusparse_alg2")

#: The ``seven`` problems, layers of BERT and ResNet-50: (m, k, n) and the share of zeros.
SEVEN = (
    ((768, 768, 4096), 0.7),
    ((768, 768, 4096), 0.9),
    ((768, 768, 4096), 0.98),
    ((3072, 768, 4096), 0.9),
    ((256, 576, 12544), 0.9),
    ((64, 576, 50176), 0.9),
    ((768, 768, 16384), 0.9),
)


def problem_name(m: int, k: int, n: int, sparsity: float) -> str:
    return f"{m} x {k}, n {n}, {sparsity:.0%}"


def ratios(measured: Mapping[str, Any]) -> dict[str, float]:
    """Speed-ups by ``Baseline.ratio``, without baselines that have no time, and the share of the bound.

    ``bound``: the least time that the arithmetic or the memory allows over the kernel's, 1 at best.
    """
    micros = measured["micros"]
    baselines = (*BASELINES, ALG2)
    found = {one.ratio: measured[one.micros] / micros for one in baselines if measured.get(one.micros)}
    found["bound"] = measured["bound_micros"] / micros
    return {name: round(value, 4) for name, value in found.items()}


def geometric_mean(values: Sequence[float]) -> float:
    """Of at least one positive value."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def measured_of(records: Iterable[Record]) -> list[Record]:
    """Those that have times, not a failure."""
    return [record for record in records if "failure" not in record]


def timed(records: Iterable[Record]) -> list[Baseline]:
    """The baselines that some record has a time of."""
    found = {ratio for record in measured_of(records) for ratio in record["ratios"]}
    return [one for one in BASELINES if one.ratio in found]


def zeros(record: Record) -> float:
    """The sparsity that a matrix was drawn with, or that of a file: to rounding, the share of zeros."""
    name = "drawn_sparsity" if "drawn_sparsity" in record else "sparsity"
    return float(record[name])


def mean_ratio(records: Iterable[Record], ratio: str) -> float | None:
    """The geometric mean over the records that have the ratio; None where none has."""
    values = [record["ratios"][ratio] for record in measured_of(records) if ratio in record["ratios"]]
    return geometric_mean(values) if values else None


def current(records: Sequence[Record]) -> list[Record]:
    """Of each set, what was measured on the machine and with the options of its newest, which is its last, line."""
    newest = {record["set"]: conditions(record) for record in records}
    return [record for record in records if conditions(record) == newest[record["set"]]]


def conditions(record: Record) -> tuple[Any, ...]:
    """What must be alike for times to stand in one table."""
    return record["machine"]["device"], sorted(record["options"].items())


def summary(records: Sequence[Record]) -> str:
    """The table of each set: a line per problem, then the geometric means by sparsity and over the set."""
    parts = []
    for name in dict.fromkeys(record["set"] for record in records):
        mine = [record for record in records if record["set"] == name]
        columns = {one.ratio: f"x {one.title}" for one in timed(mine)} | {"bound": "of bound"}
        titles = "".join(f"{title:>14}" for title in columns.values())
        parts.append(f"\n{name:64} {'us':>9} {'noise':>6}{titles}")
        parts += [_line(record, columns) for record in mine]
        parts += _means(mine, columns)
    commits = " and ".join(dict.fromkeys(record["commit"] for record in records))
    errors = [record["max_relative_error"] for record in measured_of(records) if record["max_relative_error"]]
    failed = len(records) - len(measured_of(records))
    parts.append(f"\n{len(records) - failed} measured at {commits or '-'}, {failed} failed")
    parts.append(f"greatest error relative to |A||B|: {max(errors, default=math.nan):.1e}")
    return "\n".join(parts)


def _line(record: Record, columns: Iterable[str]) -> str:
    problem = f"{record['problem'][-64:]:64}"
    if "failure" in record:
        return f"{problem} FAILED: {record['failure']}"
    noise = record.get("noise")
    cells = _cells(record["ratios"].get(ratio) for ratio in columns)
    return f"{problem} {record['micros']:9.2f} {'-' if noise is None else f'{noise:.1%}':>6}{cells}"


def _means(records: Sequence[Record], columns: Iterable[str]) -> list[str]:
    by_sparsity: dict[str, list[Record]] = {}
    if all("drawn_sparsity" in record for record in records):
        for record in records:
            by_sparsity.setdefault(f", {zeros(record):.0%}", []).append(record)
    groups = {**(by_sparsity if len(by_sparsity) > 1 else {}), "": list(records)}
    return [
        f"{f'geometric mean of {len(measured_of(group))}{name}':64} {'':16}"
        + _cells(mean_ratio(group, ratio) for ratio in columns)
        for name, group in groups.items()
    ]


def _cells(figures: Iterable[float | None]) -> str:
    return "".join(f"{'-' if value is None else f'{value:.2f}':>14}" for value in figures)
