"""Features of the rank model (section 3.5): Table 1, the schedule, and the counts of the estimate.

A model is trained on the kernels of many matrices and applied to others, so costs are divided by the least that the
product can cost on the GPU. To add a feature, add a row to ``FEATURES`` and retrain.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from lospmm.problem.problem import Problem
from lospmm.space.candidates import Ints, UnrolledPlan, UnrolledPlans, ceil_divs
from lospmm.space.estimate import ISSUE_SLOTS, Costs, Work, costs_of, micros_of, work_of
from lospmm.space.registers import forecast_of_each


@dataclass(frozen=True, eq=False)  # no slots: properties that several features use are cached
class FeatureSubject:
    """The candidates of one problem with their work, costs and estimated microseconds.

    Every property has one value per candidate, (candidates,), unless it says otherwise.
    """

    problem: Problem
    work: Work
    costs: Costs
    micros: NDArray[np.float64]

    @staticmethod
    def of(problem: Problem, candidates: Sequence[UnrolledPlan]) -> "FeatureSubject":
        """Return the candidates with their estimate."""
        work = work_of(problem, UnrolledPlans.of(candidates))
        costs = costs_of(problem, work)
        return FeatureSubject(problem, work, costs, micros_of(problem, costs))

    def take(self, which: NDArray[np.integer]) -> "FeatureSubject":
        """Return the candidates at the indices ``which``."""
        costs = Costs(*(cost[which] for cost in self.costs))
        return FeatureSubject(self.problem, self.work.take(which), costs, self.micros[which])

    @property
    def candidates(self) -> UnrolledPlans:
        """The candidates."""
        return self.work.candidates

    @cached_property
    def tiles(self) -> Ints:
        """Row tiles, without the blocks of empty rows."""
        return self.candidates.by_tiling(lambda tiling: tiling.count)

    @cached_property
    def column_blocks(self) -> Ints:
        """Blocks along N, of one word per thread."""
        return ceil_divs(self.problem.n, self.candidates.cols)

    @cached_property
    def launched(self) -> Ints:
        """block_num (Equation 1): thread blocks of the grid, without split-K."""
        return self.candidates.by_tiling(lambda tiling: tiling.block_rows) * self.column_blocks

    @cached_property
    def parts(self) -> Ints:
        """Blocks along M that multiply, those that share a tile included."""
        return self.tiles * self.candidates.split_k

    @cached_property
    def nnc_sum(self) -> Ints:
        """NNC_sum: non-empty columns over all tiles."""
        return self.candidates.by_tiling(lambda tiling: int(tiling.nnc.sum()))

    @cached_property
    def nnc_max(self) -> Ints:
        """The most non-empty columns of a tile."""
        return self.candidates.by_tiling(lambda tiling: int(tiling.nnc.max(initial=0)))

    @cached_property
    def nnz_max(self) -> Ints:
        """NNZ_max: the most nonzeros of a tile."""
        return self.candidates.by_tiling(lambda tiling: int(tiling.nnz.max(initial=0)))

    @cached_property
    def prefetch(self) -> Ints:
        """Elements of B in flight."""
        return self.candidates.by_schedule(lambda schedule: schedule.prefetch)

    def everywhere(self, figure: float) -> NDArray[np.float64]:
        """Return a value of the problem, repeated for each candidate."""
        return np.full(len(self.micros), float(figure))

    @property
    def least_cycles(self) -> float:
        """Lower bound of the product's cycles on this GPU, one number.

        The greater of issuing every multiply-add, and of moving B and C once.
        """
        matrix, device, n = self.problem.matrix, self.problem.device, self.problem.n
        issue = matrix.nnz * n / device.warp_size / ISSUE_SLOTS / device.sms
        memory = 4 * n * (matrix.m + matrix.k) / device.memory_bandwidth * device.clock_hz
        return max(issue, memory)


Feature = Callable[[FeatureSubject], NDArray[np.generic]]

#: Part of what data sets say about their features: increase it when one of the same name gets another meaning.
REVISION = 2


def _over_least(cost: Callable[[Costs], NDArray[np.float64]]) -> Feature:
    return lambda subject: cost(subject.costs) / subject.least_cycles


#: The columns of ``features``, in order.
FEATURES: Mapping[str, Feature] = MappingProxyType(
    {
        # Table 1
        "row_tiles": lambda s: s.tiles,  # A_tile num
        "column_tiles": lambda s: s.column_blocks,  # B_tile num
        "block_count": lambda s: s.launched,  # block num
        "sparsity": lambda s: s.everywhere(s.problem.matrix.sparsity),
        "nnc_sum": lambda s: s.nnc_sum,  # NNC_sum, non-empty columns over all tiles
        "nnz_max": lambda s: s.nnz_max,  # NNZ_max, nonzeros of the heaviest tile
        "rows": lambda s: s.candidates.rows,  # M1
        "cols": lambda s: s.candidates.cols,  # N1
        "k": lambda s: s.everywhere(s.problem.matrix.k),
        # the other dimensions of the product, and the schedule
        "m": lambda s: s.everywhere(s.problem.matrix.m),
        "n": lambda s: s.everywhere(s.problem.n),
        "prefetch": lambda s: s.prefetch,
        "column_group": lambda s: np.where(  # neighbouring column blocks of the same tile
            s.candidates.column_group == 0, s.column_blocks, s.candidates.column_group
        ),
        "lockstep": lambda s: s.everywhere(0),  # barriers, which kernels no longer have, but most of the training data
        "split_k": lambda s: s.candidates.split_k,
        # imbalance of the tiles, which the estimate ignores
        "nnz_over_mean": lambda s: s.nnz_max * s.tiles / max(s.problem.matrix.nnz, 1),
        "nnc_over_mean": lambda s: s.nnc_max * s.tiles / np.maximum(s.nnc_sum, 1),
        "column_waste": lambda s: 1 - s.problem.n / (s.column_blocks * s.candidates.cols),
        # the work of an SM, as the estimate counts it
        "registers": lambda s: forecast_of_each(s.problem, s.candidates),
        "blocks": lambda s: s.work.blocks,  # of the busiest SM
        "resident": lambda s: s.work.resident,  # of these at a time
        "resident_threads": lambda s: s.work.resident * s.candidates.cols,
        "waves": lambda s: ceil_divs(s.work.blocks, s.work.resident),
        "balance": lambda s: s.parts * s.column_blocks / (s.work.blocks * s.problem.device.sms),
        # blocks per SM: all, those whose columns are all used, and all weighted by the share of used columns
        "blocks_over_sms": lambda s: s.parts * s.column_blocks / s.problem.device.sms,
        "whole_blocks_over_sms": lambda s: s.parts * (s.problem.n // s.candidates.cols) / s.problem.device.sms,
        "work_over_sms": lambda s: s.parts * (s.problem.n / s.candidates.cols) / s.problem.device.sms,
        "last_columns": lambda s: ((s.problem.n - 1) % s.candidates.cols + 1) / s.candidates.cols,
        "resident_instructions": lambda s: s.work.resident * s.work.instructions,
        "loads": lambda s: s.work.loads,  # of a thread
        "loads_over_prefetch": lambda s: s.work.loads / s.prefetch,
        "instructions": lambda s: s.work.instructions,
        # costs, relative to the least that the product can cost
        "issue": _over_least(lambda costs: costs.issue),
        "fetch": _over_least(lambda costs: costs.fetch),
        "latency": _over_least(lambda costs: costs.latency),
        "traffic": _over_least(lambda costs: costs.traffic),
        "memory": _over_least(lambda costs: costs.memory),
        "estimate": lambda s: s.micros,
        "estimate_over_least": lambda s: s.micros / (1e6 * s.least_cycles / s.problem.device.clock_hz),
    }
)


def features(problem: Problem, candidates: Sequence[UnrolledPlan]) -> NDArray[np.float64]:
    """Return the features of candidates of one problem, (candidates, FEATURES)."""
    return features_of(FeatureSubject.of(problem, candidates))


def features_of(subject: FeatureSubject) -> NDArray[np.float64]:
    """Return the features of candidates whose estimate is known, (candidates, FEATURES)."""
    if not len(subject.micros):
        return np.empty((0, len(FEATURES)))
    return np.stack([feature(subject) for feature in FEATURES.values()], axis=1, dtype=np.float64)
