"""The tables of docs/decisions/0028, from ``cold_code.jsonl``, of 0030 and of early stores in 0026, from
``cold_choices.jsonl``, and of 0008's counters, from ``counters.jsonl``."""

import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.cold_choices import ALONE, NETWORK, TURNS, WAYS
from benchmarks.cold_code import BEFORE, FORMS
from lospmm.codegen.sass.fetch import MIN_CODE_BYTES
from tests.docs.results import Record, records, table

#: A kernel: (m, k, n), zeros, tile. Its cubin's bytes, and the median of each form behind what is run before.
Kernel = tuple[int, int, int, float, int, int]
Times = dict[tuple[str, str], float]

#: What tells kernels of ``cold_choices.jsonl`` apart.
AXES = ("rows", "cols", "prefetch", "column_group", "lockstep", "split_k", "tiles_per_block", "stores_early")

#: SMs of the GPU that counters were read of.
SMS = 132


def _kernels() -> list[tuple[int, Kernel, Times]]:
    """By their size."""
    micros: dict[Kernel, dict[tuple[str, str], list[float]]] = {}
    sizes: dict[Kernel, int] = {}
    for record in records("cold_code"):
        kernel = tuple(record[name] for name in ("m", "k", "n", "sparsity", "rows", "cols"))
        micros.setdefault(kernel, {}).setdefault((record["before"], record["form"]), []).append(record["micros"])
        if record["form"] == FORMS[0]:
            sizes[kernel] = record["code_bytes"]
    found = [
        (sizes[kernel], kernel, {key: statistics.median(times) for key, times in by.items()})
        for kernel, by in micros.items()
    ]
    return sorted(found)


def _titles() -> list[str]:
    return [f"{before or 'itself'}: {form}" for before in BEFORE for form in FORMS]


def large() -> str:
    """Of kernels with so much code that it is fetched."""
    lines = [
        (f"{m} x {k}, n {n}, {zeros:.0%}", f"{rows} x {cols}", f"{size >> 10:,}",
         *(f"{times[before, form]:.1f}" for before in BEFORE for form in FORMS))
        for size, (m, k, n, zeros, rows, cols), times in _kernels()
        if size >= MIN_CODE_BYTES
    ]  # fmt: skip
    return table(("A and zeros", "M1 x N1", "KiB", *_titles()), lines, right=len(_titles()) + 1)


def ratios() -> str:
    """Of what is fetched over what is not: geometric means, least and greatest, of small and large kernels."""
    lines = []
    for name, is_large in ((f"less than {MIN_CODE_BYTES >> 10} KiB", False), ("more", True)):
        group = [times for size, _, times in _kernels() if (size >= MIN_CODE_BYTES) == is_large]
        cells = []
        for before in BEFORE:
            found = [times[before, FORMS[1]] / times[before, FORMS[0]] for times in group]
            mean = math.exp(statistics.fmean(map(math.log, found)))
            cells.append(f"{mean:.3f} ({min(found):.2f} to {max(found):.2f})")
        lines.append((name, f"{len(group)}", *cells))
    return table(("cubin", "kernels", *(f"behind {before or 'itself'}" for before in BEFORE)), lines, right=5)


def counters() -> str:
    lines = []
    for record in records("counters"):
        cycles = record["active_cycles"]
        lines.append((
            f"{record['m']} x {record['k']}, n {record['n']}, {record['sparsity']:.0%}",
            f"{record['nanoseconds'] / 1e3:.1f}",
            f"{cycles / record['cycles']:.2f}",
            f"{record['instructions'] / SMS / cycles:.2f}",
            f"{record['b_bytes'] / SMS / cycles:.0f}",
            f"{record['l2_busy']:.0f} %",
            *(f"{record[f'waits for {what}']:.1f}" for what in WAITS),
        ))  # fmt: skip
    heads = ("A and zeros", "us", "SMs active", "instructions a cycle", "bytes of B a cycle", "L2 busy")
    return table((*heads, *WAITS), lines, right=len(heads) + len(WAITS) - 1)


WAITS = ("instructions", "loads", "the load queue", "barriers", "its turn")


def _choices() -> dict[tuple[Any, ...], list[Record]]:
    """The lines of ``cold_choices.jsonl`` by problem."""
    found: dict[tuple[Any, ...], list[Record]] = {}
    for record in records("cold_choices"):
        found.setdefault(tuple(record[name] for name in ("m", "k", "n", "sparsity")), []).append(record)
    return found


def _micros(record: Record, way: str, turns: slice) -> float:
    return statistics.fmean(record["micros"][way][turns])


def choices() -> str:
    """What the kernel that is the fastest one launch after another takes in a network, beside the fastest there. Half
    of the turns choose, the others say what they take."""
    lines, ratios = [], []
    choosing, judging = slice(0, TURNS // 2), slice(TURNS // 2, TURNS)
    for (m, k, n, zeros), group in _choices().items():
        fastest = {way: min(group, key=lambda one, way=way: _micros(one, way, choosing)) for way in WAYS}
        own, best = (_micros(fastest[way], NETWORK, judging) for way in WAYS)
        ratios.append(own / best)
        tiles = (f"{one['rows']} x {one['cols']}" for one in fastest.values())
        alone = _micros(fastest[ALONE], ALONE, judging)
        lines.append((f"{m} x {k}, n {n}, {zeros:.0%}", f"{len(group)}", *tiles, f"{alone:.1f}", f"{own:.1f}",
                      f"{best:.1f}", f"{own / best:.2f}"))  # fmt: skip
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    lines.append(("geometric mean", *[""] * 6, f"{mean:.3f}"))
    heads = ("kernels", "fastest alone", "in a network", "the first alone, us", "in a network", "the second", "ratio")
    return table(("A and zeros", *heads), lines, right=7)


def early() -> str:
    """Rows stored early over the same kernel with all stores at its end."""
    pairs: dict[tuple[Any, ...], dict[bool, Record]] = {}
    for problem, group in _choices().items():
        for one in group:
            axes = (one[name] for name in AXES if name != "stores_early")
            pairs.setdefault((*problem, *axes), {})[one["stores_early"]] = one
    both = [pair for pair in pairs.values() if len(pair) == 2]
    lines = []
    for way in WAYS:
        found = sorted(_micros(pair[True], way, slice(None)) / _micros(pair[False], way, slice(None)) for pair in both)
        mean = math.exp(statistics.fmean(map(math.log, found)))
        lines.append((way, f"{len(found)}", f"{mean:.3f}", f"{found[0]:.2f} to {found[-1]:.2f}",
                      f"{found[int(0.95 * len(found))]:.3f}"))  # fmt: skip
    return table(("timed", "kernels", "mean", "least to most", "95 of 100 at most"), lines, right=4)


REGIONS: Mapping[str, Callable[[], str]] = {"cold code": large, "cold code ratios": ratios}
CHOICES: Mapping[str, Callable[[], str]] = {"cold choices": choices}
EARLY: Mapping[str, Callable[[], str]] = {"early choices": early}
COUNTERS: Mapping[str, Callable[[], str]] = {"counters": counters}
