"""``lospmm inspect`` and ``lospmm replay``: a kernel's folder, and its choice again from its log."""

from pathlib import Path
from typing import Annotated

import typer

from lospmm.artifact import artifact
from lospmm.cli.options import JsonOption
from lospmm.cli.output import print_json
from lospmm.cli.show import show_manifest, show_replay
from lospmm.errors import BadRequest, VerificationFailed
from lospmm.problem.device import DEVICES, find_device
from lospmm.tuning.replay import replay as replayed


def inspect(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that `lospmm tune` wrote.")],
    as_json: JsonOption = False,
) -> None:
    """Show what a kernel's folder holds; check its cubin, matrix and bias against the manifest."""
    kept = artifact.read(directory)
    kept.matrix()
    kept.epilogue()
    show_manifest(kept.manifest, directory, as_json=as_json)


def replay(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that `lospmm tune` wrote.")],
    device: Annotated[str, typer.Option("--device", help="A device file, where the kernel was tuned for one.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Make the choice of a kernel again from its log, without a GPU; exit status 5 if it differs."""
    kept = artifact.read(directory)
    if not device and kept.manifest["device"] not in DEVICES:
        raise BadRequest(f"{directory}: tuned for {kept.manifest['device']!r}, of a device file: name it by --device")
    found = replayed(kept, find_device(device or kept.manifest["device"]))
    if as_json:
        print_json({"agrees": found.agrees, "timed": found.timed, "winner": found.winner, "built": found.built})
    else:
        show_replay(found)
    if not found.agrees:
        raise typer.Exit(VerificationFailed.exit_code)
