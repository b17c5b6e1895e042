"""Answers of the REST service as values: its jobs, and its problems as errors of ``errors.py``."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import Annotated, Any, TypeAlias, TypeVar

import httpx2
from pydantic import StringConstraints, TypeAdapter, ValidationError

from lospmm.errors import (
    BadMatrix,
    BadRequest,
    GpuFault,
    LospmmError,
    NothingFits,
    ServiceFault,
    ToolchainFault,
    Unsupported,
    VerificationFailed,
    printable,
)

Answer = TypeVar("Answer")

#: The id of a job or the digest of a kernel, and the URL of a layer's job: they become parts of URLs.
Identity: TypeAlias = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
JobUrl: TypeAlias = Annotated[str, StringConstraints(pattern="^/v1/jobs/[0-9a-f]{64}$")]

#: The states in which a job stays.
ENDED = frozenset({"succeeded", "partial", "failed", "cancelled"})

#: The class of a problem by the end of its ``type``. What is not here is the service's own fault.
PROBLEMS: Mapping[str, type[LospmmError]] = MappingProxyType(
    {
        "bad-matrix": BadMatrix,
        "unsupported": Unsupported,
        "nothing-fits": NothingFits,
        "toolchain-fault": ToolchainFault,
        "gpu-fault": GpuFault,
        "verification-failed": VerificationFailed,
        **dict.fromkeys(
            (
                "bad-request", "bad-parameter", "bad-body", "unauthorized", "forbidden", "not-found",
                "method-not-allowed", "not-acceptable", "too-slow", "too-large", "encoded-body",
            ),
            BadRequest,
        ),
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ProblemDetails:
    """The fields of RFC 9457 problem details that are used."""

    type: str
    detail: str


@dataclass(frozen=True, slots=True)
class Count:
    """Parts of a stage that are done, and their total."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class LayerJob:
    """A layer in the job of a model; ``job`` is None where it could not be read."""

    name: str
    state: str
    error: ProblemDetails | None
    job: JobUrl | None
    progress: Mapping[str, Count] = field(default_factory=dict)

    @property
    def digest(self) -> str | None:
        """The digest of the layer's kernel."""
        return None if self.job is None else self.job.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Job:
    """A job of the service: of a kernel, whose digest is its ``id``, or of a model with its ``layers``."""

    id: Identity
    kind: str
    name: str | None
    state: str
    attempts: int
    created: datetime | None
    started: datetime | None
    ended: datetime | None
    stage: str | None
    error: ProblemDetails | None
    cancelling: bool = False
    progress: Mapping[str, Count] = field(default_factory=dict)
    layers: tuple[LayerJob, ...] | None = None

    @property
    def is_ended(self) -> bool:
        """Whether the job has succeeded, failed or been cancelled."""
        return self.state in ENDED


@dataclass(frozen=True, slots=True)
class JobsPage:
    """One page of the list of jobs; ``next`` is the cursor of the following one."""

    jobs: tuple[Job, ...]
    next: str | None


@dataclass(frozen=True, slots=True)
class NamedKernel:
    """The digest in the answer to a POST of a matrix that has a kernel."""

    digest: Identity


def parsed(kind: type[Answer], answer: httpx2.Response) -> Answer:
    """Parse an answer as ``kind``.

    Raises ServiceFault for any other, such as that of another program at this address.
    """
    try:
        return TypeAdapter(kind).validate_json(answer.content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the answer"
        raise ServiceFault(
            f"{answer.request.url.copy_with(query=None)}: answered {answer.status_code}, but not as a service of "
            f"lospmm does ({printable(where)[:80]}: {first['msg']}); is the address right?"
        ) from None


def problem_of(answer: httpx2.Response) -> ProblemDetails:
    """Return the problem that an answer holds, or one made from its status."""
    try:
        content: Any = json.loads(answer.content)
        return ProblemDetails(str(content["type"]), printable(str(content["detail"])))
    except (ValueError, TypeError, KeyError, RecursionError):
        hint = "; is the address right?" if answer.status_code < 500 else ""
        return ProblemDetails(
            "about:blank", f"answered {answer.status_code} {printable(answer.reason_phrase)[:80]}{hint}"
        )


def error_of(problem: ProblemDetails, where: str) -> LospmmError:
    """Return the error of a problem; its message names ``where``, the address of the service."""
    kind = PROBLEMS.get(problem.type.rpartition("/")[2], ServiceFault)
    return kind(f"{where}: {problem.detail}")
