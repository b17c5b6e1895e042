"""What goes with the tuning of a job wherever it is done: on a node of a cluster there may be no database to import."""

from dataclasses import dataclass, field

from lospmm.errors import BadRequest
from lospmm.tuning.request import Request


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
