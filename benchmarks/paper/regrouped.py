"""Figure 6: the time of a kernel by how alike pairs of blocks of rows are, with and without Algorithm 1.

The paper's third method, a hypergraph partitioner, is in ``benchmarks.reordering``, by counts of loads.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib.pyplot as plt

from benchmarks.paper.rows import Record, Row
from benchmarks.paper.timing import Stand
from benchmarks.reordering import LOAD_RATIOS, SIMILARITIES, SIZE_LIMIT
from lospmm.space.candidates import Schedule, TileSize, UnrolledPlan
from lospmm.space.reorder import natural_order, regroup
from lospmm_datasets.synthetic import paired_blocks

#: Section 4.3; its N1 and loads in flight are not told.
N, COLS, PREFETCH = 1024, 128, 16
METHODS = {"no reordering": "s--", "Algorithm 1": "o-"}


def measure(stand: Stand) -> Iterator[Record]:
    for ratio in LOAD_RATIOS:
        for similarity in SIMILARITIES:
            matrix = paired_blocks(similarity, ratio, seed=0)
            tilings = (natural_order(matrix, SIZE_LIMIT), regroup(matrix, [SIZE_LIMIT])[SIZE_LIMIT])
            candidates = [UnrolledPlan(TileSize(SIZE_LIMIT, COLS), Schedule(PREFETCH), tiling) for tiling in tilings]
            found = stand.times(matrix, N, candidates)
            for method, tiling, micros in zip(METHODS, tilings, found, strict=True):
                yield {
                    "figure": "6",
                    "load_ratio": ratio,
                    "similarity": similarity,
                    "method": method,
                    "nnc": int(tiling.nnc.sum()),
                    "micros": round(micros, 3),
                }


def rows(records: Sequence[Record]) -> list[Row]:
    micros = {(one["load_ratio"], one["similarity"], one["method"]): one["micros"] for one in records}
    plain, regrouped = METHODS
    most = max(SIMILARITIES)
    shares = [micros[ratio, most, regrouped] / micros[ratio, most, plain] for ratio in LOAD_RATIOS]
    ratios = ", ".join(map(str, LOAD_RATIOS))
    what = f"time with Algorithm 1 over that without, R = {most}, load ratios {ratios}"
    return [Row(what, "below 1", ", ".join(f"{share:.2f}" for share in shares))]


def plot(records: Sequence[Record], path: Path) -> None:
    figure, panels = plt.subplots(1, len(LOAD_RATIOS), figsize=(12, 4), sharey=True, layout="constrained")
    for panel, ratio in zip(panels, LOAD_RATIOS, strict=True):
        for method, style in METHODS.items():
            mine = [one for one in records if (one["load_ratio"], one["method"]) == (ratio, method)]
            panel.plot([one["similarity"] for one in mine], [one["micros"] for one in mine], style, label=method)
        panel.set_title(f"load ratio {ratio}")
        panel.set_xlabel("similarity R of paired blocks")
        panel.grid(alpha=0.3)
        panel.legend()
    panels[0].set_ylim(bottom=0)
    panels[0].set_ylabel("microseconds")
    figure.suptitle(f"Figure 6: 1,024 x 1,024 at 98 %, N {N:,}, M1 {SIZE_LIMIT}")
    figure.savefig(path, dpi=110)
    plt.close(figure)
