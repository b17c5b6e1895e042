"""What each axis of the unrolled space gains, by the kernels that were timed for the models of choices without a GPU.

    python -m benchmarks.axes [--data FILE] [--draws COUNT]

An axis is struck from every problem of rank_model/data/untimed.jsonl.gz: its kernels are left out, and the fastest that
is left is compared with the fastest of all. Any kernel that is left out loses something, so what striking as many
kernels at random loses, the mean of ``--draws``, is subtracted. An axis is worth its place from 0.5 % over the shapes
at one sparsity and type, or 5 % on a class that can be named. Printed are those means in percent, a row an axis.

The kernels of a problem are some 40, the first of the ranker and of the estimate; code that is walked twice is not
among them (docs/decisions/0031 has what it gains where blocks come in waves).
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import Row, read_lines

ROOT = Path(__file__).parents[1]

#: The fields of a kernel in a line, before its forecast and its microseconds.
AXES = ("rows", "cols", "prefetch", "column_group", "lockstep", "split_k", "thread_words")

#: What is struck, by its name: whether a kernel is left out, by the value of an axis.
STRUCK: Mapping[str, tuple[str, Callable[[NDArray[np.float64]], NDArray[np.bool_]]]] = MappingProxyType(
    {
        "split_k over 1": ("split_k", lambda value: value > 1),
        "two words a thread": ("thread_words", lambda value: value > 1),
        "column_group 1": ("column_group", lambda value: value == 1),
        "column_group 2": ("column_group", lambda value: value == 2),
        "column_group all": ("column_group", lambda value: value == 0),
        "lockstep": ("lockstep", lambda value: value > 0),
        "no lockstep": ("lockstep", lambda value: value == 0),
        "prefetch up to 8": ("prefetch", lambda value: value <= 8),
        "prefetch 48": ("prefetch", lambda value: value == 48),
        "prefetch 72": ("prefetch", lambda value: value == 72),
    }
)

#: Fewer kernels left tell nothing of an axis.
LEAST_LEFT = 5


def gain(kernels: NDArray[np.float64], struck: NDArray[np.bool_], draws: int, random: np.random.Generator) -> float:
    """Return what striking the kernels ``struck`` loses, less what as many at random lose, as a share of the time.

    ``kernels`` are (kernels, axes and the forecast and microseconds). NaN where too few kernels are left, or none goes.
    """
    micros = kernels[:, -1]
    count = int(struck.sum())
    if not count or len(micros) - count < LEAST_LEFT:
        return float("nan")
    best = micros.min()
    loss = micros[~struck].min() / best - 1
    at_random = [micros[random.permutation(len(micros))[count:]].min() / best - 1 for _ in range(draws)]
    return float(loss - np.mean(at_random))


def groups(lines: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the problems of each set: the shapes by sparsity and type, the others by type."""
    found: dict[str, list[Row]] = {}
    for line in lines:
        sparsity = f" {1 - line['nnz'] / (line['m'] * line['k']):.0%}" if line["set"] == "shapes" else ""
        found.setdefault(f"{line['set']}{sparsity} {line['dtype']}", []).append(line)
    return dict(sorted(found.items()))


def gains(lines: Sequence[Row], draws: int) -> dict[str, float]:
    """Return the mean gain of each axis over some problems, in percent; a problem it does not touch counts as 0."""
    random = np.random.default_rng(0)
    tables = [np.array([one for one in line["kernels"] if one[-1] is not None], float) for line in lines]
    return {
        name: 100
        * float(np.mean([np.nan_to_num(gain(t, is_struck(t[:, AXES.index(axis)]), draws, random)) for t in tables]))
        for name, (axis, is_struck) in STRUCK.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT / "rank_model" / "data" / "untimed.jsonl.gz")
    parser.add_argument("--draws", type=int, default=50)
    arguments = parser.parse_args()
    by_group = groups(read_lines(arguments.data))
    found = {name: gains(lines, arguments.draws) for name, lines in by_group.items()}
    print(f"{'':20}" + "".join(f"{name:>20}" for name in found))
    print(f"{'problems':20}" + "".join(f"{len(lines):20}" for lines in by_group.values()))
    for axis in STRUCK:
        print(f"{axis:20}" + "".join(f"{one[axis]:20.2f}" for one in found.values()))


if __name__ == "__main__":
    main()
