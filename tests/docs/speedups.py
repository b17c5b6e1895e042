"""README's table of speedups, and the tables of docs/results.md that it condenses, from benchmarks/results."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from benchmarks.decode import SHAPES, by_gpu, gains, groups, least_bytes
from benchmarks.families_table import best_sparse, coded_micros, dense_micros, mean, pruned_micros
from benchmarks.kernels_table import mean_ratio, measured_of, timed
from benchmarks.networks_report import find, speedup
from lospmm.gpu.libraries import DENSE_OF
from tests.docs import kernels, results
from tests.docs.results import Record, records, table

TYPES = {"float32": "float32", "tf32": "TF32", "float16": "float16", "bfloat16": "bfloat16"}

#: Values of N (tokens x batch) in README's table; and the least of those that are prefill.
DECODE, PREFILL = (1, 16, 64), 4096
LEAST_PREFILL = 512

#: Zeros of the layers of language models there.
SPARSITIES = (0.5, 0.7, 0.8)

#: Titles of the baselines of ``benchmarks.kernels`` in README.
TITLES = {"cusparse": "cuSPARSE", "cublas_fp32": "cuBLAS", "cublas_tf32": "cuBLAS TF32"}


def families(kind: str) -> list[Record]:
    """Lines of ``benchmarks.families`` of one set that have a sparse kernel and a dense time."""
    found = [record for record in records("families") if record["set"] == kind]
    return [one for one in found if dense_micros(one) is not None and best_sparse(one) is not None]


def gain(record: Record) -> float:
    """Speedup of the fastest sparse kernel over cuBLAS of the same type."""
    dense, best = dense_micros(record), best_sparse(record)
    assert dense is not None and best is not None
    return dense / best[1]


def times(values: Sequence[float]) -> str:
    return f"{mean(values):.2f}x"


def with_range(values: Sequence[float]) -> str:
    return f"{times(values)} ({min(values):.2f} to {max(values):.2f})"


def zeros_of(record: Record) -> float:
    """Sparsity to the percent: a drawn matrix misses its target by less."""
    return round(float(record["sparsity"]), 2)


def sparsities(found: Iterable[Record]) -> list[float]:
    return sorted(set(map(zeros_of, found)))


def is_searched(record: Record) -> bool:
    """Whether the unrolled kernel was found by a timed search; otherwise a model chose it."""
    return bool(record["families"].get("unrolled", {}).get("by") == "search")


def by_type() -> str:
    """The 41 shapes by type and sparsity."""
    found = families("shapes")
    lines = []
    for dtype, title in TYPES.items():
        cells = []
        for zeros in sparsities(found):
            own = [one for one in found if (one["dtype"], zeros_of(one)) == (dtype, zeros)]
            cells.append(with_range([gain(one) for one in own]) + (" *" if any(map(is_searched, own)) else ""))
        lines.append((title, *cells))
    heads = ("type", *(f"{zeros:.0%} zeros" for zeros in sparsities(found)))
    return table(heads, lines, right=len(heads) - 1)


def decode_of(dtype: str = "float16") -> list[Record]:
    """Lines of ``benchmarks.decode`` of one type."""
    return [one for one in records("decode") if one["dtype"] == dtype]


def decode() -> str:
    """Layers of language models by N, GPU and sparsity: speedup over cuBLAS, share of the roof, and over cuSPARSELt."""
    found = _decode()
    lines = []
    for n in sorted({one["n"] for one in found}):
        for title, of_gpu in by_gpu([one for one in found if one["n"] == n]).items():
            own = groups(of_gpu, n)
            cells = (
                f"{times(gains(some))}, {mean([one['of_roof'] for one in some]):.2f}"
                + (f", {times(pruned)}" if (pruned := gains(some, pruned_micros)) else "")
                + ("*" if len(some) < len(SHAPES) else "")
                if (some := own.get(zeros))
                else "-"
                for zeros in sparsities(found)
            )
            names = dict.fromkeys(one["family"] for some in own.values() for one in some)
            lines.append((f"{n:,}", *cells, ", ".join(f"`{name}`" for name in names), title.partition(" ")[0]))
    heads = ("N", *(f"{zeros:.0%} zeros" for zeros in sparsities(found)), "fastest families", "GPU")
    return f"{table(heads, lines)}\n{_other_type()}"


def _other_type() -> str:
    """How long the same layers take in bfloat16 by kernels of the same commit, and their speedup."""
    half = {(*_cell(one), one["commit"]): one["micros"] for one in decode_of()}
    found = [one for one in decode_of("bfloat16") if (*_cell(one), one["commit"]) in half]
    ratios = [one["micros"] / half[*_cell(one), one["commit"]] for one in found]
    columns = ", ".join(f"{n:,}" for n in sorted({one["n"] for one in found}))
    compared = f"{mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) of the time of float16"
    return f"bfloat16, N {columns}: {compared}, {times(gains(found))} over cuBLAS.\n"


def _cell(record: Record) -> tuple[object, ...]:
    return record["machine"]["device"], record["m"], record["k"], record["n"], zeros_of(record)


def decode_bound() -> str:
    """What bounds layers of language models on an H100: a constant, and the kernel's own bytes at a bandwidth.

    Least squares of the relative errors over the shapes of an N and a sparsity.
    """
    found = [one for one in decode_of() if one["machine"]["device"] == "h100"]
    lines, errors = [], []
    for n in sorted({one["n"] for one in found}):
        cells = []
        for own in groups(found, n).values():
            bytes_read = np.array([one["bytes"] + 2 * n * (one["m"] + one["k"]) for one in own])
            micros = np.array([one["micros"] for one in own])
            terms = np.column_stack((np.ones(len(own)), bytes_read)) / micros[:, np.newaxis]
            constant, per_byte = np.linalg.lstsq(terms, np.ones(len(own)))[0]
            errors.append(float(abs(terms @ (constant, per_byte) - 1).max()))
            excess = mean([read / least_bytes(one) for one, read in zip(own, bytes_read, strict=True)])
            cells.append(f"{constant:.1f}, {1e-6 / per_byte:.2f}, {excess:.2f}" if len(own) > 3 else "-")
        lines.append((f"{n:,}", *cells))
    heads = ("N", *(f"{zeros:.0%} zeros" for zeros in sparsities(found)))
    return f"{table(heads, lines)}\nLargest error of a time: {max(errors):.0%}.\n"


def one_copy() -> str:
    """Layers of language models with one copy of A for every N: speedup over cuBLAS, and the bytes beside dense."""
    found = records("decode_low")
    lines, shares = [], []
    for n in sorted({one["n"] for one in found}):
        own = groups(found, n)
        if all(len(some) == len(SHAPES) for some in own.values()):
            lines.append((f"{n:,}", *(times(gains(some)) for some in own.values())))
            shares = [mean([one["bytes"] / (2 * one["m"] * one["k"]) for one in some]) for some in own.values()]
    lines.append(("size of A, dense: 1", *(f"{share:.2f}" for share in shares)))
    return table(("N", *(f"{zeros:.0%} zeros" for zeros in sparsities(found))), lines) + _where(found)


def eight_bits() -> str:
    """Layers of language models with 8-bit values, by N: speedups over cuBLAS and over dense 8 bits."""
    found, others = records("decode_int8"), records("decode_fp8_e4m3")
    lines = [(f"{n}", *map(_over, groups(found, n).values())) for n in sorted({one["n"] for one in found})]
    heads = ("N", *(f"{zeros:.0%} zeros" for zeros in sparsities(found)))
    fp8 = f"`fp8_e4m3`, N 1: {with_range(gains(others, coded_micros))} over dense fp8.\n"
    return f"{table(heads, lines)}\n{fp8}{_where([*found, *others])}"


def _over(found: Sequence[Record]) -> str:
    """The speedups over cuBLAS of the type of B, and over cuBLASLt with a B of 8 bits."""
    return f"{times(gains(found))}, {times(gains(found, coded_micros))}"


def real_16() -> str:
    """Real layers in 16 bits, by N and sparsity: speedup of the kernel that a search found over cuBLAS."""
    found = measured_of(records("real_16/kernels"))
    lines = []
    for dtype in TYPES:
        mine = [one for one in found if one["options"]["dtype"] == dtype]
        for n in sorted({one["n"] for one in mine}):
            cells = (
                [one["ratios"][DENSE_OF[dtype]] for one in mine if (one["n"], zeros_of(one)) == (n, zeros)]
                for zeros in sparsities(found)
            )
            lines.append((f"{dtype}, {n}", *(with_range(some) if some else "-" for some in cells)))
    heads = ("type, N", *(f"{zeros:.0%} zeros" for zeros in sparsities(found)))
    return table(heads, lines, right=len(heads) - 1) + _where(found)


def batches() -> str:
    """Whole networks by ``tune-model``: layers, kernels, seconds, and the layers' times."""
    found = records("batches")
    lines = [
        (
            one["network"],
            *(str(one[name]) for name in ("layers", "kernels", "skipped")),
            f"{one['seconds']:.0f} s",
            *(f"{one[name] / 1e3:.2f} ms" for name in ("dense_micros", "chosen_micros")),
        )
        for one in found
    ]
    heads = ("network", "layers", "distinct", "skipped", "tuning", "cuBLAS", "chosen")
    return table(heads, lines, right=6) + _where(found)


def _where(found: Sequence[Record]) -> str:
    """The GPUs and drivers of some lines, each with its commits."""
    commits: dict[str, set[str]] = {}
    for one in found:
        place = f"{one['machine']['title']}, driver {one['versions']['driver']}"
        commits.setdefault(place, set()).add(one["commit"])
    told = (f"{place}, {', '.join(sorted(own))}" for place, own in sorted(commits.items()))
    return f"\n{'; '.join(told)}.\n"


def prefill() -> str:
    """Layers of language models by N from LEAST_PREFILL on and sparsity."""
    found = _prefill()
    lines = []
    for n in sorted({one["n"] for one in found}):
        cells = (
            with_range(gains(some)) + ("*" if len(some) < len(SHAPES) else "") for some in groups(found, n).values()
        )
        lines.append((f"{n:,}", *cells))
    return table(("N", *(f"{zeros:.0%} zeros" for zeros in sparsities(found))), lines)


def _decode() -> list[Record]:
    return [one for one in decode_of() if one["n"] < LEAST_PREFILL]


def _prefill() -> list[Record]:
    return [one for one in decode_of() if one["n"] >= LEAST_PREFILL]


def conditions() -> str:
    """The GPU, driver and commits of every set of figures in README."""
    sets = {
        "seven layers": kernels.lines_of("seven"),
        "41 layers": families("shapes"),
        "LLM decode": _decode(),
        "LLM prefill": _prefill(),
        "whole networks": measured_of(records("networks")),
    }
    every = [one for own in sets.values() for one in own]
    places = dict.fromkeys(f"{one['machine']['title']}, driver {one['versions']['driver']}" for one in every)
    lines = []
    for name, own in sets.items():
        commits = ", ".join(f"`{commit}`" for commit in sorted({one["commit"] for one in own}))
        lines.append((name, commits))
    return f"{'; '.join(places)}:\n\n{table(('figures', 'commits'), lines)}"


def short() -> str:
    """README's table, with the machine and versions below it."""
    lines = [*_seven(), *_shapes(), *_language_models(), *_networks()]
    newest = [one for one in measured_of(records("networks")) if "float16" not in one["variant"]][-1]
    torch = newest["versions"]["torch"].partition("+")[0]
    where = f"{newest['machine']['title']}, driver {newest['versions']['driver']}, PyTorch {torch}"
    caption = f"{where}; [commits and ranges](docs/results.md#conditions). Geometric means."
    return f"{table(('workload', 'baseline', 'sparsity', 'speedup'), lines, right=2)}\n{caption}\n"


Line = tuple[str, str, str, str]


def _seven() -> list[Line]:
    found = measured_of(kernels.lines_of("seven"))
    zeros = sparsities(found)
    span = f"{zeros[0]:.0%} to {zeros[-1]:.0%}"
    means = {TITLES.get(one.ratio, one.title): mean_ratio(found, one.ratio) for one in timed(found)}
    figures = (f"{value:.2f}x" for value in means.values() if value is not None)
    return [(f"{len(found)} BERT/ResNet-50 layers, float32", _several(means), span, _several(figures))]


def _shapes() -> list[Line]:
    found = families("shapes")
    zeros = sparsities(found)
    lines = []
    for dtype, title in TYPES.items():
        own = [[gain(one) for one in found if (one["dtype"], zeros_of(one)) == (dtype, share)] for share in zeros]
        what = f"{len(own[0])} CNN/BERT layers, {title}"
        lines.append((what, "cuBLAS", _several(f"{share:.0%}" for share in zeros), _several(map(times, own))))
    return lines


def _language_models() -> list[Line]:
    lines = []
    for what, found, columns in (("decode", decode_of(), DECODE), ("prefill", _prefill(), (PREFILL,))):
        for n in columns:
            gpu, of_gpu = next(iter(by_gpu([one for one in found if one["n"] == n]).items()))
            own = groups(of_gpu, n)
            figures = _several(times([gain(one) for one in own[zeros]]) for zeros in SPARSITIES)
            title = f"LLM {what}, float16, N={n:,}" + (", H100" if gpu.startswith("H100") else "")
            lines.append((title, "cuBLAS", _several(f"{zeros:.0%}" for zeros in SPARSITIES), figures))
    return lines


def _networks() -> list[Line]:
    found = records("networks")
    lines = []
    for case in dict.fromkeys(one["case"] for one in found):
        network, _, zeros = case.rpartition(" ")
        own = [speedup(find(found, case, f"lospmm, compiled{how}")) for how in ("", ", TF32")]
        if figures := _several(f"{one.times:.2f}x" for one in own if one is not None):
            lines.append((f"{network}, float32, TF32", "`torch.compile`", zeros, figures))
    return lines


def _several(cells: Iterable[str]) -> str:
    return ", ".join(cells)


README = {"speedups": short}
REGIONS: dict[str, Callable[[], str]] = {
    "kernels": kernels.short,
    "speedups by type": by_type,
    "decode": decode,
    "decode bound": decode_bound,
    "one copy": one_copy,
    "8 bits": eight_bits,
    "prefill": prefill,
    "batches": batches,
    "real 16": real_16,
    "conditions": conditions,
    "tuning cost": results.tuning_cost,
}
