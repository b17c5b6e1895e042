"""Tables of docs/decisions/0008, 0013 and 0015 and of docs/measuring.md: code by GPC, tiles one after another, pairs of
16-bit numbers, modules loaded again. They come from the files of those names in benchmarks/results."""

import statistics
from collections.abc import Sequence
from itertools import pairwise

from benchmarks.before_table import BY, groups, share
from benchmarks.before_table import timings as timings_before
from benchmarks.placing_table import by_kernel, gain, later, repeats
from lospmm.device import find_device
from lospmm.estimate import RATES
from lospmm.model import ceil_div
from tests.docs.results import Record, records, table


def _problem(record: Record) -> str:
    return f"{record['m']} x {record['k']}, n {record['n']}, {record['sparsity']:.0%}"


def walks() -> str:
    """Bytes of code a cycle and SM, by how many SMs of a GPC walk the same tile."""
    found = [record for record in records("gpcs") if "kib" in record and record["warps"] == 16]
    rates = {(record["tiles"], record["kib"]): record["bytes_per_cycle"] for record in found}
    sizes = sorted({kib for _, kib in rates})
    lines = [
        (name, *(f"{rates[name, kib]:.2f}" if (name, kib) in rates else "-" for kib in sizes))
        for name in dict.fromkeys(name for name, _ in rates)
    ]
    return table(("the same tile", *(f"{kib} KiB" for kib in sizes)), lines, right=len(sizes))


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


#: Records that count wrong elements instead of microseconds.
REUSE = "reuse"


def pairs(*names: str) -> str:
    """The fastest kernel of each kind, by problem: microseconds and tile."""
    problems: dict[str, dict[str, Record]] = {}
    for record in (one for name in names or ("pairs",) for one in records(name) if one["kind"] != REUSE):
        kinds = problems.setdefault(_problem(record), {})
        if record["micros"] is not None:
            kinds[record["kind"]] = min(kinds.get(record["kind"], record), record, key=lambda one: float(one["micros"]))
    kinds = sorted(dict.fromkeys(kind for by in problems.values() for kind in by), key=lambda kind: "cuBLAS" in kind)
    lines = [(name, *(_cell(by.get(kind)) for kind in kinds)) for name, by in problems.items()]
    return table(("problem", *kinds), lines, right=len(kinds))


def quads() -> str:
    """Of four columns to a thread the fastest tile of each problem, and how far its results are from float64."""
    problems: dict[str, list[Record]] = {}
    for record in records("quads"):
        problems.setdefault(_problem(record), []).append(record)
    lines = []
    for problem, found in problems.items():
        best = min(found, key=lambda one: one["micros"])
        worst = max(one["max_relative_error"] for one in found)
        lines.append((problem, str(len(found)), _cell(best), f"{best['code_bytes'] / 1024:,.0f} KiB", f"{worst:.1e}"))
    heads = ("problem", "kernels", "fastest", "its code", "greatest error of all")
    return table(heads, lines, right=4)


def reuse() -> str:
    """Elements that are wrong, by pipes and with what is kept in the reuse cache."""
    found: dict[tuple[str, str], list[Record]] = {}
    names = {(0,): "HFMA2", (1,): "HFMA2.MMA", (0, 1): "in turns"}
    for record in (one for one in records("pairs") if one["kind"] == REUSE):
        about = names[tuple(record["pipes"])], "kept" if record["reuse"] else "read anew"
        found.setdefault(about, []).append(record)
    lines = [
        (*about, f"{sum(one['wrong'] for one in mine)}", f"{sum(one['elements'] for one in mine):,}")
        for about, mine in found.items()
    ]
    return table(("multiply-adds", "factors", "wrong", "of elements"), lines, right=2)


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


#: Between two launches of a graph (lospmm.estimate), and SMs of the GPU: what is left is what blocks take.
LAUNCH_MICROS, SMS = RATES.launch_micros, find_device("h200").sms


def walls() -> str:
    """Of the unrolled kernels of the seven: B from the L2 cache, code, and multiply-adds, by their blocks' time."""
    clock = find_device("h200").clock_hz
    lines = []
    for one in records("kernels"):
        if one["set"] != "seven" or not one.get("tile"):  # another family's kernel has none
            continue
        tile, micros = one["tile"], one["micros"] - LAUNCH_MICROS
        across = ceil_div(one["n"], tile["cols"] * tile.get("walks", 1))  # of which each fetches the code once
        busy = min(SMS, tile["count"] * across)
        cycles = micros * 1e-6 * clock
        lines.append(
            (
                one["problem"],
                f"{tile['rows']} x {tile['cols']}",
                f"{4 * tile['nnc_sum'] * one['n'] / micros * 1e-6:.1f}",
                f"{one['code_bytes'] * across / busy / cycles:.2f}",
                f"{one['nnz'] * one['n'] / 32 / busy / cycles:.2f}",
            )
        )
    titles = ("B from L2, TB/s", "code, bytes a cycle", "multiply-adds a cycle")
    return table(("problem", "M1 x N1", *titles), lines, right=len(titles))


def walked_twice() -> str:
    """The fastest kernel of each problem that walks its code once, and the fastest that walks it twice."""
    lines = []
    for one in records("walks"):
        once, twice = one["once"], one["twice"]
        if twice is None:
            continue
        problem = f"{one['m']} x {one['k']}, n {one['n']}, {one['sparsity']:.0%}"
        ratio = f"{twice['micros'] / once['micros']:.2f}"
        lines.append((problem, _walker(once), _walker(twice), ratio))
    return table(("problem", "once", "twice", "twice by once"), lines, right=3)


def _walker(one: Record) -> str:
    chain = f", {one['tiles_per_block']} tiles" if one["tiles_per_block"] > 1 else ""
    return f"{one['micros']:.1f} ({one['rows']} x {one['cols']}{chain})"


def slow_loads() -> str:
    """Of each layout of the longest code: loads of a process, and how many take 5 % longer than the median of all."""
    found: dict[str, dict[int, list[float]]] = {}
    for record in (one for one in records("layouts") if one["process"] == 0):
        found.setdefault(record["layout"], {}).setdefault(record["number"], []).append(record["micros"])
    medians = {layout: [statistics.median(times) for times in loads.values()] for layout, loads in found.items()}
    usual = statistics.median(time for times in medians.values() for time in times)
    lines = [
        (
            layout,
            str(len(times)),
            str(sum(time > 1.05 * usual for time in times)),
            f"{min(times):.1f} to {max(times):.1f}",
        )
        for layout, times in medians.items()
    ]
    return table(("layout", "loads", "slow", "us"), lines, right=3)


def loads() -> str:
    """Of kernels near the fastest: the least, the median and the most of their loads, by GPU."""
    found: dict[tuple[int, int, int], dict[str, list[float]]] = {}
    for record in records("loads"):
        found.setdefault((record["rows"], record["cols"], record["tiles"]), {})[record["gpu"]] = record["micros"]
    gpus = list(dict.fromkeys(gpu for by_gpu in found.values() for gpu in by_gpu))
    least = min(min(times) for by_gpu in found.values() for times in by_gpu.values())
    shown = [
        key for key, by_gpu in found.items() if key[0] in SHOWN_ROWS and min(map(min, by_gpu.values())) < NEAR * least
    ]
    lines = [
        (
            f"{rows} x {cols}, {tiles} tiles",
            *(
                f"{min(times):.1f}, {statistics.median(times):.1f}, {max(times):.1f}"
                for times in (found[rows, cols, tiles][gpu] for gpu in gpus)
            ),
        )
        for rows, cols, tiles in shown
    ]
    return table(("M1 x N1", *(f"GPU {number}" for number, _ in enumerate(gpus))), lines, right=len(gpus))


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


def placing() -> str:
    """What the fastest of several loads is worth: of each kernel the range of its loads, and times of what was chosen
    over those of a load."""
    lines = []
    for key, processes in by_kernel(records("placing")).items():
        m, k, n, sparsity, height, width = key
        loads = [time for ways in processes.values() for time in later(ways, "kept")]
        again = statistics.fmean(map(repeats, processes.values()))
        lines.append(
            (
                f"{m} x {k}, n {n}, {sparsity:.0%}",
                f"{height} x {width}",
                f"{min(loads):.1f} to {max(loads):.1f}",
                f"{again:.1%}",
                *(f"{gain(processes, 'kept', count):.3f}" for count in (2, 4, 8, 16)),
                f"{gain(processes, 'elsewhere', 8):.3f}",
            )
        )
    titles = ("us", "one of them, again", *(f"of {count}" for count in (2, 4, 8, 16)), "of 8, other B and C")
    return table(("problem", "M1 x N1", *titles), lines, right=len(titles))


def before() -> str:
    """Of each kernel, how much of what its times differ by goes with the copy of the code, what was run before and the
    order of SMs."""
    lines = []
    for key, found in timings_before(records("before")).items():
        m, k, n, sparsity, height, width = key
        times = sorted(record["micros"] for record in found)
        two_percent = len(times) // 50
        lines.append(
            (
                f"{m} x {k}, n {n}, {sparsity:.0%}",
                f"{height} x {width}",
                f"{len(times)}",
                f"{times[two_percent]:.1f} to {times[-1 - two_percent]:.1f}",
                *(f"{max(0.0, share(found, by)):.2f}" for by in BY.values()),
            )
        )
    titles = ("timings", "us", "copy of the code", "what was run before", "order of SMs")
    return table(("problem", "M1 x N1", *titles), lines, right=len(titles))


def rings() -> str:
    """Medians of each kernel by the SM that the ring of GPCs begins at."""
    everything = records("before")
    first = {record["order"]: record["sms"][APART] for record in everything if "sms" in record}
    kernels = {
        f"{key[4]} x {key[5]}": groups(found, lambda record: first.get(record["order"]))
        for key, found in timings_before(everything).items()
    }
    starts = sorted(set(first.values()))
    lines = [
        (
            name,
            *(f"{statistics.median(times[start]):.1f}" if start in times else "-" for start in starts),
        )
        for name, times in sorted(kernels.items())
    ]
    return table(("M1 x N1", *(f"SM {start}" for start in starts)), lines, right=len(starts))


def reset() -> str:
    """By what is run before a kernel that keeps the ring of GPCs, how often it begins where it had before."""
    everything = records("before")
    first = {record["order"]: record["sms"][APART] for record in everything if "sms" in record}
    timed = [record for record in everything if "micros" in record]
    kept: dict[str, list[bool]] = {}
    micros: dict[str, list[float]] = {}
    for earlier, record in pairwise(timed):
        if record["rows"] not in RINGED_ROWS:
            continue
        if earlier["order"] and record["order"]:
            kept.setdefault(record["before"], []).append(first[earlier["order"]] == first[record["order"]])
        if record["cols"] == RINGED_COLS:
            micros.setdefault(record["before"], []).append(record["micros"])
    lines = [
        (
            "nothing" if name == "-" else name,
            f"{sum(same)} of {len(same)}",
            f"{min(micros[name]):.1f}, {statistics.median(micros[name]):.1f}, {max(micros[name]):.1f}",
        )
        for name, same in sorted(kept.items(), key=lambda one: (-sum(one[1]) / len(one[1]), one[0]))
    ]
    return table(("run before the kernel", "ring as before", f"48 x {RINGED_COLS}, us"), lines, right=2)


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


REGIONS = {"gpcs": walks, "orders": orders, "clusters": clusters, "walls": walls}
PAIRS = {"pairs": pairs, "errors": errors, "reuse": reuse}

#: Errors are those of float32 sums, rounded once: in docs/accuracy.md.
NARROW = {"narrow": lambda: pairs("narrow"), "quads": quads}
WALKS = {"walks": walked_twice}
#: Of the kernels of ``benchmarks.loads``.
SHOWN_ROWS, NEAR = (45, 48, 51), 1.2
LOADS = {"loads": loads}
#: Kernels of a wave that is not full, whose times follow the ring.
RINGED_ROWS, RINGED_COLS = (48, 51), 640

#: Blocks of a grid that are on the SMs outside of the ring of GPCs.
APART = 8
MEASURING = {
    "reloads": reloads,
    "layouts": slow_loads,
    "before": before,
    "rings": rings,
    "reset": reset,
    "placing": placing,
}
