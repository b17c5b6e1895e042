"""``lospmm inspect`` and ``lospmm replay``: a kernel's folder, and its choice again from its log."""

import typer

from lospmm.artifact import artifact
from lospmm.cli.options import DeviceFileOption, JsonOption, KernelArgument, tuned_for
from lospmm.cli.output import print_json
from lospmm.cli.show import show_manifest, show_replay
from lospmm.errors import VerificationFailed
from lospmm.tuning.replay import replay as replayed


def inspect(
    directory: KernelArgument,
    as_json: JsonOption = False,
) -> None:
    """Show what a kernel's folder holds; check its cubin, matrix and bias against the manifest."""
    kept = artifact.read(directory)
    kept.matrix()
    kept.epilogue()
    show_manifest(kept.manifest, directory, as_json=as_json)


def replay(
    directory: KernelArgument,
    device: DeviceFileOption = "",
    as_json: JsonOption = False,
) -> None:
    """Make the choice of a kernel again from its log, without a GPU; exit status 5 if it differs."""
    kept = artifact.read(directory)
    found = replayed(kept, tuned_for(kept, directory, device))
    if as_json:
        print_json({"agrees": found.agrees, "timed": found.timed, "winner": found.winner, "built": found.built})
    else:
        show_replay(found)
    if not found.agrees:
        raise typer.Exit(VerificationFailed.exit_code)
