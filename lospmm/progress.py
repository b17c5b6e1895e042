"""Progress of a job on stderr: a bar on a terminal, lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from lospmm.stages import Progress as Report
from lospmm.stages import silent

#: Without a terminal, seconds between two lines of progress of a stage of many parts.
LINE_SECONDS = 10.0


def tell(line: str) -> None:
    """Write a line to stderr in one piece: a signal between a text and its end would put another message behind it."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


@contextmanager
def reported(*, quiet: bool, ends: bool = True) -> Iterator[Report]:
    """Yield a progress callback whose output is shown until the block ends; ``ends``: a line at each stage's end."""
    if quiet:
        yield silent
    elif sys.stderr.isatty():
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
            yield _bars(bars)
    else:
        yield _lines(time.monotonic(), ends=ends)


def kernels_told(
    total: int, *, say: Callable[[str], None] = tell, every_seconds: float = 0.0
) -> Callable[[int, str], None]:
    """Return a function that says which of ``total`` kernels begins, and how long the rest takes at the pace so far.

    It is called with the kernel's number from 0 on and its name, and says so no more often than ``every_seconds``.
    """
    started = told = time.monotonic()
    first: int | None = None

    def begin(number: int, name: str) -> None:
        nonlocal first, told
        now, first = time.monotonic(), number if first is None else first
        if now - told < every_seconds:
            return
        told, left = now, (now - started) / max(1, number - first) * (total - number)
        say(f"kernel {number + 1} of {total}: {name}" + (f", about {left / 60:.0f} min left" if left >= 60 else ""))

    return begin


def _bars(bars: Progress) -> Report:
    tasks: dict[str, TaskID] = {}

    def report(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            tasks[stage] = bars.add_task(stage, total=total)
        # A stage with countable parts says 0 of 1 before it knows how many, and 1 of 1 at its end.
        known = bars.tasks[tasks[stage]].total or 1
        bars.update(tasks[stage], completed=known if (done, total) == (1, 1) else done, total=max(known, total))

    return report


def _lines(started: float, *, ends: bool) -> Report:
    """Return a callback that prints a line at the end of each stage, if ``ends``, and every LINE_SECONDS in a long one.

    A long stage prints its first line at once if its number of parts is known when it begins.
    """
    finished: set[str] = set()
    told: dict[str, float] = {}

    def report(stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if (done, total) == (0, 1):
            told.setdefault(stage, now)
        if ends and (done, total) == (1, 1) and stage not in finished:
            finished.add(stage)
            said = "done"
        elif total > 1 and now - told.get(stage, float("-inf")) >= LINE_SECONDS:
            told[stage] = now
            said = f"{done} of {total}"
        else:
            return
        tell(f"{stage}: {said} at {now - started:.1f} s")

    return report
