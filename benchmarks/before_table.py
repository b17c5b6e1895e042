"""How much of what times differ by goes with something, from the lines of ``before.jsonl``."""

import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]

#: Groups of fewer timings tell nothing of their own.
LEAST = 5


def timings(rows: Sequence[Row]) -> dict[tuple[object, ...], list[Row]]:
    """Lines by kernel."""
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        if "micros" in row:
            key = row["m"], row["k"], row["n"], row["sparsity"], row["rows"], row["cols"]
            found.setdefault(key, []).append(row)
    return found


def groups(rows: Sequence[Row], by: Callable[[Row], Hashable]) -> dict[Hashable, list[float]]:
    """Times by something, where there are enough."""
    found: dict[Hashable, list[float]] = {}
    for row in rows:
        if (key := by(row)) is not None:
            found.setdefault(key, []).append(row["micros"])
    return {key: times for key, times in found.items() if len(times) >= LEAST}


def share(rows: Sequence[Row], by: Callable[[Row], Hashable]) -> float:
    """Of the variance of times, the share that is between groups, corrected for their number (epsilon squared): 0 where
    times have nothing to do with it, to chance, and 1 where they follow from it."""
    found = groups(rows, by)
    times = [time for group in found.values() for time in group]
    degrees = len(times) - len(found)
    if len(found) < 2 or degrees < 1:
        return 0.0
    whole = statistics.fmean(times)
    total = sum((time - whole) ** 2 for time in times)
    within = sum((time - statistics.fmean(group)) ** 2 for group in found.values() for time in group)
    return 1 - within / degrees / (total / (len(times) - 1))


#: What times may go with.
BY: Mapping[str, Callable[[Row], Hashable]] = {
    "copy": lambda row: row["copy"],
    "before": lambda row: f"after {row['previous']}" if row["before"] == "-" else row["before"],
    "order": lambda row: row["order"],
}


def medians(rows: Sequence[Row], by: Callable[[Row], Hashable]) -> dict[Hashable, float]:
    return {key: statistics.median(times) for key, times in groups(rows, by).items()}


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'kernel':44} {'turns':>6} {'us':>15}" + "".join(f"{name:>26}" for name in BY)]
    for key, found in timings(rows).items():
        m, k, n, sparsity, height, width = key
        times = sorted(row["micros"] for row in found)
        low, high = times[len(times) // 50], times[-1 - len(times) // 50]
        cells = ""
        for by in BY.values():
            middle = list(medians(found, by).values())
            span = f"{min(middle):.2f} {max(middle):.2f} of {len(middle)}" if middle else "-"
            cells += f"{share(found, by):6.2f} {span:>19}"
        lines.append(
            f"{f'{m} x {k}, n {n}, {sparsity:.0%}, {height} x {width}':44} {len(found):6} {low:7.2f} {high:7.2f}{cells}"
        )
    lines.append("")
    for key, found in timings(rows).items():
        lines.append(
            f"{key[4]} x {key[5]}: "
            + ", ".join(f"{name} {micros:.2f}" for name, micros in medians(found, BY["before"]).items())
        )
    return "\n".join(lines)
