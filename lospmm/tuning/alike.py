"""Alike layers of a session: the first is timed in full, or comes from the store, and the others take its plan.

Kernels that read A as data are as fast for one matrix as for another of the shape with about as many nonzeros: the best
plan at 10 points more or less of zeros takes 0.9 % longer in the mean, 14 % at most (``families.jsonl.gz``). Unrolled
kernels are searched for each matrix.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lospmm.families.candidate import Candidate
from lospmm.families.traits import Traits, traits_of
from lospmm.gpu.libraries import DENSE, BaselineTime
from lospmm.problem.problem import Problem
from lospmm.tuning.known import Known
from lospmm.tuning.options import Options
from lospmm.tuning.plans import plan_of

#: The most by which a trait of alike matrices differs, as a share of the larger.
NEAR = 0.1


@dataclass(frozen=True, slots=True)
class AlikeLayer:
    """A layer that was timed: its matrix, the fastest plan, and the libraries' times by name."""

    fingerprint: str
    traits: Traits
    plan: Candidate | None  # None of an unrolled kernel
    times: Mapping[str, BaselineTime]


class TimedLayers:
    """The layers that were timed, those with other traits apart."""

    def __init__(self) -> None:
        self._timed: dict[Hashable, list[AlikeLayer]] = {}

    def alike(self, problem: Problem, options: Options) -> AlikeLayer | None:
        """Return a layer that was timed with the same options, of the same shape and near traits; or None."""
        layers = self._timed.get(_conditions(problem, options), ())
        traits = traits_of(problem) if layers else None
        return next((one for one in layers if traits is not None and _is_near(one.traits, traits)), None)

    def times(self, problem: Problem, options: Options) -> Mapping[str, BaselineTime]:
        """Return what is known of the libraries' times: those beside an alike layer, and dense ones of the shape."""
        layers = self._timed.get(_conditions(problem, options), ())
        dense = {name: time for one in layers for name, time in one.times.items() if name in DENSE}
        layer = self.alike(problem, options)
        return dense if layer is None else {**dense, **layer.times}

    def add(self, problem: Problem, options: Options, plan: Candidate, times: Mapping[str, BaselineTime]) -> None:
        """Keep the fastest plan of a layer, and the libraries' times, unless those of an alike layer are kept."""
        if (held := self.alike(problem, options)) is None or not held.times:
            timed = {name: one for name, one in times.items() if one.micros is not None}
            own = None if plan.is_unrolled else plan
            layer = AlikeLayer(problem.matrix.fingerprint, traits_of(problem), own, timed)
            layers = self._timed.setdefault(_conditions(problem, options), [])
            layers[:] = [layer, *(one for one in layers if one is not held)]

    def add_stored(self, problem: Problem, options: Options, manifest: Mapping[str, Any]) -> None:
        """Keep the plan of a kernel from the store, if no layer of its shape is kept: a run that resumes takes it."""
        is_first = manifest["measured"] is not None and _conditions(problem, options) not in self._timed
        if is_first and (plan := plan_of(manifest, problem)) is not None:
            self.add(problem, options, plan, {})

    def narrowed(self, problem: Problem, options: Options, known: Known) -> Known:
        """Return ``known`` with the plan of an alike layer alone, if there is one and this matrix takes it.

        With unrolled candidates too, all are timed.
        """
        layer = None if known.choice is not None or options.each else self.alike(problem, options)
        own = tuple(one for one in known.plans if layer is not None and one == layer.plan)
        return replace(known, plans=own, like=layer.fingerprint) if layer is not None and own else known


def _is_near(one: Traits, other: Traits) -> bool:
    pairs = zip(_nonzeros(one), _nonzeros(other), strict=True)
    return all(abs(own - found) <= NEAR * max(own, found) for own, found in pairs)


def _nonzeros(traits: Traits) -> tuple[float, ...]:
    """Return the traits by which matrices of a shape differ."""
    return traits.nnz, traits.filled_rows, traits.longest_row, traits.block_fill


def _conditions(problem: Problem, options: Options) -> Hashable:
    """Return all that decides a time but where the nonzeros are."""
    matrix, epilogue = problem.matrix, problem.epilogue
    added = epilogue.bias is not None, epilogue.relu, epilogue.residual
    types = problem.dtype, problem.sums, problem.values
    return matrix.m, matrix.k, problem.n, problem.device, problem.convolution, added, types, options
