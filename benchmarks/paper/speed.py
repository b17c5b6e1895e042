"""Figure 10: the 205 kernels beside the libraries, from ``kernels.jsonl`` (``benchmarks.kernels --set shapes``)."""

from collections.abc import Sequence

from benchmarks.kernels_table import BASELINES, mean_ratio, measured_of
from benchmarks.paper.rows import Record, Row

#: Section 7.1, the average speed-up on a V100. The paper has no TF32, which a V100 lacks.
PAPER = {"cusparse": "31.65", "cublas_fp32": "3.30 (all)"}


def shapes(records: Sequence[Record]) -> list[Record]:
    return [one for one in measured_of(records) if one["set"] == "shapes"]


def rows(records: Sequence[Record]) -> list[Row]:
    mine, found = shapes(records), []
    for baseline in BASELINES:
        mean = mean_ratio(mine, baseline.ratio)
        if mean is not None:
            faster = sum(one["ratios"].get(baseline.ratio, 0) > 1 for one in mine)
            what = f"speedup over {baseline.title}, {len(mine)} kernels (faster)"
            found.append(Row(what, PAPER.get(baseline.ratio, "-"), f"{mean:.2f} ({faster})"))
    return found
