"""Tuning of a job, wherever it runs: imports no database, which a cluster's node may lack."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

from lospmm.artifact import kept
from lospmm.artifact.artifact import Artifact
from lospmm.errors import BadRequest
from lospmm.settings import settings
from lospmm.stages import Progress
from lospmm.store import Store
from lospmm.tuning import jobs
from lospmm.tuning.alike import TimedLayers
from lospmm.tuning.request import Request
from lospmm.tuning.session import Session
from lospmm_server.queued_request import from_json as request_from_json

if TYPE_CHECKING:
    from lospmm_server.queue import Claim

#: Runs a job: ``jobs.tune``, here or elsewhere. Raises CancelledError once the event is set.
Tune: TypeAlias = Callable[["Claim", Progress, threading.Event], Artifact]


#: Models of a key whose layers take each other's plans (``lospmm.tuning.alike``), those served last.
MODELS = 16


class Died(Exception):
    """Raised by a ``Tune`` whose work was lost with its process, as if the worker had died."""


@dataclass(slots=True)
class TuningProgress:
    """Progress of a job: written by its thread, read by the worker."""

    stage: str | None = None
    progress: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Record progress; a stage reports 0 of 1 before its parts are known, and 1 of 1 at its end."""
        known = max(total, self.progress.get(stage, (0, 1))[1])
        self.progress = {**self.progress, stage: (known if (done, total) == (1, 1) else done, known)}
        self.stage = stage


def check_digest(request: Request, digest: str) -> None:
    """Raise BadRequest if this version gives the request another digest: nobody would find its artifact."""
    if request.digest != digest:
        raise BadRequest(
            "this worker has another version of lospmm or of the CUDA toolkit than the service that accepted the "
            "job; post it again"
        )


def tune_here(store: Store) -> Tune:
    """Return a ``Tune`` that works in this process."""

    @lru_cache(MODELS)
    def layers_of(_key: str, _model: str) -> TimedLayers:
        return TimedLayers()

    def tune(claim: "Claim", progress: Progress, cancel: threading.Event) -> Artifact:
        request = request_from_json(claim.request, store)
        check_digest(request, claim.digest)
        layers = layers_of(claim.key, claim.model) if claim.model else None  # "": a kernel by itself
        with Session(settings().workers, layers) as session:
            made = jobs.tune(request, store=store, progress=progress, cancel=cancel, session=session)
        kept.keep(made, claim.digest, store)  # or raise why not: the server reads it from the store
        return made

    return tune
