"""The generated parts of docs/networks.md: what benchmarks/results/networks.jsonl and minilm.jsonl hold."""

import textwrap
from collections.abc import Sequence

from benchmarks.networks_report import Record, measured_of, speedup
from tests.docs.pages import DOCS
from tests.docs.results import RESULTS, records, table

PAGE = DOCS / "networks.md"
PLOT = RESULTS / "networks.png"

NOTHING = "No network has been measured yet.\n"

#: Variants whose latencies stand in the table, by its titles.
VARIANTS = {
    "dense": "dense, eager",
    "dense compiled": "dense, compiled",
    "cuSPARSE": "cusparse, eager",
    "lospmm": "lospmm, eager",
    "lospmm compiled": "lospmm, compiled",
}


def times() -> str:
    """Latency of every network with TF32 off and on, and its speedup over the dense one called the same way."""
    lines = records("networks")
    if not measured_of(lines):
        return NOTHING
    found, errors = [], [0.0]
    for case in dict.fromkeys(line["case"] for line in lines):
        for tf32 in (False, True):
            own = [_line(lines, case, variant, tf32=tf32) for variant in VARIANTS.values()]
            gains = [speedup(lines, case, compiled=compiled, tf32=tf32) for compiled in (False, True)]
            errors += [gain.error for gain in gains if gain is not None]
            cells = ("-" if gain is None else f"{gain.times:.3f}" for gain in gains)
            found.append((case, "on" if tf32 else "off", *map(_latency, own), *cells))
    heads = ("network, zeros", "TF32", *VARIANTS, "speedup", "speedup compiled")
    plot = f"\n![Latency of whole networks](../benchmarks/results/{PLOT.name})\n" if PLOT.exists() else ""
    where = textwrap.fill(f"{_where(lines)} Standard errors of speedups: at most {max(errors):.3f}.", 120)
    return f"{where}\n\n{table(heads, found, right=7)}{plot}"


def _line(lines: Sequence[Record], case: str, variant: str, *, tf32: bool) -> Record | None:
    name = f"{variant}, TF32" if tf32 else variant
    return next((line for line in lines if (line["case"], line["variant"]) == (case, name)), None)


def _latency(line: Record | None) -> str:
    """Milliseconds as called, and as a CUDA graph."""
    if line is None:
        return "-"
    if "failure" in line:
        return "failed"
    graph = line["graph_micros"]
    return f"{line['micros'] / 1e3:.2f}" + ("" if graph is None else f" ({graph / 1e3:.2f})")


def _where(lines: Sequence[Record]) -> str:
    newest = measured_of(lines)[-1]
    versions = newest["versions"]
    commits = ", ".join(f"`{commit}`" for commit in dict.fromkeys(line["commit"] for line in lines))
    return (
        f"{newest['machine']['title']}, driver {versions.get('driver', 'unknown')}, PyTorch {versions['torch']}, "
        f"batch {newest['batch']}, commits {commits}."
    )


def real() -> str:
    """all-MiniLM-L6-v2."""
    told = (textwrap.fill(f"- {_model(line)}.", 120, subsequent_indent="  ") for line in records("minilm"))
    return "".join(f"{one}\n" for one in told) or NOTHING


def _model(line: Record) -> str:
    where = "the CPU" if line["emulated"] else line["machine"]["title"]
    text = (
        f"{line['sparsity']:.0%} zeros, {where}: {line['sparse_layers']} of {line['layers']} layers on kernels, "
        f"similarities differ by at most {line['greatest_difference']:.1e}"
    )
    if line["micros"] is None:
        return text
    ours, dense = (_milliseconds(line[name]) for name in ("micros", "dense_micros"))
    return f"{text}; {ours} ms, dense {dense}"


def _milliseconds(micros: dict[str, float]) -> str:
    return f"{micros['called'] / 1e3:.2f} ({micros['graph'] / 1e3:.2f})"


REGIONS = {"times": times, "real": real}
