"""``lospmm space``: the tiling space of a matrix, counted."""

from lospmm.cli.options import (
    ColumnsOption,
    DeviceOption,
    EmitterOption,
    JsonOption,
    MatrixArgument,
    QuietOption,
    SeedOption,
    TensorOption,
)
from lospmm.cli.show import show_space
from lospmm.codegen import check_target
from lospmm.gpu.detect import device_of
from lospmm.matrix import readers
from lospmm.problem.problem import Problem
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
    tensor: TensorOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Count the tile sizes that each constraint removes, and those that are left to `lospmm tune`."""
    gpu = device_of(device)
    problem = Problem(readers.read(matrix, tensor=tensor, seed=seed).matrix, n, gpu)
    language = Options(emitter=emitter).resolved(problem.device, None).emitter
    check_target(language, problem.device.arch)
    with reported(quiet=quiet) as progress:
        found = explore_problem(for_emitter(problem, language), Stages(progress), splits=splits_of(language))
    show_space(problem, language, found, as_json=as_json)
