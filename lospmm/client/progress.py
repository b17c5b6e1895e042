"""Progress of the service's jobs: of one job, and of each layer of a model."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from lospmm.client.answers import ENDED, Count, Job
from lospmm.stages import Progress, silent

#: Called with (layer, stage, done, total), and with (layer, state, 1, 1) when a layer runs or has ended.
LayerProgress: TypeAlias = Callable[[str, str, int, int], None]

#: Called with a job each time that the service was asked for it.
Hear: TypeAlias = Callable[[Job], None]


def stages(progress: Progress) -> Hear:
    """Return a function that reports the progress of one job, each step once."""
    hear = _counted(progress)
    return lambda job: hear(job.progress)


def _counted(progress: Progress) -> Callable[[Mapping[str, Count]], None]:
    told: dict[str, Count] = {}

    def hear(counts: Mapping[str, Count]) -> None:
        for stage, count in counts.items():
            if told.get(stage) != count:
                told[stage] = count
                # 1 of 1 is the end of a stage.
                progress(stage, *((1, 1) if count.done == count.total else (count.done, count.total)))

    return hear


def layer_stages(progress: LayerProgress | None, names: Sequence[str]) -> Hear:
    """Return a function that reports the progress of each layer; ``names`` are those of a job's layers."""
    if progress is None:
        return silent
    told = ["queued"] * len(names)
    counted = [_counted(partial(progress, name)) for name in names]

    def hear(job: Job) -> None:
        for at, (name, layer) in enumerate(zip(names, job.layers or (), strict=False)):
            is_new, told[at] = layer.state != told[at], layer.state
            if is_new and layer.state == "running":
                progress(name, layer.state, 1, 1)
            counted[at](layer.progress)
            if is_new and layer.state in ENDED:
                progress(name, layer.state, 1, 1)

    return hear
