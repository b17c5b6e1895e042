"""``lospmm bench``: a kernel timed beside the vendor's libraries."""

from pathlib import Path
from typing import Annotated

import typer

from lospmm.artifact import artifact
from lospmm.cli.options import CacheOption, JsonOption, KernelArgument, QuietOption
from lospmm.cli.show import show_comparison
from lospmm.errors import BadRequest
from lospmm.gpu.bench import Bench
from lospmm.gpu.compare import compare
from lospmm.gpu.detect import detect_device, own_gpu_id
from lospmm.gpu.exclusive import exclusive
from lospmm.gpu.messages import CACHE_STATES
from lospmm.problem.device import DeviceSpec, find_device
from lospmm.progress import reported
from lospmm.settings import settings
from lospmm.toolchain.compile import Compiled
from lospmm.tuning.options import check_choice


def bench(
    directory: KernelArgument,
    cache: CacheOption = "cold",
    device: Annotated[
        str, typer.Option("--device", help="This machine's GPU: its name, a device file, or auto.")
    ] = "auto",
    sputnik: Annotated[
        Path | None, typer.Option("--sputnik", help="Time this shared library of Sputnik too (LOSPMM_SPUTNIK).")
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Time a kernel beside cuSPARSE and cuBLAS on this machine's GPU."""
    check_choice("cache", cache)
    kept = artifact.read(directory)
    gpu = _own_gpu() if device == "auto" else find_device(device)
    with reported(quiet=quiet) as progress:
        _check_arch(kept, gpu)
        problem, kernel = kept.problem(gpu), Compiled(kept.cubin, kept.manifest["name"], kept.launch)
        with (
            exclusive(settings().cache_dir, gpu=own_gpu_id()),
            Bench(problem, cache=CACHE_STATES[cache]) as opened,
        ):
            library = sputnik or settings().sputnik
            found = compare(opened, kernel, sputnik=library, is_searched=True, progress=progress)
    show_comparison(found, kept.manifest, as_json=as_json)


def _check_arch(kept: artifact.Artifact, gpu: DeviceSpec) -> None:
    manifest = kept.manifest
    if manifest["arch"] != gpu.arch:
        raise BadRequest(
            f"{manifest['name']} is for {manifest['device']} ({manifest['arch']}), this GPU is {gpu.name} "
            f"({gpu.arch}): tune it for this one"
        )


def _own_gpu() -> DeviceSpec:
    try:
        return detect_device()
    except BadRequest:
        raise BadRequest(
            "bench needs a GPU, and this machine has none of the device table; `lospmm inspect` shows predicted times, "
            "and --device takes a file that describes another GPU (docs/devices.md)"
        ) from None
