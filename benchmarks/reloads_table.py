"""How far apart the times of ``benchmarks.reloads`` are, by what was varied."""

import statistics
from collections.abc import Sequence
from typing import Any


def spread(rows: Sequence[dict[str, Any]], by: Sequence[str], value: str = "micros") -> str:
    """Range of the medians of what differs in ``by``, and the greatest range of the rounds of one of them."""
    if not rows:
        return "nothing"
    groups: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(name) for name in by), []).append(row[value])
    medians = [statistics.median(times) for times in groups.values()]
    within = [max(times) / min(times) - 1 for times in groups.values()]
    return (
        f"{min(medians):8.2f} to {max(medians):8.2f} us ({max(medians) / min(medians) - 1:6.1%} over {len(medians):3}),"
        f" rounds of one {statistics.median(within):6.1%}"
    )


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for number in dict.fromkeys(row["kernel"] for row in rows):
        mine = [row for row in rows if row["kernel"] == number]
        first = mine[0]
        lines.append(f"{first['m']} x {first['k']}, n {first['n']}, {first['rows']} x {first['cols']}")
        modules = [row for row in mine if row["varied"] == "module"]
        for process in dict.fromkeys(row["process"] for row in modules):
            own = [row for row in modules if row["process"] == process]
            lines.append(
                f"  process {process}, modules {spread(own, ['number'])}; warm {spread(own, ['number'], 'warm')}"
            )
            for kind in ("fastest", "slowest"):
                one = [row for row in mine if row["process"] == process and row.get("module") == kind]
                places = [row for row in one if row["varied"] == "B and C"]
                windows = [f"{row['micros']:.1f}" for row in one if row["varied"] == "tiles"]
                lines.append(f"  process {process}, {kind}: B and C {spread(places, ['number'])}")
                lines.append(f"    some tiles alone: {' '.join(windows)}")
            behind = [row for row in mine if row["process"] == process and row["varied"] == "kernel before"]
            lines.append(f"  process {process}, behind others {spread(behind, ['number'])}")
        lines.append(f"  processes          {spread(modules, ['process'])}")
        layouts = [row for row in mine if row["varied"] == "layout"]
        lines += [
            f"  {name:18} {spread([row for row in layouts if row['layout'] == name], ['process', 'number'])}"
            for name in dict.fromkeys(row["layout"] for row in layouts)
        ]
    return "\n".join(lines)
