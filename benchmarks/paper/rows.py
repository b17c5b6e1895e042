"""What every table or figure gives: rows with the paper's figure beside ours, and a plot."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

Record = dict[str, Any]


class Row(NamedTuple):
    """``paper`` and ``here`` are the same figure of the paper's GPU and of ours, as text."""

    what: str
    paper: str
    here: str


@dataclass(frozen=True, slots=True)
class Figure:
    """One table or figure of the paper. ``results`` are the files of benchmarks/results that it is made of, in the
    order in which ``rows`` and ``plot`` take their records; ``plot`` draws ``picture``, beside them.
    """

    title: str
    results: tuple[str, ...]
    rows: Callable[..., list[Row]]
    plot: Callable[..., None] | None
    picture: str | None = None
