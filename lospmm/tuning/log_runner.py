"""A runner that reads times from a log instead of a GPU."""

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lospmm.artifact.artifact import TUNING_FILE
from lospmm.errors import BadRequest
from lospmm.families.candidate import Candidate
from lospmm.gpu.messages import Measurement
from lospmm.gpu.timing import Timing
from lospmm.tuning.log import named
from lospmm.tuning.trial import Trial

#: The fields of a line that do not identify its candidate: forecasts and measurements.
FOUND = (
    *("rank", "score", "estimated_micros", "measured_micros", "spread", "max_relative_error", "failure"),
    "final_micros",
)


class LogRunner:
    """A ``trial.Runner`` that takes the times of a log. Time is up once all of them were used."""

    def __init__(self, lines: Sequence[Mapping[str, Any]]) -> None:
        self._lines = {_key({name: line[name] for name in line if name not in FOUND}): line for line in lines}
        self._begun: deque[Candidate] = deque()
        self._timed: set[str] = set()
        self._finals = {key: deque(line.get("final_micros") or ()) for key, line in self._lines.items()}

    @property
    def is_over(self) -> bool:
        """Whether all times of the log were used."""
        return self._is_used_up and not any(self._finals.values())

    @property
    def _is_used_up(self) -> bool:
        return len(self._timed) == len(self._lines)

    def begin(self, candidates: Sequence[Candidate]) -> None:
        """Queue ``candidates``."""
        self._begun += candidates

    def trials(self, count: int) -> Iterator[Trial]:
        """Yield trials of the next ``count`` in the queue. Raises BadRequest if one is not in the log."""
        for _ in range(min(count, len(self._begun))):
            if self._is_used_up:
                return
            candidate = self._begun.popleft()
            key, line = self._line(candidate)
            self._timed.add(key)
            yield Trial(candidate, _measurement(line["measured_micros"], line))

    def again(self, candidates: Sequence[Candidate]) -> Iterator[Measurement]:
        """Yield the next final of each of ``candidates``. Raises BadRequest if one is not in the log."""
        for candidate in candidates:
            key, line = self._line(candidate)
            if not self._finals[key]:
                return
            yield _measurement(self._finals[key].popleft(), line)

    def drop(self) -> None:
        """Empty the queue."""
        self._begun.clear()

    def _line(self, candidate: Candidate) -> tuple[str, Mapping[str, Any]]:
        key = _key(named(candidate))
        if key not in self._lines:
            words = ", ".join(f"{name} {value}" for name, value in named(candidate).items())
            raise BadRequest(f"{TUNING_FILE} has no time of the candidate {words}: another version searched otherwise")
        return key, self._lines[key]


def _key(named: Mapping[str, int | str | None]) -> str:
    return json.dumps(named, sort_keys=True)


def _measurement(micros: float | None, line: Mapping[str, Any]) -> Measurement:
    error = line["max_relative_error"]
    if micros is None:
        return Measurement(None, error, line["failure"] or "failed")
    return Measurement(Timing(micros, line["spread"] or 0.0, 0), error, None)
