"""Figure 10: the 205 kernels beside the libraries, from ``kernels.jsonl`` (``benchmarks.kernels --set shapes``)."""

from collections.abc import Sequence

from benchmarks.kernels_table import BASELINES, geometric_mean, mean_ratio, measured_of
from benchmarks.paper.rows import Record, Row

#: Section 7.1, the average speed-up on a V100. The paper has no TF32, which a V100 lacks.
PAPER = {"cusparse": "31.65", "cublas_fp32": "3.30"}


def shapes(records: Sequence[Record]) -> list[Record]:
    return [one for one in measured_of(records) if one["set"] == "shapes"]


def rows(records: Sequence[Record]) -> list[Row]:
    mine, found = shapes(records), []
    for baseline in BASELINES:
        mean = mean_ratio(mine, baseline.ratio)
        if mean is None:
            continue
        faster = sum(one["ratios"].get(baseline.ratio, 0) > 1 for one in mine)
        name = f"{len(mine)} kernels, speed-up over {baseline.title}: mean; faster in"
        claim = PAPER.get(baseline.ratio)
        everywhere = "all" if baseline.ratio == "cublas_fp32" else "-"
        found.append(Row(name, f"{claim or '-'}; {everywhere}", f"{mean:.2f}; {faster} of {len(mine)}"))
    by_sparsity = []
    for sparsity in sorted({one["drawn_sparsity"] for one in mine}):
        of_it = [one["ratios"]["cusparse"] for one in mine if one["drawn_sparsity"] == sparsity]
        by_sparsity.append(f"{geometric_mean(of_it):.2f} ({sparsity:.0%})")
    if by_sparsity:
        found.append(Row("speed-up over cuSPARSE by sparsity", "grows with it", ", ".join(by_sparsity)))
    return found
