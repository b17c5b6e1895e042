"""The command line. Results go to stdout, progress and errors to stderr; exit codes are those of ``errors``."""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lospmm import __version__, artifact, jobs, readers
from lospmm.device import DeviceSpec, find_device
from lospmm.errors import LospmmError
from lospmm.model import Problem
from lospmm.progress import reported
from lospmm.runtime.detect import detect_device
from lospmm.search import explore_problem
from lospmm.settings import settings
from lospmm.space import Space
from lospmm.stages import Stages

app = typer.Typer(
    help="Fully unrolled SpMM kernels for pruned neural networks: tune, inspect, serve.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
cache_app = typer.Typer(help="The store of compiled units and tuned kernels.", no_args_is_help=True)
app.add_typer(cache_app, name="cache")

MatrixArgument = Annotated[Path, typer.Argument(help="A pruned weight matrix: .npz .npy .mtx .smtx .safetensors.")]
ColumnsOption = Annotated[int, typer.Option("--n", help="Columns of B.")]
DeviceOption = Annotated[str, typer.Option("--device", help="A GPU of the device table, a device file, or auto.")]
TensorOption = Annotated[str | None, typer.Option("--tensor", help="The weight to take from a .safetensors.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Draws the values of a pattern (.smtx).")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")]
QuietOption = Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")]


@app.command()
def tune(
    matrix: MatrixArgument,
    n: ColumnsOption,
    out: Annotated[Path, typer.Option("--out", help="The folder to put the kernel in.")],
    device: DeviceOption = "auto",
    emitter: Annotated[str, typer.Option("--emitter", help="ptx or cuda.")] = "ptx",
    ranker: Annotated[str, typer.Option("--ranker", help="none: order by the analytic estimate.")] = "none",
    shortlist: Annotated[int, typer.Option("--shortlist", help="Candidates to keep in the tuning log.")] = 10,
    measure: Annotated[str, typer.Option("--measure", help="auto or none: choose by estimate.")] = "auto",
    verify: Annotated[
        str, typer.Option("--verify", help="cpu: run the kernel's text against float64; or none.")
    ] = "cpu",
    dtype: Annotated[str, typer.Option("--dtype", help="float32.")] = "float32",
    tensor: TensorOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Find the fastest kernel for C = A x B and write it to a folder."""
    with _errors(as_json=as_json):
        options = jobs.Options(
            emitter=emitter, ranker=ranker, measure=measure, verify=verify, dtype=dtype, shortlist_size=shortlist
        )
        file, problem = _problem(matrix, n, device, tensor, seed)
        request = jobs.Request(problem, file, options, seed)
        with reported(quiet=quiet) as progress:
            done = jobs.tune_to_folder(request, out, store=jobs.open_store(), progress=progress)
        _show(done.manifest, as_json=as_json, title=str(out))


@app.command()
def space(
    matrix: MatrixArgument,
    n: ColumnsOption,
    device: DeviceOption = "auto",
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw the space as Figure 3 does (.png .svg .pdf).")
    ] = None,
    tensor: TensorOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Count the tile sizes that each constraint removes, and those that are left."""
    with _errors(as_json=as_json):
        _, problem = _problem(matrix, n, device, tensor, seed)
        with reported(quiet=quiet) as progress:
            found = explore_problem(problem, Stages(progress), workers=settings().workers)
        if plot is not None:
            from lospmm.plot import plot_space  # matplotlib takes longer to import than the space to explore

            plot_space(problem, found, plot)
        if as_json:
            _print_json(_space_report(problem, found))
        else:
            _print_space(found)


@app.command()
def inspect(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that `lospmm tune` wrote.")],
    as_json: JsonOption = False,
) -> None:
    """What an artifact holds; its cubin is checked against the manifest."""
    with _errors(as_json=as_json):
        _show(artifact.read(directory).manifest, as_json=as_json, title=str(directory))


@app.command()
def serve(
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen on.")] = 8000,
) -> None:
    """The REST service: POST a pruned matrix, get a cubin."""
    with _errors(as_json=False):
        from lospmm_server.main import run  # the only command that needs a web framework

        run(host, port)


@cache_app.command("ls")
def cache_list(as_json: JsonOption = False) -> None:
    """The entries of the store, the last used first."""
    with _errors(as_json=as_json):
        entries = sorted(jobs.open_store().entries(), key=lambda entry: -entry.used)
        _print_entries(entries, as_json=as_json, title=f"{settings().cache_dir}")


@cache_app.command("prune")
def cache_prune(
    max_megabytes: Annotated[int | None, typer.Option("--max-mb", help="Keep the last used, up to so much.")] = None,
    days: Annotated[
        float | None, typer.Option("--older-than-days", help="Remove what was not used for so long.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Remove entries of the store, the least recently used first."""
    with _errors(as_json=as_json):
        removed = jobs.open_store().prune(
            max_bytes=None if max_megabytes is None else max_megabytes << 20,
            older_than_seconds=None if days is None else days * 86_400,
        )
        _print_entries(removed, as_json=as_json, title="removed")


@cache_app.command("verify")
def cache_verify(as_json: JsonOption = False) -> None:
    """Check every entry of the store against its checksums; exit status 4 if any is corrupt."""
    with _errors(as_json=as_json):
        corrupt = jobs.open_store().verify()
        _print_entries(corrupt, as_json=as_json, title="corrupt (rebuilt when next asked for)")
    if corrupt:
        raise typer.Exit(4)


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False) -> None:
    if show:
        print(f"lospmm {__version__}")
        raise typer.Exit


def main() -> None:
    app()


def _problem(matrix: Path, n: int, device: str, tensor: str | None, seed: int) -> tuple[readers.MatrixFile, Problem]:
    gpu: DeviceSpec = detect_device() if device == "auto" else find_device(device)
    file = readers.read(matrix, tensor=tensor, seed=seed)
    return file, Problem(file.matrix, n, gpu)


@contextmanager
def _errors(*, as_json: bool) -> Iterator[None]:
    """Turn an error into its one line and its exit code."""
    try:
        yield
    except LospmmError as error:
        if as_json:
            _print_json({"error": {"type": type(error).__name__, "message": str(error)}})
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from None


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2))


def _show(manifest: Any, *, as_json: bool, title: str) -> None:
    if as_json:
        _print_json(manifest)
        return
    tile, search, seconds, verified = (manifest[name] for name in ("tile", "search", "seconds", "verified"))
    launch = manifest["launch"]
    table = Table("", title, box=None, show_header=True, title_justify="left")
    rows = {
        "kernel": manifest["name"],
        "matrix": f"{manifest['m']} x {manifest['k']}, {manifest['nnz']:,} nonzeros, values {manifest['values']}",
        "B": f"{manifest['k']} x {manifest['n']}, {manifest['dtype']}, row-major",
        "device": f"{manifest['device']} ({manifest['arch']}), {manifest['toolchain']}",
        "tile": f"{tile['rows']} rows x {tile['cols']} columns, {tile['prefetch']} loads ahead, "
        f"{tile['order']} index fastest",
        "tiles": f"{tile['count']:,} with nonzeros, {tile['zero_blocks']:,} of empty rows; "
        f"{tile['nnc_sum']:,} loads a column, {tile['nnc_max']:,} at most",
        "launch": f"grid {launch['grid'][0]} x {launch['grid'][1]}, {launch['block']} threads",
        "registers": f"{manifest['registers']} a thread, {manifest['spill_bytes']} bytes spilled",
        "code": f"{manifest['code_bytes']:,} bytes",
        "search": f"{search['space']:,} tile sizes, {search['after_registers']:,} after registers, "
        f"{search['after_utilization']:,} after utilization, {search['after_balance']:,} after balance",
        "chosen by": f"{search['chosen_by']}, {search['estimated_micros']:.1f} us; not measured",
        "verified": "no"
        if verified is None
        else f"on the {verified['on']}, relative error {verified['max_relative_error']:.1e}",
        "seconds": f"{seconds['total']:.2f}: "
        + ", ".join(f"{name} {value:.2f}" for name, value in seconds.items() if name != "total" and value >= 0.005),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table, soft_wrap=True)


def _removed(found: Space) -> dict[str, int]:
    """Tile sizes that each constraint removed, in the order in which constraints apply."""
    return dict(Counter(verdict.constraint for verdict in found.verdicts))


def _space_report(problem: Problem, found: Space) -> dict[str, object]:
    return {
        "m": problem.matrix.m,
        "k": problem.matrix.k,
        "n": problem.n,
        "nnz": problem.matrix.nnz,
        "device": problem.device.name,
        "space": found.size,
        "after_registers": found.after("registers"),
        "after_utilization": found.after("utilization"),
        "after_balance": found.after("balance"),
        "removed": _removed(found),
        "relaxed": list(found.relaxed),
        "survivors": [list(candidate.tile) for candidate in found.survivors],
    }


def _print_space(found: Space) -> None:
    table = Table("constraint", "removed", "left", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    left = found.size
    table.add_row("tile sizes", "", f"{left:,}")
    for name, count in _removed(found).items():
        left -= count
        table.add_row(name + (" (limit moved)" if name in found.relaxed else ""), f"{count:,}", f"{left:,}")
    Console().print(table)


def _print_entries(entries: Any, *, as_json: bool, title: str) -> None:
    if as_json:
        _print_json({"entries": [asdict(entry) for entry in entries]})
        return
    table = Table("kind", "key", "bytes", title=title, box=None, title_justify="left")
    for entry in entries:
        table.add_row(entry.kind, entry.key, f"{entry.size_bytes:,}")
    Console().print(table, soft_wrap=True)
    print(f"{len(entries)} entries, {sum(entry.size_bytes for entry in entries):,} bytes")


if __name__ == "__main__":
    main()
