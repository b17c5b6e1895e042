"""What a search finds in little time, beside one without a limit, on real pruned layers.

    python -m benchmarks.budgets LAYERS [--n 1024] [--out DIR] [--stop-after SECONDS] [--commit HASH]

needs an NVIDIA GPU of the device table. Every ``.smtx`` and ``.npz`` file below LAYERS is tuned by each of SEARCHES,
every sixth by ``long`` too, with an empty store and new processes. Then the chosen kernels are checked and timed in
turns, in one process with a time limit for each. ``budgets.jsonl`` gets a line per layer and search: ``ratio`` is to
the default's time, ``seconds`` the wall time of the search. Layers that have lines are left out, so the same command
goes on; ``--stop-after`` begins no layer after that. A table is printed last.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.harness import Row, micros_in_turns, read_results, write_results
from benchmarks.kernels import ROOT, Case, commit_of, context_of, real
from benchmarks.kernels_table import geometric_mean
from benchmarks.problems import spread
from lospmm.errors import GpuFault, LospmmError
from lospmm.gpu.bench import Bench
from lospmm.gpu.detect import detect_device
from lospmm.problem.device import DeviceSpec
from lospmm.problem.problem import Problem
from lospmm.store import Store
from lospmm.toolchain.compile import Compiled
from lospmm.tuning import jobs
from lospmm.tuning.options import Options
from lospmm.tuning.request import Request

DEFAULT, LONG = "default", "long"
_timed = partial(Options, measure="gpu")
SEARCHES = {f"{seconds:g} s": _timed(budget_seconds=seconds) for seconds in (1.0, 2.0, 3.5)}
SEARCHES |= {DEFAULT: _timed(), LONG: _timed(shortlist_size=40)}

#: A search of a greater ratio is behind.
NEAR = 1.15


def lines_of(case: Case, device: DeviceSpec, names: Sequence[str], bench: Bench, commit: str) -> Iterator[Row]:
    """The line of each search. Raises LospmmError where a search or a kernel fails."""
    found, seconds = {}, {}
    for name in names:
        matrix, values = case.matrix()  # anew: nothing is known of it
        with tempfile.TemporaryDirectory() as directory:
            started = time.monotonic()
            request = Request(Problem(matrix, case.n, device), SEARCHES[name], values)
            found[name] = jobs.tune(request, store=Store(Path(directory)))
            seconds[name] = round(time.monotonic() - started, 2)
    bench.turn_to(Problem(matrix, case.n, device))
    kernels = {made.cubin: Compiled(made.cubin, made.manifest["name"], made.launch) for made in found.values()}
    micros = micros_in_turns(bench, kernels)
    for name, made in found.items():
        if (own := micros[made.cubin]) is None or (default := micros[found[DEFAULT].cubin]) is None:
            raise GpuFault("a chosen kernel failed")
        about = {"problem": case.problem, "search": name, "budget": SEARCHES[name].budget_seconds, "micros": own}
        sizes = {size: made.manifest[size] for size in ("m", "k", "n", "nnz", "cubin_family")}
        sizes["empty_rows"] = matrix.m - matrix.filled_rows
        timed = made.manifest["search"]["measured"]
        about |= {"ratio": round(own / default, 4), "seconds": seconds[name], "measured": timed}
        yield {**about, **sizes, **context_of(device, SEARCHES[name], commit)}


def measure(cases: Sequence[Case], device: DeviceSpec, path: Path, until: float, commit: str) -> Iterable[Row]:
    """All lines of the file; layers that had none are added one by one."""
    lines = read_results(path, _key)
    with Bench(Problem(cases[0].matrix()[0], cases[0].n, device)) as bench:
        for at, case in enumerate(cases):
            if (case.problem, case.n, device.name, DEFAULT) in lines or time.monotonic() > until:
                continue
            try:
                names = [name for name in SEARCHES if name != LONG or at % 6 == 0]
                added = list(lines_of(case, device, names, bench, commit))
            except LospmmError as error:
                print(f"{case.problem}: FAILED: {error}", flush=True)
                continue
            write_results(path, lines := lines | {_key(line): line for line in added})
            print(case.problem, *(f"{line['search']}: {line['micros']}" for line in added), flush=True)
    return lines.values()


def _key(line: Row) -> tuple[object, ...]:
    return line["problem"], line["n"], line["machine"]["device"], line["search"]


def table(lines: Sequence[Row]) -> Iterator[str]:
    """By search, of all layers and of those with empty rows: ratios to the default's time, and seconds."""
    yield "search  layers mean worst near seconds, and of layers with empty rows"
    for name in SEARCHES:
        own = [line for line in lines if line["search"] == name]
        groups = own, [line for line in own if line["empty_rows"]]
        yield f"{name:8}" + ", ".join(_figures(group) for group in groups if group)


def _figures(lines: Sequence[Row]) -> str:
    ratios, seconds = [line["ratio"] for line in lines], sum(line["seconds"] for line in lines) / len(lines)
    near = sum(ratio <= NEAR for ratio in ratios)
    return f"{len(ratios):3} {geometric_mean(ratios):.3f} {max(ratios):.2f} {near:3} {seconds:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", type=Path)
    parser.add_argument("--n", type=int, default=1024)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--stop-after", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    given = parser.parse_args()
    until, commit = time.monotonic() + given.stop_after, given.commit or commit_of(ROOT)
    try:
        cases = [replace(case, n=given.n, problem=str(case.labels["layer"])) for case in spread(real(given.layers))]
        lines = measure(cases, detect_device(), given.out / "budgets.jsonl", until, commit)
    except (LospmmError, OSError) as error:
        sys.exit(f"benchmarks.budgets: {error}")
    print("\n".join(table(list(lines))))


if __name__ == "__main__":
    main()
