"""What goes with the tuning of a job wherever it is done: on a node of a cluster there may be no database to import."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from lospmm.artifact.artifact import Artifact
from lospmm.errors import BadRequest
from lospmm.stages import Progress
from lospmm.store import Store
from lospmm.tuning import jobs
from lospmm.tuning.request import Request
from lospmm.tuning.request import from_json as request_from_json

if TYPE_CHECKING:
    from lospmm_server.queue import Claim

#: Does the work of a job: what ``jobs.tune`` does, here or elsewhere. Raises CancelledError once the event is set.
Tune: TypeAlias = Callable[["Claim", Progress, threading.Event], Artifact]


class Died(Exception):
    """Raised by a ``Tune`` whose work was lost with the process that did it: as if its worker had died."""


@dataclass(slots=True)
class TuningProgress:
    """How far a job is: its thread tells, the worker reads."""

    stage: str | None = None
    progress: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __call__(self, stage: str, done: int, total: int) -> None:
        """A ``Progress``. A stage says 0 of 1 before it knows how many parts it has, and 1 of 1 at its end."""
        known = max(total, self.progress.get(stage, (0, 1))[1])
        self.progress = {**self.progress, stage: (known if (done, total) == (1, 1) else done, known)}
        self.stage = stage


def check_digest(request: Request, digest: str) -> None:
    """Raises BadRequest where the artifact of the request would lie here where nobody looks for it."""
    if request.digest != digest:
        raise BadRequest(
            "this worker has another version of lospmm or of the CUDA toolkit than the service that accepted the "
            "job; post it again"
        )


def tune_here(store: Store) -> Tune:
    """Return a ``Tune`` that works in this process."""

    def tune(claim: "Claim", progress: Progress, cancel: threading.Event) -> Artifact:
        request = request_from_json(claim.request, store)
        check_digest(request, claim.digest)
        made = jobs.tune(request, store=store, progress=progress, cancel=cancel)
        jobs.keep(made, claim.digest, store)  # or say why not: the server has it from there
        return made

    return tune
