"""The tiling space as Figure 3 draws it: one cell per tile size, coloured by the stage that removed it."""

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lospmm.constraints import CONSTRAINTS, Stage
from lospmm.errors import BadRequest
from lospmm.model import Problem, TileSize
from lospmm.space import Space

#: Stage and colour, in the order in which stages apply; survivors are white, as in the figure.
COLOURS: dict[Stage, str] = {"registers": "#74b06f", "utilization": "#eda247", "balance": "#5b8fd0"}
SURVIVORS = "#ffffff"


def plot_space(problem: Problem, space: Space, path: Path, winner: TileSize | None = None) -> None:
    """Write a picture of the space; the suffix of ``path`` names the format. Raises BadRequest."""
    supported = Figure().canvas.get_supported_filetypes()
    if path.suffix.lstrip(".") not in supported:
        raise BadRequest(f"--plot {path}: the suffix must be one of {', '.join(sorted(supported))}")
    stage_of = {constraint.name: constraint.stage for constraint in CONSTRAINTS}
    stages = list(COLOURS)
    tiles = [verdict.tile for verdict in space.verdicts] + [survivor.tile for survivor in space.survivors]
    widths = sorted({tile.cols for tile in tiles})
    cells = np.full((max(tile.rows for tile in tiles), len(widths)), len(stages))
    for verdict in space.verdicts:
        cells[verdict.tile.rows - 1, widths.index(verdict.tile.cols)] = stages.index(stage_of[verdict.constraint])

    with matplotlib.rc_context({"svg.hashsalt": "lospmm"}):
        figure = Figure(figsize=(7, 6), layout="constrained")
        axes = figure.add_subplot()
        axes.pcolormesh(
            np.arange(len(widths) + 1) - 0.5,
            np.arange(cells.shape[0] + 1) + 0.5,
            cells,
            cmap=ListedColormap([*COLOURS.values(), SURVIVORS]),
            vmin=0,
            vmax=len(stages),
            edgecolors="#d0d0d0" if cells.size <= 1024 else "none",
            linewidth=0.5,
        )
        ticks = range(0, len(widths), max(1, len(widths) // 8))
        axes.set_xticks(list(ticks), [str(widths[tick]) for tick in ticks])
        axes.set_xlabel("columns of a tile (N1)")
        axes.set_ylabel("rows of a tile (M1)")
        matrix = problem.matrix
        axes.set_title(
            f"{matrix.m} x {matrix.k}, {matrix.nnz:,} nonzeros, n = {problem.n}, {problem.device.name}", fontsize=10
        )
        if winner is not None:
            axes.plot(widths.index(winner.cols), winner.rows, marker="*", color="#c03030", markersize=14)
        figure.legend(handles=_legend(space), loc="outside lower center", ncols=2, frameon=False)
        try:
            figure.savefig(path)
        except OSError as error:
            raise BadRequest(f"--plot {path}: cannot be written: {error.strerror}") from None


def _legend(space: Space) -> list[Patch]:
    left = space.size
    handles = []
    for stage, colour in COLOURS.items():
        after = space.after(stage)
        handles.append(Patch(facecolor=colour, label=f"removed by {stage}: {left - after:,}"))
        left = after
    return [*handles, Patch(facecolor=SURVIVORS, edgecolor="#808080", label=f"left of {space.size:,}: {left:,}")]
