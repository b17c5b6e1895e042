"""Section 5: proxies beside their kernels as machine code, PTX and CUDA C++ (``benchmarks.proxies_on_gpu``)."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

from benchmarks.paper.rows import Record, Row

#: As they are told.
LANGUAGES = {"sass": "machine code", "ptx": "PTX", "cuda": "CUDA C++"}


def groups(records: Sequence[Record]) -> Iterator[tuple[str, str, list[Record]]]:
    """Problem, language, and those that ran of each."""
    keys = dict.fromkeys((one["m"], one["k"], one["n"], one["nnz"], one["emitter"]) for one in records)
    for m, k, n, nnz, emitter in keys:
        mine = [
            one
            for one in records
            if (one["m"], one["k"], one["n"], one["nnz"], one["emitter"]) == (m, k, n, nnz, emitter)
            and one["kernel_micros"]
            and one["proxy_micros"]
        ]
        if len(mine) > 2:
            yield f"{m} x {k}, n {n}, {1 - nnz / (m * k):.0%}", emitter, mine


def column(records: Sequence[Record], name: str) -> NDArray[np.float64]:
    return np.array([one[name] for one in records], dtype=np.float64)


def order(mine: Sequence[Record], name: str) -> str:
    """The rank correlation of proxies with kernels, and the loss of the kernel whose proxy is fastest."""
    kernel, proxy = column(mine, "kernel_micros"), column(mine, f"{name}_micros")
    loss = kernel[proxy.argmin()] / kernel.min() - 1
    return f"{spearmanr(kernel, proxy).statistic:.2f} ({loss:.1%})"


def rows(records: Sequence[Record]) -> list[Row]:
    told = []
    for problem, emitter, mine in groups(records):
        orders = ", ".join(order(mine, name) for name in ("proxy", "plain"))
        what = f"{problem}, {LANGUAGES[emitter]}, {len(mine)} candidates: rank correlation (loss)"
        told.append(Row(f"{what}, with Equation 6, without", "-", orders))
    for emitter, language in LANGUAGES.items():
        for problem, _, mine in [group for group in groups(records) if group[1] == emitter]:
            kernel, proxy = (column(mine, f"{name}_seconds").mean() for name in ("kernel", "proxy"))
            told.append(
                Row(
                    f"{problem}, {language}: core seconds to build a kernel; a proxy", "-", f"{kernel:.3g}; {proxy:.3g}"
                )
            )
    return told
