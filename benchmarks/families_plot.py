"""The map of ``families.jsonl``: which family is the fastest by sparsity, size, N and type (docs/families.md).

python -m benchmarks.families_plot [FILE] [--out families_map.png]
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.patches import Patch, Rectangle

from benchmarks.families_cases import MAP_COLUMNS, MAP_SIDES, MAP_SPARSITIES
from benchmarks.families_table import Record, best_sparse, dense_micros, read_results, winner
from benchmarks.kernels import ROOT

#: A colour for each that may win; what is not here is drawn in grey.
COLOURS = {
    "dense": "#d9d9d9",
    "unrolled": "#e15759",
    "tensor_core": "#4e79a7",
    "group_coo": "#b07aa1",
    "block_group_coo": "#9c755f",
    "csr": "#59a14f",
    "hyb": "#f28e2b",
}
OTHER = "#888888"


def plot_map(records: Sequence[Record], path: Path) -> None:
    """A panel for each size and type; a cell is coloured by what won, and says how many times as fast as dense the
    fastest sparse kernel is. What was not measured is white."""
    own = [record for record in records if record["set"] == "map" and _is_cell(record)]
    sides = sorted({record["m"] for record in own})
    dtypes = list(dict.fromkeys(record["dtype"] for record in own))
    columns, sparsities = sorted({record["n"] for record in own}), sorted({_sparsity(record) for record in own})
    figure, panels = plt.subplots(
        len(dtypes), len(sides), figsize=(3.4 * len(sides), 3.2 * len(dtypes)), layout="constrained", squeeze=False
    )
    seen: dict[str, str] = {}
    for panel, (dtype, side) in zip(panels.flat, [(dtype, side) for dtype in dtypes for side in sides], strict=True):
        for record in own:
            if (record["dtype"], record["m"]) == (dtype, side) and (won := winner(record)) is not None:
                at = columns.index(record["n"]), sparsities.index(_sparsity(record))
                seen[won[0]] = COLOURS.get(won[0], OTHER)
                _cell(panel, at, seen[won[0]], record)
        panel.set_xlim(0, len(columns))
        panel.set_ylim(0, len(sparsities))
        panel.set_xticks([at + 0.5 for at in range(len(columns))], [str(n) for n in columns])
        panel.set_yticks([at + 0.5 for at in range(len(sparsities))], [f"{one:.0%}" for one in sparsities])
        panel.set_title(f"{side} x {side}, {dtype}", fontsize=10)
    for panel in panels[-1]:
        panel.set_xlabel("N")
    for panel in panels[:, 0]:
        panel.set_ylabel("zeros")
    handles = [
        Patch(color=seen[name], label=name) for name in (*COLOURS, *sorted(set(seen) - set(COLOURS))) if name in seen
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles) or 1)
    devices = " and ".join(sorted({record["machine"]["title"] for record in own}))
    figure.suptitle(
        f"The fastest kernel (colour; white: not measured) on {devices},\n"
        "and the speed-up of the fastest sparse one over cuBLAS of the same type"
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _is_cell(record: Record) -> bool:
    """Whether a measurement lies on the axes that the map has now."""
    return record["m"] in MAP_SIDES and record["n"] in MAP_COLUMNS and _sparsity(record) in MAP_SPARSITIES


def _sparsity(record: Record) -> float:
    return round(record["sparsity"], 2)


def _cell(panel: Any, at: tuple[int, int], colour: str, record: Record) -> None:
    panel.add_patch(Rectangle(at, 1, 1, facecolor=colour, edgecolor="white"))
    dense, best = dense_micros(record), best_sparse(record)
    if dense is not None and best is not None:
        panel.text(at[0] + 0.5, at[1] + 0.5, f"{dense / best[1]:.1f}", ha="center", va="center", fontsize=7)


def main() -> None:
    results = ROOT / "benchmarks" / "results"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=results / "families.jsonl.gz")
    parser.add_argument("--out", type=Path, default=results / "families_map.png")
    arguments = parser.parse_args()
    plt.switch_backend("agg")
    plot_map(list(read_results(arguments.file).values()), arguments.out)


if __name__ == "__main__":
    main()
