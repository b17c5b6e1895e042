"""The tables of docs/decisions/0008: what each part of a kernel costs, how fast straight code is walked, and what
became of B in shared memory; of ablation.jsonl, walking.jsonl and shared_ring.jsonl in benchmarks/results."""

from collections.abc import Mapping

from benchmarks.ablation import CASES
from lospmm.model import Schedule
from tests.docs.results import Record, by_kernel, records, table

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


def by_registers() -> str:
    """Multiply-adds a cycle of a loop in the instruction cache, by what they read."""
    found = {
        (record["banks"], record["column"], record["reuse"]): record["fmas_per_cycle"]
        for record in records("walking")
        if record["kib"] == min(record["kib"] for record in records("walking"))
    }
    columns = sorted({column for _, column, _ in found})
    titles = [f"{column} a factor{', reuse' if reuse else ''}" for column in columns for reuse in (False, True)]
    lines = [
        (banks, *(f"{found[banks, column, reuse]:.2f}" for column in columns for reuse in (False, True)))
        for banks in dict.fromkeys(banks for banks, _, _ in found)
    ]
    return table(("bank of the accumulator", *titles), lines, right=len(titles))


def by_neighbour() -> str:
    """Multiply-adds and bytes of code a cycle and SM, by which SMs walk the same code."""
    found = [record for record in records("walking") if record["tiles"] and record["kib"] > 16]
    places = list(dict.fromkeys(record["tiles"] for record in found))
    lines: dict[tuple[str, ...], list[str]] = {}
    for record in found:
        name = (f"{record['kib']} KiB", str(record["warps"]), record["walks"])
        lines.setdefault(name, []).append(f"{record['fmas_per_cycle']:.2f} ({record['bytes_per_cycle']:.2f})")
    return table(
        ("code", "warps", "walked", *places), [(*name, *cells) for name, cells in lines.items()], right=len(places)
    )


def rings() -> str:
    """Of every problem the kernel with B in registers, the fastest ring, and parts of one."""
    problems: dict[str, list[Record]] = {}
    for record in records("shared_ring"):
        name = f"{record['m']} x {record['k']}, n {record['n']}, {record['sparsity']:.0%}"
        problems.setdefault(name, []).append(record)
    lines = []
    for name, kernels in problems.items():
        timed = [kernel for kernel in kernels if "micros" in kernel]
        now = next(kernel for kernel in timed if kernel["b_in"] == "registers")
        best = min((k for k in timed if "without" in k and not k["without"]), key=lambda kernel: kernel["micros"])
        parts = {kernel["without"]: kernel for kernel in timed if kernel.get("without")}
        part = parts["copies"]
        lines.append(
            (
                name,
                f"{now['micros']:.1f} ({now['rows']} x {now['cols']})",
                f"{best['micros']:.1f} ({_ring(best)})",
                f"{part['micros']:.1f} / {parts['multiply-adds']['micros']:.1f} ({_ring(part)})",
            )
        )
    return table(("problem", "registers", "ring", "no copies / no multiply-adds"), lines, right=3)


def _ring(kernel: Record) -> str:
    shared = ", two blocks" if kernel["multicast"] > 1 else ""
    return f"{kernel['rows']} x {kernel['cols']}, {kernel['stages']} x {kernel['stage_rows']}{shared}"


REGIONS = {"ablation": ablation, "neighbours": by_neighbour, "banks": by_registers, "rings": rings}
