"""The tables of docs/decisions/0008: what the parts of a kernel cost, and what kernels ask of the GPU."""

from collections.abc import Mapping

from benchmarks.ablation import CASES
from lospmm.problem.device import find_device
from lospmm.problem.problem import ceil_div
from lospmm.space.candidates import Schedule
from lospmm.space.estimate import RATES
from tests.docs.results import by_kernel, records, table

#: Columns of the table that show one variant: its name and the column's.
PARTS = (
    ("whole", "whole"),
    ("without loads", "no loads"),
    ("without stores", "no stores"),
    ("without multiply-adds", "no multiply-adds"),
    ("loads and stores normal", "no hints"),
)

#: What begins the names of a series of variants, and the one to compare its fastest with.
SERIES = (("column group ", "1"), ("barrier every ", "0"))


def ablation() -> str:
    lines = []
    for (name, kernel), (_, _, schedule) in zip(by_kernel(records("ablation")).items(), CASES, strict=True):
        cells = [f"{kernel[variant]:.1f}" for variant, _ in PARTS]
        cells += [_compared(kernel, prefix, plain) for prefix, plain in SERIES]
        lines.append((*name, *cells, f"{_apart(kernel, schedule):.0%}"))
    titles = (*(title for _, title in PARTS), "groups of 1 / best", "no barriers / best", "alike")
    return table(("problem", "M1 x N1", *titles), lines, right=len(titles))


def _compared(kernel: Mapping[str, float], prefix: str, plain: str) -> str:
    """The plain variant of a series and the fastest other one, with its name."""
    others = {name.removeprefix(prefix): time for name, time in kernel.items() if name.startswith(prefix)}
    micros = others.pop(plain)
    best = min(others, key=lambda name: others[name])
    return f"{micros:.1f} / {others[best]:.1f} ({best})"


def _apart(kernel: Mapping[str, float], schedule: Schedule) -> float:
    """How far the variants that are the same kernel are apart, relative to the fastest."""
    same = ("whole", f"column group {schedule.column_group or 'all'}", f"barrier every {schedule.lockstep}")
    times = [kernel[name] for name in same]
    return max(times) / min(times) - 1


#: Between two launches of a graph (lospmm.space.estimate), and SMs of the GPU: what is left is what blocks take.
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


REGIONS = {"ablation": ablation, "walls": walls}
