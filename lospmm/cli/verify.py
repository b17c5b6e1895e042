"""``lospmm verify``: kernels made anew from the matrix and the manifest beside them."""

from pathlib import Path
from typing import Annotated, Any

import typer

from lospmm.artifact import artifact
from lospmm.cli.options import DeviceFileOption, JsonOption, tuned_for
from lospmm.cli.output import print_json
from lospmm.errors import BadRequest, VerificationFailed, printable
from lospmm.matrix.layers import REPORT_FILE
from lospmm.model.report import read_report
from lospmm.tuning.provenance import Provenance, provenance


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
        kept = artifact.read(directory / name)
        if digest not in (None, kept.manifest["cubin_sha256"]):
            raise BadRequest(f"{directory / name}: is not the kernel that {REPORT_FILE} names; tune it again")
        found[name] = provenance(kept, tuned_for(kept, directory / name, device))
        if not as_json:
            _show(name, found[name])
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
