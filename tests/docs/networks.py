"""The generated parts of docs/networks.md: what benchmarks/results/networks.jsonl and minilm.jsonl hold."""

import statistics
from collections.abc import Sequence

from benchmarks.networks_report import NOISE, PROMISES, Record, Speedup, measured_of, speedup
from tests.docs.pages import DOCS
from tests.docs.results import RESULTS, records, table

PAGE = DOCS / "networks.md"
PLOT = RESULTS / "networks.png"

#: Of a median, above which it is told beside it.
MUCH_NOISE = 0.05

NOTHING = "No network has been measured yet.\n"


def _cases(lines: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(line["case"] for line in lines))


def times() -> str:
    """Every variant of every network; as a graph, how many times as fast as the compiled dense one with TF32 alike."""
    lines = records("networks")
    if not measured_of(lines):
        return NOTHING
    found = []
    for line in lines:
        if "failure" in line:
            found.append((line["case"], line["variant"], "failed", *[""] * 6))
            continue
        peak = line["peak_bytes"]
        found.append(
            (
                line["case"],
                line["variant"] + ("" if line["commit"] == _commit(lines) else " *"),
                f"{line['micros'] / 1e3:.2f}",
                f"{line['noise']:.1%}",
                _graph(line),
                _ratio(lines, line),
                "-" if peak is None else f"{peak / 2**20:,.0f}",
                f"{line['weight_bytes'] / 2**20:,.0f}",
                f"{line['error']:.1e}",
            )
        )
    heads = ("network, zeros", "variant", "ms", "noise", "as a graph, ms", "x dense compiled", "MiB at most")
    plot = f"\n![Latency of whole networks](../benchmarks/results/{PLOT.name})\n" if PLOT.exists() else ""
    return f"{_where(lines)}\n\n{table((*heads, 'MiB of weights', 'error'), found, right=7)}{plot}"


def _graph(line: Record) -> str:
    """With its noise, where that is more than little."""
    if line["graph_micros"] is None:
        return "-"
    noise = line["graph_noise"]
    return f"{line['graph_micros'] / 1e3:.2f}" + (f" (noise {noise:.0%})" if noise > MUCH_NOISE else "")


def _ratio(lines: Sequence[Record], line: Record) -> str:
    """To the compiled dense network, both as graphs: what disturbs calls from Python does not disturb these."""
    way = "dense, compiled, TF32" if line["variant"].endswith("TF32") else "dense, compiled"
    dense = [one["graph_micros"] for one in measured_of(lines) if (one["case"], one["variant"]) == (line["case"], way)]
    return f"{dense[0] / line['graph_micros']:.2f}" if dense and dense[0] and line["graph_micros"] else "-"


def _where(lines: Sequence[Record]) -> str:
    newest, commit = measured_of(lines)[-1], _commit(lines)
    others = dict.fromkeys(f"`{line['commit']}`" for line in lines if line["commit"] != commit)
    versions = newest["versions"]
    earlier = f" Lines with a * are of other runs, {', '.join(others)}." if others else ""
    return (
        f"{newest['machine']['title']}, driver {versions.get('driver', 'unknown')}, PyTorch {versions['torch']}, "
        f"batch {newest['batch']}, commit `{commit}`.{earlier}"
    )


def _commit(lines: Sequence[Record]) -> str:
    """That of most lines."""
    commits = [line["commit"] for line in lines]
    return max(dict.fromkeys(commits), key=commits.count)


def promised() -> str:
    """What is aimed at, and whether it is reached; below 1/1.02 a network is slower than dense."""
    lines = records("networks")
    if not measured_of(lines):
        return NOTHING
    found = []
    for promise in PROMISES:
        one = speedup(lines, promise.case, compiled=True, tf32=promise.tf32)
        found.append(_judged(promise.case, one, promise.times, "compiled", tf32=promise.tf32))
    for case in _cases(lines):
        for compiled in (False, True):
            for tf32 in (False, True):
                one = speedup(lines, case, compiled=compiled, tf32=tf32)
                how = "compiled" if compiled else "eager"
                found.append(_judged(case, one, 1 / (1 + NOISE), how, tf32=tf32))
    return table(("network, zeros", "how", "TF32", "x dense", "error", "aim", ""), found)


def _judged(case: str, found: Speedup | None, aim: float, how: str, *, tf32: bool) -> tuple[str, ...]:
    switch = "on" if tf32 else "off"
    if found is None:
        return case, how, switch, "-", "-", f"{aim:.2f}", "not measured"
    said = "reached" if found.times >= aim else "within the error" if found.reaches(aim) else "**missed**"
    return case, how, switch, f"{found.times:.3f}", f"{found.error:.3f}", f"{aim:.2f}", said


def real() -> str:
    """all-MiniLM-L6-v2."""
    found = [
        (
            f"{line['sparsity']:.0%}",
            "the CPU" if line["emulated"] else line["machine"]["title"],
            f"{line['sparse_layers']} of {line['layers']}",
            f"{statistics.mean(abs(a - b) for a, b in zip(line['before'], line['pruned'], strict=True)):.3f}",
            f"{line['greatest_difference']:.1e}",
            f"{line['error']:.1e}",
            _milliseconds(line["dense_micros"]),
            _milliseconds(line["micros"]),
        )
        for line in records("minilm")
    ]
    heads = ("zeros", "on", "layers on kernels", "pruning changes similarities by, mean", "kernels by, at most")
    return table((*heads, "features", "dense, ms", "with kernels, ms"), found, right=5) if found else NOTHING


def _milliseconds(micros: dict[str, float] | None) -> str:
    return "-" if micros is None else f"{micros['called'] / 1e3:.2f} ({micros['graph'] / 1e3:.2f} as a graph)"


REGIONS = {"times": times, "promised": promised, "real": real}
