"""Events of the service's jobs as progress: of one job, and of each layer of a model."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from lospmm.stages import Progress

#: Called with (layer, stage, done, total), and with (layer, state, 1, 1) when a layer runs or has ended.
LayerProgress: TypeAlias = Callable[[str, str, int, int], None]

#: Called with the kind of an event and its data.
Hear: TypeAlias = Callable[[str, Mapping[str, Any]], None]

#: Events of a layer that are its state.
_STATES = frozenset({"running", "succeeded", "failed", "cancelled"})


def ignore(_kind: str, _data: Mapping[str, Any]) -> None:
    """Ignore an event."""


def tell(hear: Hear, kind: str, data: str) -> None:
    """Call ``hear`` with an event whose data are a JSON object."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):  # a part of one: what happened is in the job
        return
    if isinstance(content, dict):
        hear(kind, content)


def stages(progress: Progress) -> Hear:
    """Return a function that reports the progress of one job, each step once."""
    told: dict[str, object] = {}

    def hear(kind: str, data: Mapping[str, Any]) -> None:
        counts = data.get("progress")
        if kind != "progress" or not isinstance(counts, dict):
            return
        for stage, count in counts.items():
            match count:
                case [int(done), int(total)] if told.get(stage) != count:
                    told[stage] = count
                    progress(stage, *((1, 1) if done == total else (done, total)))  # 1 of 1 is the end of a stage

    return hear


def layer_stages(progress: LayerProgress | None, names: Mapping[str, list[str]]) -> Hear:
    """Return a function that reports the progress of each layer; ``names`` are those of each digest."""
    if progress is None:
        return ignore
    of_layer = {name: stages(partial(progress, name)) for layers in names.values() for name in layers}

    def hear(kind: str, data: Mapping[str, Any]) -> None:
        for name in names.get(str(data.get("job")), ()):
            if kind in _STATES:
                progress(name, kind, 1, 1)
            of_layer[name](kind, data)

    return hear
