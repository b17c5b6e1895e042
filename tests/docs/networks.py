"""The generated parts of docs/networks.md: what benchmarks/results/networks.jsonl and minilm.jsonl hold."""

import textwrap
from collections.abc import Sequence

from benchmarks.networks_report import Record, Speedup, find, measured_of, speedup
from tests.docs.pages import DOCS
from tests.docs.results import RESULTS, records, table

PAGE = DOCS / "networks.md"
PLOT = RESULTS / "networks.png"

NOTHING = "No network has been measured yet.\n"

#: A decoder's layer, by tokens at a time, which has a table of its own.
DECODER = "Llama-2-7B layer 70%"

PRECISIONS = ("float32", "TF32", "float16")

#: Figure 12: speedups over TensorRT, SparTA and EC-SpMM.
FIGURE_12 = {"BERT-base 91%": "1.84, 1.34, 1.16", "ResNet-50 90%": "1.88, about 1, about 1"}

#: Variants whose latencies stand in the table, by its titles.
VARIANTS = {
    "dense": "dense, eager",
    "dense compiled": "dense, compiled",
    "cuSPARSE": "cusparse, eager",
    "lospmm": "lospmm, eager",
    "lospmm compiled": "lospmm, compiled",
}


#: Those of the decoder's layer.
STEPS = {"dense": "dense, eager, float16", "fast": "lospmm, eager, float16", "low": "lospmm, eager, float16, low"}


def times() -> str:
    """Latency of every network by precision, and its speedup over the dense one called the same way."""
    lines = [line for line in records("networks") if not line["case"].startswith(DECODER)]
    if not measured_of(lines):
        return NOTHING
    found = []
    for case in dict.fromkeys(line["case"] for line in lines):
        for precision in PRECISIONS:
            own = [find(lines, case, _in(variant, precision)) for variant in VARIANTS.values()]
            if any(own):
                found.append((f"{case}, {precision}", *map(_latency, own)))
    error = max((gain.error for gain in map(speedup, lines) if gain is not None), default=0.0)
    plot = f"\n![Latency of whole networks](../benchmarks/results/{PLOT.name})\n" if PLOT.exists() else ""
    where = textwrap.fill(f"{_where(lines)} Standard errors of speedups: at most {error:.3f}.", 120)
    return f"{where}\n\n{table(('network, zeros', *VARIANTS), found, right=5)}{plot}"


def steps() -> str:
    """Latency of the decoder's layer by tokens, as in ``times``, and the memory held."""
    lines = [line for line in records("networks") if line["case"] == DECODER]
    found = [
        (f"{tokens}", *(_step(find(lines, DECODER, variant, tokens)) for variant in STEPS.values()))
        for tokens in sorted({line["batch"] for line in lines})
    ]
    held = (find(measured_of(lines), DECODER, variant) for variant in STEPS.values())
    sizes = ("-" if one is None else f"{(one['weight_bytes'] + one['kernel_bytes']) / 2**20:.0f}" for one in held)
    found.append(("MiB held", *sizes))
    called = (
        speedup(find(lines, DECODER, STEPS["low"], tokens)) for tokens in sorted({line["batch"] for line in lines})
    )
    times = ", ".join(f"{gain.times:.2f}x" for gain in called if gain is not None)
    eager = f"One layer with low, called from Python: {times}."
    return (
        f"{_where(lines)}\n\n{table(('tokens', *STEPS), found, right=3)}\n{textwrap.fill(_several(), 120)}\n\n{eager}\n"
    )


def _several() -> str:
    """What tuning, saving and loading several of the decoder's layers takes, and their speedups."""
    lines = [line for line in records("networks") if line["case"].startswith(f"{DECODER}, ")]
    own = [line for line in lines if "tuning_seconds" in line]
    gains = (speedup(find(lines, line["case"], line["variant"], line["batch"]), "graph") for line in own)
    times = ", ".join(f"{gain.times:.2f}x" for gain in gains if gain is not None)
    one, count = own[0], own[0]["case"].removeprefix(f"{DECODER}, ").partition(" ")[0]
    saved, kept = (bytes / 2**20 for bytes in (one["saved_bytes"], one["weight_bytes"] + one["kernel_bytes"]))
    seconds = {what: f"{one[f'{what}_seconds']:.1f} s" for what in ("tuning", "save", "load")}
    return (
        f"{count} such layers with low ({one['loaded']} products, commit `{one['commit']}`) are tuned in "
        f"{seconds['tuning']} on {one['machine']['cores']} cores, saved in {seconds['save']} ({saved:.0f} MiB) and "
        f"loaded in {seconds['load']}. They hold {kept:.0f} MiB; speedups by tokens, as above: {times}."
    )


def figure_12() -> tuple[str, ...]:
    """The paper's speedups of whole networks, and ours, which are over another baseline."""
    lines, ours, measured = records("networks"), [], PRECISIONS
    for case in FIGURE_12:
        gains = {one: speedup(find(lines, case, _in("lospmm, compiled", one))) for one in PRECISIONS}
        measured = tuple(one for one in measured if gains[one] is not None)
        ours.append(", ".join(f"{gain.times:.2f}" for gain in gains.values() if gain is not None))
    what = f"over TensorRT, SparTA, EC-SpMM (here compiled PyTorch: {', '.join(measured)}), {'; '.join(FIGURE_12)}"
    return ("12", what, "; ".join(FIGURE_12.values()), "; ".join(ours))


def _in(variant: str, precision: str) -> str:
    return variant if precision == "float32" else f"{variant}, {precision}"


def _latency(line: Record | None) -> str:
    """Milliseconds as called, and as a CUDA graph; the speedup as called."""
    if line is None or "failure" in line:
        return "-" if line is None else "failed"
    graph = line["graph_micros"]
    told = f"{line['micros'] / 1e3:.2f}" + ("" if graph is None else f" ({graph / 1e3:.2f})")
    return told + _times(speedup(line))


def _step(line: Record | None) -> str:
    """Milliseconds and speedup as a CUDA graph: a step is too short to be called from Python."""
    if line is None or line.get("graph_micros") is None:
        return "-" if line is None else "failed"
    return f"{line['graph_micros'] / 1e3:.3f}" + _times(speedup(line, "graph"))


def _times(gain: Speedup | None) -> str:
    return "" if gain is None else f", {gain.times:.2f}x"


def _where(lines: Sequence[Record]) -> str:
    newest = measured_of(lines)[-1]
    versions = newest["versions"]
    gpus: dict[str, list[str]] = {}
    for line in lines:
        precision = line["variant"].split(", ")[2:3]
        gpus.setdefault(line["machine"]["title"], []).append("float16" if precision == ["float16"] else "float32, TF32")
    told = (f"{title} ({', '.join(dict.fromkeys(own))})" if len(gpus) > 1 else title for title, own in gpus.items())
    commits = ", ".join(f"`{commit}`" for commit in dict.fromkeys(line["commit"] for line in lines))
    batch = "" if newest["case"] == DECODER else f", batch {newest['batch']}"
    return (
        f"{', '.join(told)}, driver {versions.get('driver', 'unknown')}, PyTorch {versions['torch']}{batch}, "
        f"commits {commits}."
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


REGIONS = {"times": times, "steps": steps, "real": real}
