"""The tables of measured figures, made from benchmarks/results/*.jsonl: a file that is not there has no rows."""

import json
import statistics
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.families_table import best_sparse, dense_micros, mean
from benchmarks.harness import read_lines
from benchmarks.registers import IN_USE
from fitting import DATA
from fitting.estimate_on_gpu import NAME
from fitting.fit_estimate import Timed, estimates, quality, timed_kernels
from lospmm.estimate import RATES
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
            "loads of B, rows regrouped, of those in natural order: section 4.3's matrix with R = 0.9 and load ratio 3",
            f"{after / before:.2f} ({after:,} of {before:,})",
        )
    ]
    if layers:
        rows.append(
            (f"the same over {len(layers)} real pruned layers, M1 = 32: median (least to most)", middle(layers))
        )
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
    return [("instructions of all kernels of a search / those of their proxies", text)]


def _registers(found: list[Record]) -> list[Row]:
    rows = []
    for emitter, level in dict.fromkeys((record["emitter"], record["ptxas"]) for record in found):
        mine = [record for record in found if (record["emitter"], record["ptxas"]) == (emitter, level)]
        spilled = sum(record["spill_bytes"] + record["stack_bytes"] > 0 for record in mine)
        above = sum(record["registers"] > record["forecast"] for record in mine)
        what = f"{emitter}, ptxas {level}" + ("" if level == IN_USE else " (not what is used)")
        text = f"of {len(mine)} kernels drawn from the space, {what}: spill / use more registers than forecast"
        rows.append((text, f"{spilled} / {above}"))
    return rows


def _real_weights(found: list[Record]) -> list[Row]:
    seconds = [record["wall_seconds"] for record in found]
    errors = [record["max_relative_error"] for record in found]
    return [
        (
            f"seconds from file to verified cubin{_by(found[0])}, {len(found)} real pruned layers: median (least to "
            "most)",
            middle(seconds),
        ),
        ("of these, greatest error relative to \\|A\\|\\|B\\|", f"{max(errors):.1e}"),
        ("of these, kernels that spill registers", str(sum(record["spill_bytes"] > 0 for record in found))),
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
            f"machine code on one core, {record['m']:,} x {record['k']:,}, {record['nnz']:,} nonzeros, ptxas on the "
            f"prologue left out, best of {record['repeats']}: time / peak memory",
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
    what = f"multiply-adds that an SM starts a cycle (4 at most), {body} KiB of code, {threads:,} threads: without"
    return [(f"{what} barriers / with one every {step} KiB", f"{rates[0]:.1f} / {rates[step]:.1f}")]


def _ablation(found: list[Record]) -> list[Row]:
    shares = [kernel["loads and stores normal"] / kernel["whole"] for kernel in by_kernel(found).values()]
    return [
        (
            f"time of {len(shares)} kernels without cache hints, of that with them: least to most",
            f"{min(shares):.2f} to {max(shares):.2f}",
        )
    ]


def _families(found: list[Record]) -> list[Row]:
    """The fastest kernel with A in code or as data against cuBLAS of the same type."""
    gains: dict[str, list[float]] = {}
    for record in sorted(found, key=lambda record: (record["dtype"], record["n"], record["sparsity"])):
        dense, best = dense_micros(record), best_sparse(record)
        if dense is None or best is None:
            continue
        zeros, dtype = f"{record['sparsity']:.0%}", record["dtype"]
        if record["set"] == "shapes":
            is_searched = record["families"].get("unrolled", {}).get("by") == "search"
            by = " (chosen by time, `benchmarks.families_searched`)" if is_searched else ""
            gains.setdefault(f"41 shapes of networks, {dtype}, {zeros} zeros{by}", []).append(dense / best[1])
        elif record["set"] == "llm":
            name = f"layers of language models, {dtype}, N {record['n']}, A from memory, 50% to 90% zeros"
            gains.setdefault(name, []).append(dense / best[1])
    return [
        (f"{what}: fastest sparse kernel against cuBLAS, mean (least to most)", _mean_and_range(own))
        for what, own in sorted(gains.items(), key=lambda item: "language" in item[0])
    ]


def _mean_and_range(values: Sequence[float]) -> str:
    return f"{mean(values):.2f}x ({min(values):.2f} to {max(values):.2f})"


def by_kernel(found: list[Record]) -> dict[tuple[str, str], dict[str, float]]:
    """Microseconds of every variant of the ablation's kernels, by problem and tile size, with B from memory."""
    kernels: dict[tuple[str, str], dict[str, float]] = {}
    for record in found:
        name = f"{record['m']} x {record['k']}, n {record['n']}, {record['sparsity']:.0%}"
        kernel = kernels.setdefault((name, f"{record['rows']} x {record['cols']}"), {})
        kernel[record["variant"]] = record["cold_micros"]
    return kernels


#: What README's table takes from each file, and the command that writes the file.
def _choosing(found: list[Record]) -> list[Row]:
    large = [record["best_ms"] for record in found if record["side"] == 4096]
    what = "a family and its plan chosen on one core, nothing timed, 4,096 x 4,096 at 50 to 90%, N of 16 to 4,096, fp16"
    return [(f"{what}: best of 7, least to most", f"{min(large):.0f} to {max(large):.0f} ms")]


SOURCES: dict[str, Callable[[list[Record]], list[Row]]] = {
    "emission": _emission,
    "real_weights": _real_weights,
    "compile_time": _compile_time,
    "registers": _registers,
    "code_delivery": _code_delivery,
    "ablation": _ablation,
    "reordering": _reordering,
    "proxies": _proxies,
    "choosing": _choosing,
    "families": _families,
}


def results() -> str:
    """README's table."""
    lines = [
        (what, figure, f"`benchmarks.{name}`")
        for name, rows in SOURCES.items()
        if (found := records(name))
        for what, figure in rows(found)
    ]
    return table(("what", "measured", "by"), lines)


@cache
def _timed() -> dict[str, list[Timed]]:
    return timed_kernels(DATA / NAME)


def _first(kernels: list[Timed]) -> float:
    """Microseconds of the kernel that the estimate in use puts first."""
    return kernels[int(estimates(kernels, RATES).argmin())].micros


def on_a_gpu() -> str:
    """README's second table."""
    lines = [
        (name, str(len(kernels)), f"{_first(kernels):.1f}", f"{min(kernel.micros for kernel in kernels):.1f}")
        for name, kernels in _timed().items()
    ]
    return table(("A, B and zeros", "kernels timed", "put first by the estimate, us", "fastest, us"), lines, right=3)


def against_the_clock() -> str:
    """How the estimate orders the kernels that were timed, and how rates do that were fitted without the problem."""
    left_out = json.loads((DATA / "fit_estimate.json").read_text())["problems"]
    lines = []
    for name, kernels in _timed().items():
        found, unseen = quality(kernels, RATES), left_out[name]["left_out"]
        lines.append(
            (
                name,
                str(len(kernels)),
                f"{_first(kernels):.1f}",
                f"{min(kernel.micros for kernel in kernels):.1f}",
                *(f"{result[key]:{digits}}" for key, digits in QUALITIES for result in (found, unseen)),
            )
        )
    headings = ("problem", "timed", "first, us", "fastest, us", "rank", "unseen", "error", "unseen")
    return table(headings, lines, right=len(headings) - 1)


#: What a table shows of ``quality``, and how.
QUALITIES = (("rank_correlation", ".2f"), ("mean_error", ".0%"))


def optimization_levels() -> str:
    """The time of the same kernels by the level of ptxas that compiled them."""
    levels = ("-O1", "-O3")
    kernels: dict[str, dict[str, Record]] = {}
    for record in records("ptxas_levels"):
        if record["what"].startswith("choice"):
            sparsity = 1 - record["nnz"] / (record["m"] * record["k"])
            name = f"{record['m']} x {record['k']}, n {record['n']}, {sparsity:.0%}"
            tile = f"{record['rows']} x {record['cols']}, {record['prefetch']}"
            kernels.setdefault(f"{name} | {tile}", {})[record["ptxas"]] = record
    lines = [
        (
            name,
            *(f"{by_level[level]['micros']:.1f}" for level in levels),
            *(f"{by_level[level]['compile_seconds']:.2f}" for level in levels),
        )
        for name, by_level in kernels.items()
    ]
    headings = ("problem", "M1 x N1, loads in flight", *(f"{level}, us" for level in levels))
    return table((*headings, *(f"{level}, s to compile" for level in levels)), lines, right=4)
