"""Tables of docs/decisions/0008 and 0013 and of docs/measuring.md: code by GPC, tiles one after another, pairs of
16-bit numbers, modules loaded again. They come from gpcs, chains, pairs and reloads.jsonl in benchmarks/results."""

import statistics
from collections.abc import Sequence

from tests.docs.results import Record, records, table


def _problem(record: Record) -> str:
    return f"{record['m']} x {record['k']}, n {record['n']}, {record['sparsity']:.0%}"


def walks() -> str:
    """Bytes of code a cycle and SM, by how many SMs of a GPC walk the same tile: walked before, and anew."""
    found = [record for record in records("gpcs") if "kib" in record and record["warps"] == 16]
    again = {kib: {} for kib in sorted({record["kib"] for record in found if "code_mib" not in record})}  # type: ignore[var-annotated]
    anew = {}
    for record in found:
        if "code_mib" in record:
            anew[record["tiles"].removesuffix(", anew")] = record["bytes_per_cycle"]
        else:
            again[record["kib"]][record["tiles"]] = record["bytes_per_cycle"]
    names = list(dict.fromkeys(name for rates in again.values() for name in rates))
    lines = [
        (name, *(f"{rates[name]:.2f}" for rates in again.values()), f"{anew[name]:.2f}" if name in anew else "-")
        for name in names
    ]
    fresh = next(record["kib"] for record in found if "code_mib" in record)
    titles = (*(f"{kib} KiB, walked before" for kib in again), f"{fresh} KiB, anew")
    return table(("the same tile", *titles), lines, right=len(titles))


def orders() -> str:
    """Microseconds of kernels whose blocks take their tiles in another order."""
    problems: dict[tuple[str, str], dict[str, Record]] = {}
    for record in records("gpcs"):
        if "order" in record and "m" in record:
            key = _problem(record), f"{record['rows']} x {record['cols']}, groups of {record['column_group'] or 'all'}"
            problems.setdefault(key, {})[record["order"]] = record
    plain = {key: by for key, by in problems.items() if "grid" in by}
    names = list(dict.fromkeys(order for by in plain.values() for order in by))
    lines = [(*key, *(_micros(by.get(name)) for name in names)) for key, by in plain.items()]
    return table(("problem", "M1 x N1", *names), lines, right=len(names))


def clusters() -> str:
    """Microseconds of kernels whose column blocks come in clusters."""
    problems: dict[tuple[str, str], dict[str, Record]] = {}
    for record in records("gpcs"):
        if str(record.get("order")).startswith("clusters"):
            key = _problem(record), f"{record['rows']} x {record['cols']}"
            problems.setdefault(key, {})[record["order"]] = record
    names = list(dict.fromkeys(order for by in problems.values() for order in by))
    lines = [(*key, *(_micros(by.get(name)) for name in names)) for key, by in problems.items()]
    return table(("problem", "M1 x N1", *names), lines, right=len(names))


def _micros(record: Record | None) -> str:
    return "-" if record is None else f"{record['micros']:.1f}"


def chains() -> str:
    """Microseconds of every schedule with a tile to a block and with two, and how much less that takes."""
    found: dict[tuple[str, ...], dict[int, float]] = {}
    for record in records("chains"):
        barriers = f", a barrier every {record['lockstep']}" if record["lockstep"] else ""
        how = f"groups of {record['column_group'] or 'all'}{barriers}"
        key = _problem(record), f"{record['rows']} x {record['cols']}", how
        found.setdefault(key, {})[record["tiles_per_block"]] = record["micros"]
    lines = [(*key, f"{by[1]:.1f}", f"{by[2]:.1f}", f"{by[2] / by[1]:.2f}") for key, by in found.items()]
    return table(("problem", "M1 x N1", "schedule", "one tile", "two tiles", "of the time"), lines, right=3)


def pairs() -> str:
    """The fastest kernel of each kind, by problem: microseconds, tile and error."""
    problems: dict[str, dict[str, Record]] = {}
    for record in records("pairs"):
        kinds = problems.setdefault(_problem(record), {})
        if record["micros"] is not None:
            kinds[record["kind"]] = min(kinds.get(record["kind"], record), record, key=lambda one: float(one["micros"]))
    kinds = list(dict.fromkeys(kind for by in problems.values() for kind in by))
    lines = [(name, *(_cell(by.get(kind)) for kind in kinds)) for name, by in problems.items()]
    return table(("problem", *kinds), lines, right=len(kinds))


def _cell(record: Record | None) -> str:
    if record is None:
        return "-"
    return f"{record['micros']:.1f}" + (f" ({record['rows']} x {record['cols']})" if "rows" in record else "")


def errors() -> str:
    """Errors relative to |A||B| of the fastest kernels, over all problems: the root mean square and the largest."""
    found: dict[str, list[Record]] = {}
    for record in records("pairs"):
        if "max_relative_error" in record:
            found.setdefault(record["kind"], []).append(record)
    lines = []
    for kind, mine in found.items():
        means = [one["rms_relative_error"] for one in mine]
        if "alone" not in kind:
            lines.append(
                (
                    kind,
                    f"{min(means):.1e} to {max(means):.1e}",
                    f"{max(one['max_relative_error'] for one in mine):.1e}",
                )
            )
    return table(("kind", "root mean square", "largest"), lines, right=2)


def reloads() -> str:
    """How far times are apart, by what was varied: of each kernel the range of medians."""
    kernels: dict[tuple[str, str], list[Record]] = {}
    for record in records("reloads"):
        kernels.setdefault((_problem(record), f"{record['rows']} x {record['cols']}"), []).append(record)
    lines = []
    for key, found in kernels.items():
        modules = [one for one in found if one["varied"] == "module"]
        code = {one["code_bytes"] for one in modules}
        lines.append(
            (
                *key,
                f"{min(code) / 2**20:.1f} MiB",
                _rounds(modules),
                _range(modules, ("process", "number")),
                _range([one for one in found if one["varied"] == "B and C"], ("process", "module", "number"), of=2),
                _range([one for one in found if one["varied"] == "kernel before"], ("number",)),
            )
        )
    titles = ("code", "one of them, again", "module", "B and C", "behind another kernel")
    return table(("problem", "M1 x N1", *titles), lines, right=len(titles))


def _medians(found: Sequence[Record], by: Sequence[str]) -> dict[tuple[object, ...], float]:
    groups: dict[tuple[object, ...], list[float]] = {}
    for record in found:
        groups.setdefault(tuple(record.get(name) for name in by), []).append(record["micros"])
    return {key: statistics.median(times) for key, times in groups.items()}


def _range(found: Sequence[Record], by: Sequence[str], of: int = 0) -> str:
    """The largest difference, among those that agree in the first ``of`` figures."""
    medians = _medians(found, by)
    alike: dict[tuple[object, ...], list[float]] = {}
    for key, median in medians.items():
        alike.setdefault(key[:of], []).append(median)
    widest = max(alike.values(), key=lambda times: max(times) / min(times))
    return f"{min(widest):.1f} to {max(widest):.1f}"


def _rounds(modules: Sequence[Record]) -> str:
    times: dict[tuple[object, ...], list[float]] = {}
    for record in modules:
        times.setdefault((record["process"], record["number"]), []).append(record["micros"])
    return f"{statistics.median(max(one) / min(one) - 1 for one in times.values()):.1%}"


REGIONS = {"gpcs": walks, "orders": orders, "clusters": clusters, "chains": chains}
PAIRS = {"pairs": pairs, "errors": errors}
MEASURING = {"reloads": reloads}
