"""The tiling space as in Figure 3: one cell a tile size, coloured by the stage that removed it."""

import secrets
from io import BytesIO
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, MaxNLocator
from numpy.typing import NDArray

from lospmm.errors import BadRequest, ToolchainFault
from lospmm.problem.problem import Problem
from lospmm.space.candidates import TileSize
from lospmm.space.constraints import CONSTRAINTS, Stage
from lospmm.space.explore import Space

FORMATS = (".png", ".svg", ".pdf")

#: Stage and colour, in the order in which stages apply; survivors are white, as in the figure.
COLOURS: dict[Stage, str] = {"registers": "#74b06f", "utilization": "#eda247", "balance": "#5b8fd0"}
SURVIVORS = "#ffffff"
GRID = "#c8c8c8"

#: A grid is drawn around cells up to so many to a side; it would cover more of them than it shows.
GRID_CELLS = 48

#: The most numbers along the axis of columns.
TICKS = 9


def check_format(path: Path) -> None:
    """Raise BadRequest unless the suffix of ``path`` names a format that ``plot_space`` writes."""
    if not path.parent.is_dir():
        raise BadRequest(f"--plot {path}: there is no folder {path.parent}")
    if path.suffix.lower() not in FORMATS:
        raise BadRequest(f"--plot {path}: the suffix must be one of {', '.join(FORMATS)}")
    if path.is_dir():
        raise BadRequest(f"--plot {path}: is a folder; name a file")


def plot_space(problem: Problem, space: Space, path: Path, winner: TileSize | None = None) -> None:
    """Draw the space to a file; its suffix is the format. Raises BadRequest, ToolchainFault.

    The latter is a disk that is full, or a file that may not be written.
    """
    check_format(path)
    tiles = [verdict.tile for verdict in space.verdicts] + [survivor.tile for survivor in space.survivors]
    heights, widths = sorted({tile.rows for tile in tiles}), sorted({tile.cols for tile in tiles})
    matrix = problem.matrix
    with matplotlib.rc_context({"svg.hashsalt": "lospmm", "font.size": 11}):
        figure = Figure(figsize=(7, 6), layout="constrained")
        axes = figure.add_subplot()
        _draw_cells(axes, _stage_numbers(space, heights, widths), heights)
        _label(axes, widths)
        axes.set_title(
            f"A {matrix.m} x {matrix.k}, {matrix.nnz:,} nonzeros;  B {matrix.k} x {problem.n:,};  "
            f"{problem.device.title}",
            fontsize=11,
        )
        if winner is not None:
            axes.plot(widths.index(winner.cols), winner.rows, marker="*", color="#c03030", markersize=14)
        figure.legend(handles=_legend(space), loc="outside lower center", ncols=2, frameon=False)
        picture = BytesIO()
        figure.savefig(picture, dpi=150, format=path.suffix[1:].lower())
    try:
        _write(path, picture.getvalue())
    except OSError as error:
        raise ToolchainFault(f"--plot {path}: cannot be written: {error.strerror}") from None


def _write(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all: an old picture survives a full disk, and a link stays a link."""
    target = path.resolve()
    if target.exists() and not target.is_file():  # a pipe, say
        target.write_bytes(content)
        return
    scratch = target.with_name(f".lospmm-{secrets.token_hex(8)}")
    try:
        scratch.write_bytes(content)
        scratch.replace(target)
    finally:
        scratch.unlink(missing_ok=True)


def _stage_numbers(space: Space, heights: list[int], widths: list[int]) -> NDArray[np.int64]:
    """Return the stage that removed each tile size, (heights, widths); survivors: the number of stages."""
    stage_of = {constraint.name: constraint.stage for constraint in CONSTRAINTS}
    stages, row, column = list(COLOURS), _places(heights), _places(widths)
    cells = np.full((len(heights), len(widths)), len(stages))
    for verdict in space.verdicts:
        cells[row[verdict.tile.rows], column[verdict.tile.cols]] = stages.index(stage_of[verdict.constraint])
    return cells


def _places(values: list[int]) -> dict[int, int]:
    return {value: index for index, value in enumerate(values)}


def _draw_cells(axes: Axes, cells: NDArray[np.int64], heights: list[int]) -> None:
    """Draw the cells; if M1 has steps, a cell is as high as the step."""
    height, width = cells.shape
    step = heights[1] - heights[0] if height > 1 else 1
    axes.pcolormesh(
        np.arange(width + 1) - 0.5,
        np.array([*heights, heights[-1] + step]) - 0.5,
        cells,
        cmap=ListedColormap([*COLOURS.values(), SURVIVORS]),
        vmin=0,
        vmax=len(COLOURS),
        edgecolors=GRID if max(height, width) <= GRID_CELLS else "none",
        linewidth=0.5,
    )


def _label(axes: Axes, widths: list[int]) -> None:
    """Label the axes: rows in full, of columns one in so many."""
    every = -(-len(widths) // TICKS)
    ticks = range(every - 1, len(widths), every)
    axes.xaxis.set_major_locator(FixedLocator(list(ticks)))
    axes.set_xticklabels([str(widths[tick]) for tick in ticks])
    axes.yaxis.set_major_locator(MaxNLocator(nbins=10, integer=True, min_n_ticks=1))
    axes.tick_params(length=0)
    axes.set_xlabel("columns of a tile, N1")
    axes.set_ylabel("rows of a tile, M1")


def _legend(space: Space) -> list[Patch]:
    left = space.size
    handles = []
    for stage, colour in COLOURS.items():
        after = space.after(stage)
        handles.append(Patch(facecolor=colour, edgecolor="#808080", label=f"removed by {stage}: {left - after:,}"))
        left = after
    return [*handles, Patch(facecolor=SURVIVORS, edgecolor="#808080", label=f"left of {space.size:,}: {left:,}")]
