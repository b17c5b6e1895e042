"""Commands on folders of tuned kernels: ``lospmm inspect``, ``replay``, ``verify`` and ``join``."""

from pathlib import Path
from typing import Annotated, Any

import typer

from lospmm.artifact import artifact, kept
from lospmm.cli.options import DeviceFileOption, JsonOption, KernelArgument, tuned_for
from lospmm.cli.output import print_json
from lospmm.cli.show import show_manifest, show_replay
from lospmm.errors import BadRequest, VerificationFailed, printable
from lospmm.matrix.layers import REPORT_FILE
from lospmm.model.report import read_report
from lospmm.tuning.one_copy import joined
from lospmm.tuning.provenance import Provenance, provenance
from lospmm.tuning.replay import replay as replayed


def inspect(
    directory: KernelArgument,
    as_json: JsonOption = False,
) -> None:
    """Show what a kernel's folder holds; check its cubin, matrix and bias against the manifest."""
    kernel = artifact.read(directory)
    kernel.matrix()
    kernel.epilogue()
    show_manifest(kernel.manifest, directory, as_json=as_json)


def replay(
    directory: KernelArgument,
    device: DeviceFileOption = "",
    as_json: JsonOption = False,
) -> None:
    """Make the choice of a kernel again from its log, without a GPU; exit status 5 if it differs."""
    kernel = artifact.read(directory)
    found = replayed(kernel, tuned_for(kernel, directory, device))
    if as_json:
        print_json({"agrees": found.agrees, "timed": found.timed, "winner": found.winner, "built": found.built})
    else:
        show_replay(found)
    if not found.agrees:
        raise typer.Exit(VerificationFailed.exit_code)


def verify(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder that `lospmm tune` or `tune-model` wrote.")
    ],
    device: DeviceFileOption = "",
    as_json: JsonOption = False,
) -> None:
    """Build a folder's kernels anew and compare the bytes; exit status 5 if they differ."""
    found: dict[str, Provenance] = {}
    for name, digest in _kernels(directory).items():
        kernel = artifact.read(directory / name)
        if digest not in (None, kernel.manifest["cubin_sha256"]):
            raise BadRequest(f"{directory / name}: is not the kernel that {REPORT_FILE} names; tune it again")
        found[name] = provenance(kernel, tuned_for(kernel, directory / name, device))
        if not as_json:
            _show(str(directory) if name == "." else name, found[name])
    agrees = all(one.agrees for one in found.values())
    if as_json:
        print_json({"agrees": agrees, "kernels": [_in_json(name, one) for name, one in found.items()]})
    if not agrees:
        raise typer.Exit(VerificationFailed.exit_code)


def _kernels(directory: Path) -> dict[str, str | None]:
    """Return the folders of kernels, and the sha256 of their cubins if a model's report has it. Raises BadRequest."""
    if not (directory / REPORT_FILE).exists():
        return {".": None}
    return {layer.folder: layer.cubin_sha256 for layer in read_report(directory).layers if layer.launch is not None}


def _show(name: str, found: Provenance) -> None:
    print(f"{printable(name)}: {'the same bytes' if found.agrees else 'ANOTHER kernel'}")
    for field, (recorded, now) in found.differences.items():
        print(f"  {field}: recorded {printable(str(recorded))}, here {now}")


def _in_json(name: str, found: Provenance) -> dict[str, Any]:
    differences = {field: {"recorded": old, "here": now} for field, (old, now) in found.differences.items()}
    return {"folder": name, "agrees": found.agrees, "differences": differences}


def join(
    directories: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders that `lospmm tune` wrote.")],
    as_json: JsonOption = False,
) -> None:
    """Put the kernels of one matrix for several N, tuned with --memory low, into one cubin that has A once."""
    before = [artifact.read(directory) for directory in directories]
    after = joined(before, store=kept.open_store())
    for directory, made in zip(directories, after, strict=True):
        artifact.write(made, directory)
    names = [made.manifest["name"] for made in after]
    sizes = {"cubin_bytes": len(after[0].cubin), "before_bytes": sum(len(one.cubin) for one in before)}
    if as_json:
        print_json({"names": names, "cubin_sha256": after[0].manifest["cubin_sha256"], **sizes})
    else:
        megabytes = " instead of ".join(f"{size / 1e6:.2f} MB" for size in sizes.values())
        print(f"{', '.join(names)}: one cubin of {megabytes}, in each folder")
