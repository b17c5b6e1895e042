"""The paper's tables and figures on this GPU: what it says beside what was measured here.

    python -m benchmarks.paper --measure [4|6|9]... [--out DIR] [--ncu PROGRAM]   needs a GPU of the device table
    python -m benchmarks.paper [--out DIR]                                        plots and tables from the files

``--measure`` writes ``paper_figures.jsonl``: Figures 4, 6 and 9, or those named and the others as they were, by the
GPU's counters where ``--ncu`` (Nsight Compute) answers. The others come from ``kernels.jsonl``
(``benchmarks.kernels``), ``proxies_on_gpu.jsonl`` (``benchmarks.proxies_on_gpu``), ``paper_choices.jsonl.gz`` and
``paper_exhaustive.jsonl.gz``, which are all parts of ``benchmarks.choices`` and of ``benchmarks.exhaustive``, packed by
``--pack FILE...``. A file that is not there has no rows. To add a figure, add a row to ``FIGURES``.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.harness import read_lines, write_lines
from benchmarks.paper import cost, emitters, fetch, load, loss, regrouped, speed
from benchmarks.paper.rows import Figure, Record, Row
from benchmarks.paper.tables import read_tables
from benchmarks.paper.timing import Stand
from lospmm.errors import LospmmError

RESULTS = Path(__file__).parents[1] / "results"
MEASURED = "paper_figures.jsonl"
CHOICES = "paper_choices.jsonl.gz"
TABLES = "paper_exhaustive.jsonl.gz"

#: Seconds that Nsight Compute may take for all kernels of Figure 9.
COUNTING_SECONDS = 90.0

#: By the names of the paper. Figure 10 is drawn by ``benchmarks.kernels``.
FIGURES: Mapping[str, Figure] = MappingProxyType(
    {
        "Figure 4": Figure("time against the loads of a block", (MEASURED,), load.rows, load.plot, "paper_4.png"),
        "Figure 6": Figure("rows regrouped", (MEASURED,), regrouped.rows, regrouped.plot, "paper_6.png"),
        "Figure 9": Figure("the fetch of long code", (MEASURED,), fetch.rows, fetch.plot, "paper_9.png"),
        "Figure 10": Figure("kernels beside libraries", ("kernels.jsonl", "h100/kernels.jsonl"), speed.rows, None),
        "Figure 11 and Table 2": Figure(
            "what a search costs", (CHOICES, "proxies_on_gpu.jsonl"), cost.rows, cost.plot, "paper_11.png"
        ),
        "Table 4": Figure("what a choice loses", (CHOICES, TABLES), loss.rows, None),
        "Section 5": Figure(
            "proxies as machine code, PTX and CUDA C++", ("proxies_on_gpu.jsonl",), emitters.rows, None
        ),
    }
)

#: Figures whose records are lines of MEASURED, how these name them, and what measures them.
NUMBERS = {"Figure 4": ("4",), "Figure 6": ("6",), "Figure 9": ("9", "9 counted")}
MEASURES = {"4": load.measure, "6": regrouped.measure, "9": fetch.measure}


def measure(out: Path, ncu: str | None, numbers: Sequence[str] = tuple(MEASURES)) -> None:
    lines = read_lines(out / MEASURED) if (out / MEASURED).exists() else []
    with (out / MEASURED).open("w") as results:

        def keep(record: Record) -> None:
            results.write(json.dumps(record) + "\n")
            results.flush()

        for line in lines:
            if line["figure"].split()[0] not in numbers:
                keep(line)
        with Stand() as stand:
            for number in numbers:
                for record in MEASURES[number](stand):
                    keep(record)
        if ncu is not None and "9" in numbers:
            for record in fetch.counted(ncu, COUNTING_SECONDS):
                keep(record)


def inputs(name: str, results: Path) -> list[list[Any]] | None:
    """The records that a figure is made of, file by file; None where one of them is missing or holds nothing of it."""
    found: list[list[Any]] = []
    for file in FIGURES[name].results:
        path = results / file
        if not path.exists():
            return None
        records: list[Any] = read_tables([path]) if file == TABLES else read_lines(path)
        if name in NUMBERS:
            records = [one for one in records if one["figure"] in NUMBERS[name]]
        found.append(records)
    return found if all(found) else None


def table(name: str, results: Path = RESULTS) -> list[Row]:
    """No rows where something was not measured."""
    given = inputs(name, results)
    return [] if given is None else FIGURES[name].rows(*given)


def draw(name: str, results: Path = RESULTS) -> None:
    figure, given = FIGURES[name], inputs(name, results)
    if given is not None and figure.plot is not None and figure.picture is not None:
        figure.plot(*given, results / figure.picture)


def pack(paths: Sequence[Path], out: Path, over: Sequence[Path] = ()) -> None:
    """The lines of all parts of ``benchmarks.exhaustive`` and ``benchmarks.choices``: of a problem and phase one.

    ``over`` has choices of a later search: the ways of a set that they have are taken from nowhere else, and lines that
    have no other are left out.
    """
    newer = [line for path in over for line in read_lines(path)]
    replaced = {(line["set"], way) for line in newer for way in line["ways"]}
    for kind, name in (("exhaustive", TABLES), ("choices", CHOICES)):
        lines = [line for path in paths if kind in path.name for line in read_lines(path)]
        if kind == "choices" and over:
            older = [_without(line, {way for kind_of, way in replaced if kind_of == line["set"]}) for line in lines]
            lines = [line for line in older if line["ways"]] + newer
        found = {(line["problem"], *line.get("ways", ())): line for line in lines}
        if found:
            write_lines(out / name, (found[key] for key in sorted(found)))


def _without(line: Record, ways: set[str]) -> Record:
    """A choice as if some ways had not been asked for."""
    kept = {name: {way: one for way, one in line[name].items() if way not in ways} for name in ("chosen", "seconds")}
    return {**line, **kept, "ways": [way for way in line["ways"] if way not in ways]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--measure", nargs="*", choices=MEASURES, metavar="4|6|9")
    parser.add_argument("--pack", type=Path, nargs="+", metavar="FILE", help="what the parts of long runs have written")
    parser.add_argument("--over", type=Path, nargs="+", default=[], metavar="FILE", help="choices of a later search")
    parser.add_argument("--ncu", help="Nsight Compute's command line, to count what Figure 9 shows")
    options = parser.parse_args()
    plt.switch_backend("agg")
    options.out.mkdir(parents=True, exist_ok=True)
    pack(options.pack or (), options.out, options.over)
    try:
        if options.measure is not None:
            measure(options.out, options.ncu, options.measure or tuple(MEASURES))
    except LospmmError as error:
        sys.exit(f"benchmarks.paper: {error}")
    for name, figure in FIGURES.items():
        rows = table(name, options.out)
        print(f"\n{name}: {figure.title}" + ("" if rows else ", not measured"))
        for row in rows:
            print(f"  {row.what:110} paper {row.paper:>16}   here {row.here}")
        draw(name, options.out)


if __name__ == "__main__":
    main()
