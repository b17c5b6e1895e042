"""``lospmm space``: the tiling space of a matrix, counted and drawn."""

from pathlib import Path
from typing import Annotated

import typer

from lospmm.cli.options import (
    ColumnsOption,
    DeviceOption,
    EmitterOption,
    JsonOption,
    MatrixArgument,
    QuietOption,
    SeedOption,
    TensorOption,
    read_problem,
)
from lospmm.cli.show import show_space
from lospmm.codegen import check_target
from lospmm.errors import extra_needed
from lospmm.progress import reported
from lospmm.stages import Stages
from lospmm.tuning.build import for_emitter
from lospmm.tuning.options import Options, splits_of
from lospmm.tuning.unrolled import explore_problem


def space(
    matrix: MatrixArgument,
    n: ColumnsOption,
    device: DeviceOption = "auto",
    emitter: EmitterOption = "auto",
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw the space as Figure 3 does (.png .svg .pdf).")
    ] = None,
    tensor: TensorOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Count the tile sizes that each constraint removes, and those that are left to `lospmm tune`."""
    _, problem = read_problem(matrix, n, device, tensor, seed)
    arch = problem.device.arch
    language = Options(emitter=emitter).resolved(problem.device, None).emitter
    check_target(language, arch)
    if plot is not None:
        with extra_needed("plot", "--plot"):  # and matplotlib takes longer to import than a space to explore
            from lospmm.cli.plot import check_format, plot_space

        check_format(plot)
    with reported(quiet=quiet) as progress:
        found = explore_problem(for_emitter(problem, language), Stages(progress), splits=splits_of(language, arch))
    if plot is not None:
        plot_space(problem, found, plot)
    show_space(problem, language, found, as_json=as_json)
