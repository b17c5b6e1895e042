"""What the choice of the fastest of several loads is worth, from the lines of ``placing.jsonl``."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Row = dict[str, Any]

#: Loads that are chosen from.
COUNTS = (1, 2, 4, 8, 16)

#: Rounds of the way ``kept`` that choose; the others, and the other ways, say what was chosen.
CHOOSING_ROUNDS = 2

#: Ways that are measured after the choice, and are no part of it.
WAYS = ("kept", "anew", "elsewhere", "behind")

Key = tuple[object, ...]


def key_of(row: Row) -> Key:
    """The kernel of a line."""
    return row["m"], row["k"], row["n"], row["sparsity"], row["rows"], row["cols"]


def by_kernel(rows: Sequence[Row]) -> dict[Key, dict[int, dict[str, Row]]]:
    """Lines by kernel, process and way."""
    found: dict[Key, dict[int, dict[str, Row]]] = {}
    for row in rows:
        found.setdefault(key_of(row), {}).setdefault(row["process"], {})[row["way"]] = row
    return found


def later(ways: Mapping[str, Row], way: str) -> list[float]:
    """Of each copy the median of the times that no choice is made by."""
    first = CHOOSING_ROUNDS if way == "kept" else 0
    return [statistics.median(times[first:]) for times in ways[way]["micros"]]


def chosen_of(ways: Mapping[str, Row], start: int, count: int) -> int:
    """Of ``count`` copies from ``start`` on, in a ring, the one whose first rounds are the fastest."""
    micros = ways["kept"]["micros"]
    ring = [(start + step) % len(micros) for step in range(count)]
    return min(ring, key=lambda copy: statistics.median(micros[copy][:CHOOSING_ROUNDS]))


def gain(processes: Mapping[int, Mapping[str, Row]], way: str, count: int) -> float:
    """The mean time, later, of the fastest of ``count`` loads over that of a load: of all processes, and from each
    load on."""
    shares = []
    for ways in processes.values():
        micros = later(ways, way)
        copies = range(len(micros))
        chosen = [micros[chosen_of(ways, start, count)] for start in copies]
        shares.append(statistics.fmean(chosen) / statistics.fmean(micros))
    return statistics.fmean(shares)


def repeats(ways: Mapping[str, Row]) -> float:
    """How far the rounds of one copy are apart: the median over the copies of their interquartile range over the
    median."""
    found = []
    for times in ways["kept"]["micros"]:
        low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
        found.append((high - low) / middle)
    return statistics.median(found)


def table(rows: Sequence[Row]) -> str:
    """A line for each kernel: the range of its loads, how far one is from itself, and the gain by number of loads."""
    counts = "".join(f"{count:>7}" for count in COUNTS)
    lines = [f"{'kernel':46} {'us':>17} {'again':>6} {'load':>6} {'time':>6}  way      {counts}  alone"]
    for key, processes in by_kernel(rows).items():
        processes = {process: ways for process, ways in processes.items() if set(WAYS) <= set(ways)}
        if not processes:
            continue
        m, k, n, sparsity, height, width = key
        name = f"{m} x {k}, n {n}, {sparsity:.0%}, {height} x {width}"
        first = next(iter(processes.values()))
        alone = [
            statistics.median(ways["alone"]["micros"][0]) / later(ways, "anew")[ways["alone"]["chosen"]]
            for ways in processes.values()
            if "alone" in ways
        ]
        for way in WAYS:
            micros = [time for ways in processes.values() for time in later(ways, way)]
            gains = "".join(f"{gain(processes, way, count):7.3f}" for count in COUNTS)
            spread = statistics.fmean(map(repeats, processes.values()))
            times = f"{min(micros):8.2f} {max(micros):8.2f}"
            head, load, timing = name, f"{first['kept']['load_ms']:6.2f}", f"{first['kept']['timing_ms']:6.2f}"
            end = f"  {statistics.fmean(alone):.3f}" if alone and way == "anew" else ""
            lines.append(f"{head:46} {times} {spread:6.1%} {load} {timing}  {way:9}{gains}{end}")
    return "\n".join(lines)
