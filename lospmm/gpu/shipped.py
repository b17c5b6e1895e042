"""The kernel of an artifact, timed on this machine's GPU."""

from pathlib import Path

from lospmm.artifact.artifact import Artifact
from lospmm.errors import BadRequest
from lospmm.gpu.bench import Bench
from lospmm.gpu.compare import Comparison, compare
from lospmm.gpu.detect import own_gpu_id
from lospmm.gpu.exclusive import exclusive
from lospmm.gpu.messages import CacheState
from lospmm.problem.device import DeviceSpec
from lospmm.settings import settings
from lospmm.stages import Progress, silent
from lospmm.toolchain.compile import Compiled


def bench_artifact(
    kept: Artifact,
    device: DeviceSpec,
    *,
    cache: CacheState = "cold",
    sputnik: Path | None = None,
    progress: Progress = silent,
) -> Comparison:
    """Compare the kernel of an artifact with the baselines on this machine's GPU, which is ``device``.

    Raises BadRequest for a kernel of another architecture and for one without its matrix, and what ``compare`` raises.
    """
    manifest = kept.manifest
    if manifest["arch"] != device.arch:
        raise BadRequest(
            f"{manifest['name']} is for {manifest['device']} ({manifest['arch']}), this GPU is {device.name} "
            f"({device.arch}): tune it for this one"
        )
    kernel = Compiled(kept.cubin, manifest["name"], kept.launch)
    problem = kept.problem(device)
    with exclusive(settings().cache_dir, gpu=own_gpu_id()), Bench(problem, cache=cache) as bench:
        return compare(bench, kernel, sputnik=sputnik, is_searched=True, progress=progress)
