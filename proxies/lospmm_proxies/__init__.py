"""Section 5: proxies, short programs that are built and timed in the stead of kernels (docs/proxies.md).

``proxies`` is a ``TrialMaker``. ``blocks.py`` has fewer thread block functions (5.1.2), ``loops.py`` fewer iterations
in each (5.1.3), ``launch.py`` the run-time arguments with which one program stands for many kernels (5.2).
"""

from collections.abc import Sequence

from lospmm.ir import KernelProgram
from lospmm.lower import kernel_name
from lospmm.model import ZERO_ROWS, Candidate, Problem, Schedule, Tiling
from lospmm.registers import forecast_registers
from lospmm.schedule import zero_program
from lospmm.trial import Trial
from lospmm_proxies.blocks import cluster_limit, cluster_tiles, dispatch
from lospmm_proxies.launch import proxy_launch
from lospmm_proxies.loops import proxy_block


def proxies(problem: Problem, candidates: Sequence[Candidate]) -> list[Trial]:
    """Kernel function reduction, 5.1.1: candidates with the same tiling and schedule share one program.

    Raises BadRequest for a candidate whose block does not fit the device.
    """
    sharing: dict[tuple[Tiling, Schedule], list[Candidate]] = {}
    for candidate in candidates:
        sharing.setdefault((candidate.tiling, candidate.schedule), []).append(candidate)
    programs = {key: _program(problem, sharers) for key, sharers in sharing.items()}
    return [Trial(c, programs[c.tiling, c.schedule], proxy_launch(problem, c)) for c in candidates]


def _program(problem: Problem, sharers: Sequence[Candidate]) -> KernelProgram:
    """The proxy of kernels that differ in N1 alone, which it takes from the launch."""
    tiling, schedule = sharers[0].tiling, sharers[0].schedule
    clusters = cluster_tiles(tiling, cluster_limit(problem, sharers))
    blocks = [proxy_block(problem.matrix, tiling, cluster, schedule) for cluster in clusters]
    if len(tiling.empty_rows):
        # Zeros are the same work in every candidate, so one program writes them for every block of empty rows.
        blocks.append(zero_program(tiling.empty_rows[:ZERO_ROWS]))
    return KernelProgram(
        name=f"{kernel_name(problem)}_proxy_{tiling.size_limit}",
        m=problem.matrix.m,
        k=problem.matrix.k,
        n=problem.n,
        cols=None,
        tiles=tuple(blocks),
        dispatch=dispatch(tiling, clusters),
        registers=forecast_registers(tiling.size_limit, schedule, problem.device),
        column_group=schedule.column_group,
    )
