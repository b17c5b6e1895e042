"""What the REST service answers, as values: its jobs, and its problems as errors of ``errors.py``."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import Any, TypeVar

import httpx2
from pydantic import TypeAdapter, ValidationError

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

#: The states in which a job stays.
ENDED = frozenset({"succeeded", "failed", "cancelled"})

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
                "method-not-allowed", "not-acceptable", "too-slow", "too-large",
            ),
            BadRequest,
        ),
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ProblemDetails:
    """RFC 9457, as far as it is looked at."""

    type: str
    detail: str


@dataclass(frozen=True, slots=True)
class Count:
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class LayerJob:
    """A layer in the job of a model; ``job`` is None where it could not be read."""

    name: str
    state: str
    error: ProblemDetails | None
    job: str | None

    @property
    def digest(self) -> str | None:
        return None if self.job is None else self.job.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Job:
    """A job of the service: of a kernel, whose digest is its ``id``, or of a model with its ``layers``."""

    id: str
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
        return self.state in ENDED


@dataclass(frozen=True, slots=True)
class JobsPage:
    jobs: tuple[Job, ...]
    next: str | None


def parsed(kind: type[Answer], answer: httpx2.Response) -> Answer:
    """The answer as ``kind``. Raises ServiceFault for any other, such as that of another program at this address."""
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
    """The problem that an answer is; one of our own making where it says nothing that we know."""
    try:
        content: Any = json.loads(answer.content)
        return ProblemDetails(str(content["type"]), printable(str(content["detail"])))
    except (ValueError, TypeError, KeyError, RecursionError):
        hint = "; is the address right?" if answer.status_code < 500 else ""
        return ProblemDetails(
            "about:blank", f"answered {answer.status_code} {printable(answer.reason_phrase)[:80]}{hint}"
        )


def error_of(problem: ProblemDetails, where: str) -> LospmmError:
    """The error that the service had, said to be its own: ``where`` is its address."""
    kind = PROBLEMS.get(problem.type.rpartition("/")[2], ServiceFault)
    return kind(f"{where}: {problem.detail}")
