"""Figure 6: the time of a kernel by how alike pairs of blocks of rows are, by what regroups the rows.

A hypergraph partitioner, as in EC-SpMM, is one of the four where it is installed (``benchmarks.reordering``). Its
tiles have as many nonzeros as each other, not rows: M1 is what its largest has.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import geometric_mean

import matplotlib.pyplot as plt

from benchmarks.paper.rows import Record, Row
from benchmarks.paper.timing import Stand
from benchmarks.reordering import LOAD_RATIOS, SIMILARITIES, SIZE_LIMIT, methods, tile_figures
from lospmm.matrix.csr import SparseMatrix
from lospmm.settings import settings
from lospmm.space.candidates import Schedule, TileSize, Tiling, UnrolledPlan
from lospmm_datasets.synthetic import paired_blocks

#: Section 4.3; its N1 and loads in flight are not told.
N, COLS, PREFETCH = 1024, 128, 16
STYLES = {"no reordering": "s--", "Algorithm 1": "o-", "with swaps": "v-", "Mt-KaHyPar": "^:"}


def tilings_of(ratio: int, similarity: float) -> tuple[SparseMatrix, dict[str, Tiling]]:
    matrix = paired_blocks(similarity, ratio, seed=0)
    return matrix, {name: method(matrix, SIZE_LIMIT) for name, method in methods().items()}


def measure(stand: Stand) -> Iterator[Record]:
    settings_of = list(product(LOAD_RATIOS, SIMILARITIES))
    with ProcessPoolExecutor(settings().workers, mp_context=get_context("spawn")) as pool:
        found = pool.map(tilings_of, *zip(*settings_of, strict=True))
        for (ratio, similarity), (matrix, tilings) in zip(settings_of, found, strict=True):
            plans = [UnrolledPlan(TileSize(of.size_limit, COLS), Schedule(PREFETCH), of) for of in tilings.values()]
            times = stand.times(matrix, N, plans)
            for (method, tiling), micros in zip(tilings.items(), times, strict=True):
                about = {"figure": "6", "device": stand.device.name, "load_ratio": ratio, "similarity": similarity}
                yield {**about, "method": method, **tile_figures(tiling), "micros": round(micros, 3)}


def rows(records: Sequence[Record]) -> list[Row]:
    """At the greatest similarity; and in the mean over all, with swaps, and where there is a partitioner."""
    micros = {(one["load_ratio"], one["similarity"], one["method"]): one["micros"] for one in records}
    plain, regrouped, *others = STYLES

    def shares(other: str, over: Sequence[float]) -> str:
        of_ratio = ([micros[ratio, at, regrouped] / micros[ratio, at, other] for at in over] for ratio in LOAD_RATIOS)
        return ", ".join(f"{geometric_mean(found):.2f}" for found in of_ratio)

    gpu = ", H100" if records[0].get("device") == "h100" else ""
    most = max(SIMILARITIES)
    what = f"time with Algorithm 1 over that without, R = {most}, load ratios {', '.join(map(str, LOAD_RATIOS))}{gpu}"
    found = [Row(what, "below 1", shares(plain, [most]))]
    for other in others:
        if any(method == other for *_, method in micros):
            what = f"time with Algorithm 1 over that with {other.removeprefix('with ')}, mean over R{gpu}"
            found.append(Row(what, "-", shares(other, SIMILARITIES)))
    return found


def plot(records: Sequence[Record], path: Path) -> None:
    figure, panels = plt.subplots(1, len(LOAD_RATIOS), figsize=(12, 4), sharey=True, layout="constrained")
    for panel, ratio in zip(panels, LOAD_RATIOS, strict=True):
        for method, style in STYLES.items():
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
