"""``lospmm train-ranker``: a rank model (section 3.5) for the GPU of its data (docs/ranker.md)."""

from pathlib import Path
from typing import Annotated, Any

import typer

from lospmm.artifact.artifact import check_folder, write_file
from lospmm.cli.options import JsonOption, QuietOption, out_option, say
from lospmm.cli.output import print_json, print_pairs
from lospmm.errors import BadRequest, extra_needed
from lospmm.progress import reported
from lospmm.settings import settings


def train_ranker(
    data: Annotated[
        Path, typer.Argument(metavar="DATA", help="A .npz of measured kernels, or a folder that --collect has filled.")
    ],
    out: Annotated[Path, out_option("The folder for <device>.txt, its card, and the data as .npz.")],
    collect_seconds: Annotated[
        float,
        typer.Option("--collect", help="Seconds to measure on this machine's GPU first, into the folder DATA."),
    ] = 0.0,
    matrices: Annotated[
        Path | None,
        typer.Option("--matrices", help="The folder of the matrix files that DATA was measured on."),
    ] = None,
    also: Annotated[
        list[Path] | None,
        typer.Option("--also", help="A .npz of another GPU's kernels to learn from too; may be repeated."),
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Train a rank model on measured kernels; with --collect, measure them first.

    Set LOSPMM_RANKERS to the folder of --out, and --ranker lambdamart uses it.
    """
    with extra_needed("tune", "train-ranker"):
        from lospmm_rank.train import card, collect, dataset, fit  # LightGBM is for this command alone

    _check(out, collect_seconds, matrices)
    if collect_seconds > 0:
        _check_target(data)
        tell = say(quiet=quiet)
        orders = collect.Orders(out=data, seconds=collect_seconds)
        tell(str(collect.run(orders, lambda tally: tell(str(tally)))))
    others = [dataset.load(file) for file in also or ()]
    with reported(quiet=quiet) as progress:
        measured = dataset.pack(_lines_in(data)) if data.is_dir() else dataset.load(data)
        devices = sorted(set(measured.device.tolist()))
        if len(devices) != 1:
            raise BadRequest(f"{data}: measured on {', '.join(devices)}; a model knows one GPU: give it those of one")
        if is_stale := dataset.stale(measured) is not None:
            measured = dataset.renewed(
                measured,
                matrices=matrices,
                workers=settings().workers,
                progress=lambda done, total: progress("features", done, total),
            )
            progress("features", 1, 1)
        trained = fit.train(measured, others, progress=lambda done, total: progress("train", done, total))
        progress("train", 1, 1)
        about = card.card_of(measured, trained, others)
        progress("evaluate", 1, 1)
    out.mkdir(parents=True, exist_ok=True)
    if is_stale:
        dataset.save(measured, out / f"{devices[0]}.npz")
    for ending, text in ((".md", card.as_text(about)), (".json", card.as_json(about)), (".txt", trained.text)):
        write_file(out / f"{devices[0]}{ending}", text)
    _show(out / f"{devices[0]}.txt", about, as_json=as_json)


def _check(out: Path, collect: float, matrices: Path | None) -> None:
    """Check what would fail only after minutes. Raises BadRequest, ToolchainFault."""
    if not 0 <= collect < float("inf"):
        raise BadRequest(f"--collect {collect}: give seconds, 0 or more")
    check_folder(out)
    if matrices is not None and not matrices.is_dir():
        raise BadRequest(f"--matrices {matrices}: there is no such folder")


def _lines_in(folder: Path) -> list[Path]:
    """Return the files that ``--collect`` has measured. Raises BadRequest."""
    if files := sorted(folder.glob("*.jsonl")):
        return files
    raise BadRequest(f"{folder}: no .jsonl files of measured kernels; --collect SECONDS measures some")


def _check_target(folder: Path) -> None:
    if folder.suffix == ".npz":
        raise BadRequest(f"--collect: {folder} must be a folder, to which measurements are added")


def _show(model: Path, about: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json({"model": str(model), **about})
        return
    data = about["data"]
    pairs = {
        "model": str(model),
        "device": about["device"][0],
        "data": f"{data['kernels']:,} kernels of {sum(data['problems'].values()):,} problems",
        "trees": str(about["training"]["trees"]),
    }
    for result in about["results"]:
        for name, figures in result["orders"].items():
            losses = ", ".join(f"{figures[f'loss_top_{top}']:.2%} of top {top}" for top in (1, 5, 10))
            pairs[f"{result['split']}, {name}"] = f"loss {losses}"
    print_pairs(pairs)
