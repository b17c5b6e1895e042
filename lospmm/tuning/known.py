"""The candidates of a tuning, with what is known about them: forecasts and times."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lospmm.families.candidate import Candidate
from lospmm.space.candidates import Pool
from lospmm.space.explore import Space
from lospmm.tuning.trial import Trial


@dataclass(frozen=True, slots=True)
class Choice:
    """The unrolled candidate chosen if nothing is timed, and those it was chosen from.

    ``shortlist`` is sorted by score, ``wide`` by the estimate.
    """

    winner: Candidate
    space: Space
    shortlist: tuple[Candidate, ...]
    wide: tuple[Candidate, ...] = ()  # candidates with two words per thread
    forecast_micros: float | None = None  # of the winner, by the models of ``untimed``; None: use the estimate

    @property
    def listed(self) -> Sequence[Candidate]:
        """The shortlist, after the winner if that is not in it."""
        return (*(one for one in self.wide if one is self.winner), *self.shortlist)


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """The candidates of a problem, with their forecasts and trials."""

    plans: tuple[Candidate, ...]  # of all families but the unrolled one, best forecast first
    refusals: Mapping[str, str]  # why a family has no kernel, by its name
    dense_micros: float | None = None  # forecast of the vendor's dense multiplication
    unrolled_micros: float | None = None  # forecast of the fastest unrolled kernel, if other families are timed first
    choice: Choice | None = None  # None: no unrolled kernel, or surely a slow one
    pool: Pool | None = None  # unrolled candidates that a search may time; None: not built yet
    trials: tuple[Trial, ...] = ()  # in the order of timing
    like: str | None = None  # fingerprint of the alike layer whose plan stands in ``plans`` for all

    def plans_of(self, family: str) -> tuple[Candidate, ...]:
        """Return the plans of a family, the best forecast first."""
        return tuple(one for one in self.plans if one.family == family)

    @property
    def unrolled_trials(self) -> tuple[Trial, ...]:
        """The trials of unrolled kernels."""
        return tuple(one for one in self.trials if one.candidate.is_unrolled)

    @property
    def other_trials(self) -> tuple[Trial, ...]:
        """The trials of all other families."""
        return tuple(one for one in self.trials if not one.candidate.is_unrolled)
