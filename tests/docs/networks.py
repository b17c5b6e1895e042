"""The generated parts of docs/networks.md: what benchmarks/results/networks.jsonl and minilm.jsonl hold."""

import statistics
from collections.abc import Sequence

from benchmarks.networks_report import NOISE, PROMISES, Record, measured_of, speedup
from tests.docs.pages import DOCS
from tests.docs.results import RESULTS, records, table

PAGE = DOCS / "networks.md"
PLOT = RESULTS / "networks.png"

NOTHING = "No network has been measured yet.\n"


def _cases(lines: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(line["case"] for line in lines))


def times() -> str:
    """Every variant of every network; how many times as fast as the compiled dense one with TF32 alike."""
    lines = records("networks")
    if not measured_of(lines):
        return NOTHING
    found = []
    for line in lines:
        if "failure" in line:
            found.append((line["case"], line["variant"], "failed", *[""] * 6))
            continue
        graph, peak = line["graph_micros"], line["peak_bytes"]
        found.append(
            (
                line["case"],
                line["variant"],
                f"{line['micros'] / 1e3:.2f}",
                f"{line['noise']:.1%}",
                "-" if graph is None else f"{graph / 1e3:.2f}",
                _ratio(lines, line),
                "-" if peak is None else f"{peak / 2**20:,.0f}",
                f"{line['weight_bytes'] / 2**20:,.0f}",
                f"{line['error']:.1e}",
            )
        )
    heads = ("network, zeros", "variant", "ms", "noise", "as a graph, ms", "x dense, compiled", "MiB at most")
    plot = f"\n![Networks from input to output](../benchmarks/results/{PLOT.name})\n" if PLOT.exists() else ""
    return f"{_where(lines)}\n\n{table((*heads, 'MiB of weights', 'error'), found, right=7)}{plot}"


def _ratio(lines: Sequence[Record], line: Record) -> str:
    way = "dense, compiled, TF32" if line["variant"].endswith("TF32") else "dense, compiled"
    dense = [one["micros"] for one in measured_of(lines) if (one["case"], one["variant"]) == (line["case"], way)]
    return f"{dense[0] / line['micros']:.2f}" if dense else "-"


def _where(lines: Sequence[Record]) -> str:
    newest = measured_of(lines)[-1]
    commits = ", ".join(dict.fromkeys(f"`{line['commit']}`" for line in lines))
    versions = newest["versions"]
    return (
        f"{newest['machine']['title']}, driver {versions.get('driver', 'unknown')}, PyTorch {versions['torch']}, "
        f"batch {newest['batch']}, commit {commits}."
    )


def promised() -> str:
    """What is aimed at, and whether it is reached; below 1/1.02 a network is slower than dense."""
    lines = records("networks")
    if not measured_of(lines):
        return NOTHING
    found = []
    for promise in PROMISES:
        times = speedup(lines, promise.case, compiled=True, tf32=promise.tf32)
        found.append(_judged(promise.case, times, promise.times, "compiled", tf32=promise.tf32))
    for case in _cases(lines):
        for compiled in (False, True):
            for tf32 in (False, True):
                times = speedup(lines, case, compiled=compiled, tf32=tf32)
                found.append(_judged(case, times, 1 / (1 + NOISE), "compiled" if compiled else "eager", tf32=tf32))
    return table(("network, zeros", "how", "TF32", "x dense", "aim", ""), found)


def _judged(case: str, times: float | None, aim: float, how: str, *, tf32: bool) -> tuple[str, ...]:
    said = "not measured" if times is None else "reached" if times >= aim else "**missed**"
    return case, how, "on" if tf32 else "off", "-" if times is None else f"{times:.2f}", f"{aim:.2f}", said


def layers() -> str:
    """The pruned layers by their shapes, as they run compiled or not: times of whole layers, each summed up."""
    found = []
    for line in measured_of(records("networks")):
        if not line["variant"].startswith("lospmm, compiled"):
            continue
        shapes: dict[tuple[int, ...], list[Record]] = {}
        for layer in line["layers"]:
            if layer["pattern"] is not None and layer["dense_micros"] is not None:
                shapes.setdefault((*layer["shape"], layer["n"] or 0), []).append(layer)
        for shape, same in shapes.items():
            chosen = [layer for layer in same if layer["advice"] == "sparse"]
            found.append(
                (
                    line["case"],
                    "on" if line["variant"].endswith("TF32") else "off",
                    f"{shape[0]:,} x {shape[1]:,}",
                    f"{len(chosen)} of {len(same)}",
                    f"{statistics.mean(layer['sparsity'] for layer in same):.1%}",
                    f"{statistics.mean(layer['dense_micros'] for layer in same):.1f}",
                    _mean([layer["sparse_micros"] for layer in same if layer["sparse_micros"] is not None]),
                    _greatest([layer["error"] for layer in chosen if layer.get("error") is not None]),
                )
            )
    heads = ("network, zeros", "TF32", "weight", "on kernels", "zeros", "dense, us", "with kernel, us", "error")
    return table(heads, found, right=5) if found else NOTHING


def _mean(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.1f}" if values else "-"


def _greatest(errors: Sequence[float]) -> str:
    return f"{max(errors):.1e}" if errors else "-"


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


REGIONS = {"times": times, "promised": promised, "layers": layers, "real": real}
