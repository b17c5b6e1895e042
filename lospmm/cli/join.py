"""``lospmm join``: kernels of one matrix for several N in one cubin."""

from pathlib import Path
from typing import Annotated

import typer

from lospmm.artifact import artifact, kept
from lospmm.cli.options import JsonOption
from lospmm.cli.output import print_json
from lospmm.tuning.one_copy import joined


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
