"""The fastest candidates timed again in turns, by successive halving."""

from collections.abc import Sequence
from dataclasses import replace

from lospmm.gpu.messages import Measurement
from lospmm.tuning.trial import Clock, Item, Trial, fastest_first


def timed_again(timed: Sequence[Trial[Item]], clock: Clock, finals: Sequence[int]) -> list[Trial[Item]]:
    """``timed`` with the finals of the fastest: in each turn ``finals`` many, those of the least median so far.

    In turns, so that what changes meanwhile changes for all of them. What was fast by chance is found out by a few
    loads, and the others are told apart by more of them (successive halving: Karnin, Koren and Somekh, Almost Optimal
    Exploration in Multi-Armed Bandits, 2013). Time that is up in the middle of a turn leaves that turn out.
    """
    timed = list(timed)
    places = [at for at, trial in enumerate(timed) if trial.measurement.timing is not None]
    for count in finals:
        if clock.finals is None or clock.is_over():
            break
        places = sorted(places, key=lambda at: timed[at].settled_micros)[:count]
        found: list[Measurement] = []
        for measurement in clock.finals([timed[at].candidate for at in places]):
            found.append(measurement)
            if clock.is_over():
                break
        if len(found) < len(places):
            break
        for at, measurement in zip(places, found, strict=True):
            timed[at] = replace(timed[at], finals=(*timed[at].finals, measurement))
    return timed


def settled(timed: Sequence[Trial[Item]]) -> Trial[Item]:
    """The fastest of those that were timed again most often; of a failure only where all of them failed."""
    finalists = [trial for trial in timed if trial.finals] or fastest_first(timed)
    return min(
        finalists, key=lambda trial: (trial.settled_micros == float("inf"), -len(trial.finals), trial.settled_micros)
    )


def _failure(finals: Sequence[Measurement]) -> str | None:
    return next((one.failure for one in finals if one.failure is not None), None)
