"""The tables of measured figures, made from benchmarks/results/*.jsonl: a file that is not there has no rows."""

import statistics
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.harness import read_lines
from benchmarks.registers import IN_USE
from fitting import DATA
from fitting.estimate_on_gpu import NAME
from fitting.fit_estimate import Timed, estimates, timed_kernels
from lospmm.space.estimate import RATES
from tests.docs.pages import ROOT

RESULTS = ROOT / "benchmarks" / "results"

Record = dict[str, Any]
Row = tuple[str, str]


def records(name: str, folder: Path = RESULTS) -> list[Record]:
    paths = (folder / f"{name}.jsonl", folder / f"{name}.jsonl.gz")
    return [line for path in paths if path.exists() for line in read_lines(path)]


def table(headings: Sequence[str], lines: Sequence[Sequence[str]], right: int = 0) -> str:
    """A table whose last ``right`` columns are aligned to the right."""
    marks = ["---"] * (len(headings) - right) + ["---:"] * right
    return "".join(f"| {' | '.join(line)} |\n" for line in (headings, marks, *lines))


def middle(values: Sequence[float], digits: str = ".2f") -> str:
    return f"{statistics.median(values):{digits}} ({min(values):{digits}} to {max(values):{digits}})"


def _reordering(found: list[Record]) -> list[Row]:
    total = {
        record["method"]: record["total_nnc"]
        for record in found
        if (record["measure"], record.get("load_ratio"), record.get("similarity")) == ("tiles", 3, 0.9)
    }
    before, after = total["no reordering"], total["Algorithm 1"]
    layers = [record["total_nnc"] for record in found if record["measure"] == "layers" and record["size_limit"] == 32]
    rows = [
        (
            "loads of B with rows reordered / in natural order: matrix of section 4.3, R = 0.9, load ratio 3",
            f"{after / before:.2f} ({after:,} of {before:,})",
        )
    ]
    if layers:
        rows.append((f"the same over {len(layers)} real pruned layers, M1 = 32: median (min to max)", middle(layers)))
    return rows


def _proxies(found: list[Record]) -> list[Row]:
    shares = {}
    for name in dict.fromkeys(record["layer"] for record in found):
        code = [record for record in found if record["measure"] == "code" and record["layer"] == name]
        kernels, proxies = (
            sum(record[key] for record in code) for key in ("kernels_instructions", "proxy_instructions")
        )
        shares[name] = kernels / proxies
    text = ", ".join(f"{share:.1f} ({name})" for name, share in shares.items())
    return [("instructions of all kernels of a search / of their proxies", text)]


def _registers(found: list[Record]) -> list[Row]:
    rows = []
    for emitter, level in dict.fromkeys((record["emitter"], record["ptxas"]) for record in found):
        mine = [record for record in found if (record["emitter"], record["ptxas"]) == (emitter, level)]
        spilled = sum(record["spill_bytes"] + record["stack_bytes"] > 0 for record in mine)
        above = sum(record["registers"] > record["forecast"] for record in mine)
        what = f"{emitter}, ptxas {level}" + ("" if level == IN_USE else " (not used)")
        text = f"{len(mine)} kernels sampled from the space, {what}: spill / exceed the register forecast"
        rows.append((text, f"{spilled} / {above}"))
    return rows


def _real_weights(found: list[Record]) -> list[Row]:
    seconds = [record["wall_seconds"] for record in found]
    errors = [record["max_relative_error"] for record in found]
    return [
        (
            f"matrix file to verified cubin{_by(found[0])}, {len(found)} real pruned layers: median (min to max)",
            f"{middle(seconds)} s",
        ),
        ("of these: largest error relative to \\|A\\|\\|B\\|", f"{max(errors):.1e}"),
        ("of these: kernels that spill registers", str(sum(record["spill_bytes"] > 0 for record in found))),
    ]


def _by(record: Record) -> str:
    """The emitter: files from before machine code do not name it."""
    return f", {record.get('emitter', 'ptx')}"


def to_cubin_seconds(record: Record) -> float:
    """Machine code from a candidate to its cubin, ptxas left out; the graft has the encoding in it."""
    return float(sum(record["seconds"][name] for name in ("program", "schedule", "graft")))


def _emission(found: list[Record]) -> list[Row]:
    return [
        (
            f"code generation on one core, {record['m']:,} x {record['k']:,}, {record['nnz']:,} nonzeros, without "
            f"ptxas on the prologue, best of {record['repeats']}: time / peak memory",
            f"{to_cubin_seconds(record):.2f} s / {record['peak_bytes']['cubin'] >> 20:,} MiB",
        )
        for record in found
    ]


def _compile_time(found: list[Record]) -> list[Row]:
    return [
        (
            f"{record['what']}{_by(record) if record['what'] == 'lospmm tune' else ''}, {record['m']:,} x "
            f"{record['k']:,}, {record['nnz']:,} nonzeros, empty cache, not verified: time / peak memory",
            f"{record['wall_seconds']:.1f} s / {record['peak_tree_bytes'] >> 20:,} MiB",
        )
        for record in found
    ]


def _code_delivery(found: list[Record]) -> list[Row]:
    """Of the longest code and the largest block: the least and the most that barriers make of it."""
    body, threads = (max(record[name] for record in found) for name in ("body_kib", "threads"))
    rates = {
        record["barrier_kib"]: record["fmas_per_cycle"]
        for record in found
        if (record["body_kib"], record["threads"]) == (body, threads)
    }
    step = max(rates, key=lambda barrier: rates[barrier])
    what = f"FMAs issued per SM and cycle (at most 4), {body} KiB of code, {threads:,} threads: without"
    return [(f"{what} barriers / with one every {step} KiB", f"{rates[0]:.1f} / {rates[step]:.1f}")]


def _ablation(found: list[Record]) -> list[Row]:
    shares = [kernel["loads and stores normal"] / kernel["whole"] for kernel in by_kernel(found).values()]
    return [
        (
            f"slowdown of {len(shares)} kernels without cache hints: min to max",
            f"{min(shares):.2f} to {max(shares):.2f}",
        )
    ]


def by_kernel(found: list[Record]) -> dict[tuple[str, str], dict[str, float]]:
    """Microseconds of every variant of the ablation's kernels, by problem and tile size, with B from memory."""
    kernels: dict[tuple[str, str], dict[str, float]] = {}
    for record in found:
        name = f"{record['m']} x {record['k']}, n {record['n']}, {record['sparsity']:.0%}"
        kernel = kernels.setdefault((name, f"{record['rows']} x {record['cols']}"), {})
        kernel[record["variant"]] = record["cold_micros"]
    return kernels


def _choosing(found: list[Record]) -> list[Row]:
    large = [record["best_ms"] for record in found if record["side"] == 4096]
    what = (
        "family and plan chosen without timing, one core, 4,096 x 4,096 at 50 to 90% zeros, N of 16 to 4,096, float16"
    )
    return [(f"{what}: min to max", f"{min(large):.0f} to {max(large):.0f} ms")]


Sources = dict[str, Callable[[list[Record]], list[Row]]]

#: The benchmarks behind each table, and the rows that each contributes.
TUNING_COST: Sources = {
    "emission": _emission,
    "real_weights": _real_weights,
    "compile_time": _compile_time,
    "choosing": _choosing,
    "proxies": _proxies,
}
GENERATED_CODE: Sources = {
    "registers": _registers,
    "code_delivery": _code_delivery,
    "ablation": _ablation,
    "reordering": _reordering,
}


def results(sources: Sources) -> str:
    """One table of figures, each with the benchmark that writes its file."""
    lines = [
        (what, figure, f"`benchmarks.{name}`")
        for name, rows in sources.items()
        if (found := records(name))
        for what, figure in rows(found)
    ]
    return table(("what", "measured", "by"), lines)


@cache
def _timed() -> dict[str, list[Timed]]:
    return timed_kernels(DATA / NAME)


def _first(kernels: list[Timed]) -> float:
    """Microseconds of the kernel that the estimate predicts fastest."""
    return kernels[int(estimates(kernels, RATES).argmin())].micros


def on_a_gpu() -> str:
    """The predicted fastest kernel beside the fastest of all that were timed."""
    lines = [
        (name, str(len(kernels)), f"{_first(kernels):.1f}", f"{min(kernel.micros for kernel in kernels):.1f}")
        for name, kernels in _timed().items()
    ]
    return table(("A, B and zeros", "kernels timed", "predicted fastest, us", "fastest, us"), lines, right=3)
