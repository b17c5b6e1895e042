"""Tuned kernels against cuSPARSE and cuBLAS on this machine's GPU (docs/kernels.md).

    python -m benchmarks.kernels [--set seven|shapes|real]... [--layers DIR] [--out DIR] [--resume]
                                 [--stop-after SECONDS] [--budget-seconds SECONDS] [--emitter NAME] [--shortlist COUNT]
                                 [--dtype TYPE] [--n COUNT]... [--part I/COUNT]

needs an NVIDIA GPU of the device table. The sets: ``seven`` layers of BERT and ResNet-50, the 205 ``shapes``
of datasets/shapes.toml, and every ``.smtx`` and ``.npz`` file below ``--layers`` (``real``; for each ``--n``, or N as
in ``benchmarks.real_weights``). Each problem is tuned over the whole space and has one line in ``kernels.jsonl``, its
old one replaced; one that fails has a line that says why, and the run goes on. cuBLAS is timed once for all matrices of
a shape. ``--resume`` leaves out what the file has a time for, measured on such a GPU with the same options; failures
are tried again. A table is printed last, and the plots ``kernels_speedup.png`` and ``kernels_bound.png`` are drawn from
the whole file. ``--stop-after`` begins no problem after so many seconds, ``--budget-seconds`` is what the tuning of one
may take. ``--part`` takes every COUNTth problem from the Ith on, 0 being the first, for one of several GPUs. Exits 1 if
a problem failed.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

import lospmm
from benchmarks import harness
from benchmarks.harness import write_results
from benchmarks.kernels_plot import plot_bound, plot_speedups
from benchmarks.kernels_table import SEVEN, Record, current, measured_of, problem_name, ratios, summary
from benchmarks.real_weights import columns_of, read_pixels
from lospmm.errors import BadRequest, LospmmError
from lospmm.gpu.detect import detect_device
from lospmm.matrix import readers
from lospmm.matrix.csr import SparseMatrix
from lospmm.matrix.readers import Values
from lospmm.problem.device import DeviceSpec
from lospmm.problem.dtype import DTYPES
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.store import Store
from lospmm.tuning import jobs
from lospmm.tuning.options import Options
from lospmm.tuning.request import Request
from lospmm.tuning.session import Session
from lospmm_datasets.shapes import read_shapes
from lospmm_datasets.synthetic import uniform

ROOT = Path(__file__).parents[1]
SHAPES_FILE = ROOT / "datasets" / "shapes.toml"
RESULTS_NAME = "kernels.jsonl"
SEED = 0

#: Where NVIDIA's driver for Linux says what it is.
DRIVER_VERSION_FILE = Path("/proc/driver/nvidia/version")

#: What is measured with or against, as PyPI calls it.
LIBRARIES = ("nvidia-cuda-runtime", "nvidia-cusparse", "nvidia-cublas", "cuda-core", "pycuda")


@dataclass(frozen=True, slots=True)
class Case:
    """A problem before its matrix is there. ``problem`` is its name in the set, ``labels`` go into its line."""

    set: str
    problem: str
    n: int
    matrix: Callable[[], tuple[SparseMatrix, Values]]
    labels: Mapping[str, Any]


#: The manifest of the tuned kernel of a matrix, for n columns.
Tune = Callable[[SparseMatrix, Values, int], Mapping[str, Any]]


def seven() -> list[Case]:
    return [_drawn("seven", problem_name(*gemm, sparsity), gemm, sparsity, {}) for gemm, sparsity in SEVEN]


def shapes() -> list[Case]:
    """All shapes at one sparsity before the next, those about 90 % first: a run that is stopped has whole sets."""
    table = read_shapes(SHAPES_FILE)
    cases = []
    for sparsity in sorted(table.sparsities, key=lambda sparsity: abs(sparsity - 0.9)):
        for network in table.networks:
            for shape in network.shapes:
                labels = {"network": network.name, "layer": shape.layer}
                name = f"{network.name} {shape.layer}: {problem_name(*shape.gemm, sparsity)}"
                cases.append(_drawn("shapes", name, shape.gemm, sparsity, labels))
    return cases


def _drawn(name: str, problem: str, gemm: tuple[int, int, int], sparsity: float, labels: Mapping[str, str]) -> Case:
    m, k, n = gemm
    drawn = {"m": m, "k": k, "n": n, "drawn_sparsity": sparsity, "seed": SEED, **labels}
    return Case(name, problem, n, lambda: (uniform(m, k, sparsity, seed=SEED), "stored"), drawn)


def real(layers: Path, columns: Sequence[int | None] = (None,)) -> list[Case]:
    """Every layer for each of ``columns``, or for its own. Raises BadRequest where the folder holds none."""
    paths = sorted(path for path in layers.rglob("*") if path.suffix in (".smtx", ".npz"))
    if not paths:
        raise BadRequest(f"{layers}: there is no .smtx or .npz file in it")
    pixels = read_pixels(layers)
    cases = []
    for given, path in product(columns, paths):
        layer, n = path.relative_to(layers).as_posix(), given or columns_of(path, pixels)
        cases.append(Case("real", f"{layer}, n {n}", n, partial(_from_file, path), {"layer": layer, "n": n}))
    return cases


def _from_file(path: Path) -> tuple[SparseMatrix, Values]:
    found = readers.read(path)
    return found.matrix, found.values


#: The sets that need no files but this repository's, by name.
DRAWN_SETS: Mapping[str, Callable[[], list[Case]]] = {"seven": seven, "shapes": shapes}


def figures(manifest: Mapping[str, Any]) -> Record:
    """What a line takes from the manifest of a kernel. Raises BadRequest for one that was not measured."""
    measured, verified = manifest["measured"], manifest["verified"]
    if measured is None:
        raise BadRequest("the kernel was tuned, but nothing was measured")
    return {
        **{name: manifest[name] for name in ("m", "k", "n", "nnz", "fingerprint")},
        "sparsity": round(1 - manifest["nnz"] / (manifest["m"] * manifest["k"]), 6),
        "family": manifest["cubin_family"],
        **{name: manifest[name] for name in ("emitter", "toolchain", "tile", "launch", "registers", "code_bytes")},
        "max_relative_error": None if verified is None else verified["max_relative_error"],
        **measured,
        "ratios": ratios(measured),
        "seconds": {name: round(value, 3) for name, value in manifest["seconds"].items()},
    }


def line_of(case: Case, context: Mapping[str, Any], tune: Tune) -> Record:
    """The line of a problem: its figures, or why there are none. What is no error of ours is a line as well."""
    head = {"set": case.set, "problem": case.problem, **case.labels, **context}
    started = time.monotonic()
    try:
        matrix, values = case.matrix()
        found = figures(tune(matrix, values, case.n))
    except Exception as error:  # hours of measuring do not end with the first fault, of whatever kind it is
        found = {"failure": " ".join(f"{type(error).__name__}: {error}".split())}
    return {**head, **found, "wall_seconds": round(time.monotonic() - started, 2)}


def key(record: Mapping[str, Any]) -> str:
    """What a line is about: of two with the same key, the later counts. The commit is not in it."""
    about = (record["set"], record["problem"], record["machine"]["device"], record["options"])
    return json.dumps(about, sort_keys=True)


def case_key(case: Case, context: Mapping[str, Any]) -> str:
    return key({"set": case.set, "problem": case.problem, **context})


def read_results(path: Path) -> dict[str, Record]:
    """The lines of a file by key; none where there is no file. Raises BadRequest for what is not such a file."""
    return harness.read_results(path, key)


def measure(
    cases: Sequence[Case], context: Mapping[str, Any], tune: Tune, path: Path, stop_after: float | None = None
) -> int:
    """Measure the cases one by one, each line in the file at once; begin none after ``stop_after`` seconds.

    Returns how many were measured, or have failed.
    """
    results, started = read_results(path), time.monotonic()
    for number, case in enumerate(cases, start=1):
        if stop_after is not None and time.monotonic() - started >= stop_after:
            return number - 1
        record = line_of(case, context, tune)
        results.pop(key(record), None)  # the newest is last: ``current`` goes by that
        results[key(record)] = record
        write_results(path, results)
        print(progress(number, len(cases), record), flush=True)
    return len(cases)


def missing(cases: Sequence[Case], context: Mapping[str, Any], results: Mapping[str, Record]) -> list[Case]:
    """The cases that the file has no times for."""
    done = {name for name, record in results.items() if "failure" not in record}
    return [case for case in cases if case_key(case, context) not in done]


def context_of(device: DeviceSpec, options: Options, commit: str) -> Record:
    """What all lines of a run have in common."""
    return {
        "machine": {
            "device": device.name,
            "title": device.title,
            "system": f"{platform.system()} {platform.machine()}",
            "cores": len(os.sched_getaffinity(0)),
        },
        "versions": versions(),
        "commit": commit,
        "options": asdict(options),
    }


def versions() -> dict[str, str]:
    """Of this program, of the driver and of the libraries from PyPI, which are found before those of the system."""
    found = {"lospmm": lospmm.__version__, "python": platform.python_version(), "numpy": np.__version__}
    with suppress(OSError):
        if named := re.search(r"\d+\.\d+(\.\d+)?", DRIVER_VERSION_FILE.read_text()):
            found["driver"] = named[0]
    for package in LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def commit_of(folder: Path) -> str:
    """The commit that is checked out, "+dirty" where files other than results differ from it; "unknown" without git."""
    commands = (["rev-parse", "HEAD"], ["status", "--porcelain", "--", ".", ":!benchmarks/results"])
    try:
        commit, changes = (
            subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
            for words in commands
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit}+dirty" if changes else commit


@contextmanager
def searched(device: DeviceSpec, options: Options, cases: Sequence[Case]) -> Iterator[Tune]:
    """Yield the tuner of these cases, in their order: while the GPU times one, the next is searched."""

    def request(matrix: SparseMatrix, values: Values, n: int) -> Request:
        return Request(Problem(matrix, n, device, dtype=DTYPES[options.dtype]), options, values)

    later = (request(*case.matrix(), case.n) for case in cases[1:])
    with tempfile.TemporaryDirectory() as directory, Session(settings().workers) as session:
        store = Store(Path(directory))

        def tune(matrix: SparseMatrix, values: Values, n: int) -> Mapping[str, Any]:
            if (coming := next(later, None)) is not None:
                jobs.search_ahead(coming, store=store, session=session)
            return jobs.tune(request(matrix, values, n), store=store, session=session).manifest

        yield tune


def progress(number: int, count: int, record: Record) -> str:
    found = f"FAILED: {record['failure']}" if "failure" in record else f"{record['micros']:.2f} us {record['ratios']}"
    return f"{number} of {count}: {record['problem']}: {found} ({record['wall_seconds']} s)"


def cases_of(names: Sequence[str], layers: Path | None, columns: Sequence[int | None] = (None,)) -> list[Case]:
    """All cases of the sets; none named are all with input. Raises BadRequest for real ones without layers."""
    sets = dict(DRAWN_SETS)
    if layers is not None:
        sets["real"] = partial(real, layers, columns)
    elif "real" in names:
        raise BadRequest("--set real: --layers DIR must name the folder of pruned layers")
    return [case for name in dict.fromkeys(names or sets) for case in sets[name]()]


def report(cases: Sequence[Case], context: Mapping[str, Any], path: Path) -> int:
    """Print the table of these cases and draw the plots of the whole file. The exit code: 1 where a case has failed."""
    results = read_results(path)
    found = [results[case_key(case, context)] for case in cases]
    print(summary(found))
    everything = current(list(results.values()))
    plot_speedups(everything, path.with_name("kernels_speedup.png"))
    plot_bound(everything, path.with_name("kernels_bound.png"))
    return int(len(measured_of(found)) < len(found))


def run(
    cases: Sequence[Case],
    context: Mapping[str, Any],
    tune: Tune,
    path: Path,
    *,
    done: Mapping[str, Record],
    stop_after: float | None = None,
) -> int:
    """Measure what ``done`` has no times for and report on all that has been begun. Gives the exit code."""
    todo = missing(cases, context, done)
    left = todo[measure(todo, context, tune, path, stop_after) :]
    code = report([case for case in cases if case not in left], context, path)
    if left:
        print(f"{len(left)} problems were not begun: the same command with --resume goes on", file=sys.stderr)
    return code


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", action="append", choices=[*DRAWN_SETS, "real"], help="may be given more than once")
    parser.add_argument("--layers", type=Path, help="a folder of pruned layers")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--resume", action="store_true", help="leave out what has been measured")
    parser.add_argument("--stop-after", type=float, metavar="SECONDS", help="begin no problem after that")
    parser.add_argument("--budget-seconds", type=float, metavar="SECONDS", help="of tuning one problem")
    parser.add_argument("--emitter")
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--n", type=int, action="append", help="columns of B for the layers; repeatable")
    parser.add_argument("--shortlist", type=int, metavar="COUNT")
    parser.add_argument(
        "--part", type=harness.part, default=slice(None), metavar="I/COUNT", help="some of the problems"
    )
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    arguments = parser.parse_args()
    plt.switch_backend("agg")
    tuning = {
        "emitter": arguments.emitter,
        "dtype": arguments.dtype,
        "shortlist_size": arguments.shortlist,
        "budget_seconds": arguments.budget_seconds,
    }
    path = arguments.out / RESULTS_NAME
    try:
        cases = cases_of(arguments.set, arguments.layers, arguments.n or (None,))[arguments.part]
        options = Options(measure="gpu", **{name: value for name, value in tuning.items() if value is not None})
        device = detect_device()
        context = context_of(device, options, arguments.commit or commit_of(ROOT))
        done = read_results(path) if arguments.resume else {}
        with searched(device, options, missing(cases, context, done)) as tune:
            code = run(cases, context, tune, path, done=done, stop_after=arguments.stop_after)
    except (LospmmError, OSError) as error:
        sys.exit(f"benchmarks.kernels: {error}")
    sys.exit(code)


if __name__ == "__main__":
    main()
