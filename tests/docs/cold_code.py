"""The tables of docs/decisions/0028, from ``cold_code.jsonl``, and of 0008's counters, from ``counters.jsonl``."""

import math
import statistics
from collections.abc import Callable, Mapping

from benchmarks.cold_code import BEFORE, FORMS
from lospmm.codegen.sass.fetch import MIN_CODE_BYTES
from tests.docs.results import records, table

#: A kernel: (m, k, n), zeros, tile. Its cubin's bytes, and the median of each form behind what is run before.
Kernel = tuple[int, int, int, float, int, int]
Times = dict[tuple[str, str], float]

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

REGIONS: Mapping[str, Callable[[], str]] = {"cold code": large, "cold code ratios": ratios}
COUNTERS: Mapping[str, Callable[[], str]] = {"counters": counters}
