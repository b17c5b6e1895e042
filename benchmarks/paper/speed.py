"""Figure 10: the 205 kernels beside the libraries, from ``kernels.jsonl`` (``benchmarks.kernels --set shapes``).

If the first GPU has no time, that of the second is shown.
"""

from collections.abc import Sequence

from benchmarks.kernels_table import mean_ratio, measured_of, timed
from benchmarks.paper.rows import Record, Row

#: Section 7.1, the average speed-up on a V100. The paper has no TF32, which a V100 lacks.
PAPER = {
    "cusparse": "31.65",
    "cublas_fp32": "3.30 (all)",
    "sputnik": "2.56",
}


def shapes(records: Sequence[Record]) -> list[Record]:
    return [one for one in measured_of(records) if one["set"] == "shapes"]


def rows(records: Sequence[Record], elsewhere: Sequence[Record] = ()) -> list[Row]:
    found: dict[str, Row] = {}
    for mine, where in ((shapes(records), ""), (shapes(elsewhere), " on an H100")):
        for baseline in timed(mine):
            faster = sum(one["ratios"].get(baseline.ratio, 0) > 1 for one in mine)
            what = f"speedup over {baseline.title}, {len(mine)} kernels{where} (faster)"
            mean = f"{mean_ratio(mine, baseline.ratio):.2f} ({faster})"
            found.setdefault(baseline.ratio, Row(what, PAPER.get(baseline.ratio, "-"), mean))
    return list(found.values())
