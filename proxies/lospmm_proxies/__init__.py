"""Section 5: proxies, short programs that are built and timed instead of kernels (docs/proxies.md).

``blocks.py`` has fewer thread block functions (5.1.2), ``loops.py`` fewer iterations in each (5.1.3), ``launch.py``
the run-time arguments with which one program stands for many kernels (5.2).
"""

from collections.abc import Callable, Sequence

from lospmm.codegen.ir import KernelProgram
from lospmm.codegen.lower import kernel_name
from lospmm.codegen.schedule import zero_program
from lospmm.problem.dtype import FLOAT32
from lospmm.problem.lanes import lanes_of
from lospmm.problem.launch import Launch
from lospmm.problem.problem import Problem, ceil_div
from lospmm.space.candidates import ZERO_ROWS, Schedule, Tiling, UnrolledPlan
from lospmm.space.registers import forecast_registers
from lospmm_proxies.blocks import cluster_limit, cluster_tiles, dispatch
from lospmm_proxies.launch import proxy_launch
from lospmm_proxies.loops import proxy_block
from lospmm_proxies.trial import ProxyKernel

#: What candidates with one program share: tiling, schedule and, if it is in the code, N1.
Sharing = tuple[Tiling, Schedule, int | None]


def sharing_of(candidate: UnrolledPlan) -> Sharing:
    """Return what a candidate shares with those whose proxy is the same program.

    The addresses of a mailbox depend on N1, and are constants.
    """
    schedule = candidate.schedule
    return candidate.tiling, schedule, candidate.tile.cols if schedule.split_k > 1 else None


def proxies(
    problem: Problem,
    candidates: Sequence[UnrolledPlan],
    launch: Callable[[Problem, UnrolledPlan], Launch] = proxy_launch,
) -> list[ProxyKernel]:
    """Return the proxies of candidates; those with the same tiling and schedule share a program (5.1.1).

    If blocks share tiles, N1 must be the same too. ``launch`` may be ``launch.kernel_launch`` instead. Raises
    BadRequest for a candidate whose block does not fit the device.
    """
    sharing: dict[Sharing, list[UnrolledPlan]] = {}
    for candidate in candidates:
        sharing.setdefault(sharing_of(candidate), []).append(candidate)
    programs = {key: _program(problem, sharers, key[-1]) for key, sharers in sharing.items()}
    return [ProxyKernel(c, programs[sharing_of(c)], launch(problem, c)) for c in candidates]


def _program(problem: Problem, sharers: Sequence[UnrolledPlan], cols: int | None) -> KernelProgram:
    """Return the proxy of kernels that differ in N1 alone, a launch argument unless ``cols`` is given."""
    tiling, schedule, words = sharers[0].tiling, sharers[0].schedule, lanes_of(problem)
    clusters = cluster_tiles(tiling, cluster_limit(problem, sharers))
    blocks = [part for cluster in clusters for part in proxy_block(problem.matrix, tiling, cluster, schedule)]
    if len(tiling.empty_rows):
        # Zeros are the same work in every candidate, so one program writes them for every block of empty rows.
        blocks.append(zero_program(tiling.empty_rows[: ceil_div(ZERO_ROWS, schedule.split_k)]))
    return KernelProgram(
        name=f"{kernel_name(problem)}_proxy_{tiling.size_limit}",
        m=problem.matrix.m,
        k=problem.matrix.k,
        n=problem.n // words.columns,
        cols=cols,
        tiles=tuple(blocks),
        dispatch=dispatch(tiling, clusters, schedule.split_k),
        registers=forecast_registers(tiling.size_limit, schedule, problem.device),
        column_group=schedule.column_group,
        split_k=schedule.split_k,
        words=words,
        dtype=problem.dtype if problem.dtype.is_16_bit else FLOAT32,
    )
