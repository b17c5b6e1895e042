"""Schemas of requests and answers, as OpenAPI shows them."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal

from fastapi import Header, Path, Query
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from lospmm.artifact.manifest import Manifest
from lospmm.matrix.limit import MIN_SPARSITY
from lospmm.problem.device import DEVICES
from lospmm.problem.problem import MAX_COLUMNS
from lospmm.tuning.options import CHOICES, Options

#: A request holds its connection while it waits, in seconds.
MAX_WAIT = 600.0
DEFAULT_WAIT = 30.0

DIGEST_PATTERN = "^[0-9a-f]{64}$"  # in Python for ``fullmatch``: its $ lets a line feed follow
EXAMPLE_DIGEST = "5d1e1f1a6f0c7c8c1f0f7b1f0f3a9d0b2c4e6a8890a1b2c3d4e5f60718293a4b"

Digest = Annotated[str, Path(pattern=DIGEST_PATTERN, description="The kernel's digest.", examples=[EXAMPLE_DIGEST])]
JobId = Annotated[
    str,
    Path(
        alias="id",
        pattern=DIGEST_PATTERN,
        description="The digest of its kernel, or a model's id.",
        examples=[EXAMPLE_DIGEST],
    ),
]
Wait = Annotated[float, Query(ge=0, le=MAX_WAIT, description="Seconds to wait for the end of the job.")]


#: The most jobs that one page of the list holds.
PAGE = 50

LastEventId = Annotated[
    str | None,
    Header(alias="Last-Event-ID", max_length=40, description="The id of the last event that the client has."),
]
Limit = Annotated[int, Query(ge=1, le=PAGE, description="The most jobs to list.")]
Cursor = Annotated[
    str | None, Query(pattern="^[0-9]{1,18}$", description="``next`` of the page before this one.", examples=["1234"])
]


def _choice(option: str, description: str, default: str | None = None) -> Any:
    """Return the field of an option that has CHOICES."""
    default = default or getattr(Options(), option)
    return Field(default, max_length=80, description=description, json_schema_extra={"enum": list(CHOICES[option])})


class TuningQuery(BaseModel):
    """The parameters of a tuning; any other is refused, so that a misspelt one is noticed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    conv: str | None = Field(
        default=None,
        max_length=120,
        description="A convolution: batch x channels x height x width of its input, its window and its way.",
        examples=["32x64x56x56,3x3,stride=2,padding=1"],
    )
    relu: bool = Field(default=False, description="The kernel takes ReLU of what it stores.")
    transpose: bool = Field(default=False, description="The weights are in x out.")
    residual: bool = Field(default=False, description="The kernel adds its third argument, of the shape of C.")
    device: str = Field(
        default="auto",
        max_length=80,
        description="A name of the device table, or auto: the GPU of the service.",
        examples=["h200"],
        json_schema_extra={"enum": ["auto", *DEVICES]},
    )
    emitter: str = _choice(
        "emitter", "The language of the kernel; auto: machine code where it was run on a GPU, else PTX."
    )
    verify: str = _choice("verify", "Where the kernel is run against float64; auto: on the GPU where there is one.")
    trials: str = _choice("trials", "What is timed: full: kernels; proxy: stand-ins, then the fastest kernels.")
    dtype: str = _choice("dtype", "What B and C are made of.")
    sums: str = _choice("sums", "What sums may be rounded to: float32, or dtype where that has 16 bits.")
    families: str = Field(
        default="all",
        max_length=200,
        description="The kernel families that take part, with commas between, or all.",
        examples=["unrolled", "tensor_core,csr"],
    )
    cache: str = _choice(
        "cache", "What a launch that is timed finds in the L2 cache: not B, B, or what a network leaves there."
    )
    memory: str = _choice(
        "memory", "low: a kernel that reads A as those of every N do, so that they can share one copy."
    )
    values: str = _choice("values", "Type that A is stored in: its dtype, or 8 bits with a scale per row.")
    seed: int = Field(default=0, ge=0, lt=2**63, description="Draws the values of a pattern (.smtx).")


class KernelQuery(TuningQuery):
    """The parameters of a kernel's tuning."""

    n: int | None = Field(
        default=None,
        ge=1,
        le=MAX_COLUMNS,
        validate_default=True,
        description="Columns of B; a convolution knows its own.",
        examples=[4096],
    )
    tensor: str | None = Field(default=None, max_length=1000, description="The weight to take from a model.")
    wait: float = Field(
        default=DEFAULT_WAIT, ge=0, le=MAX_WAIT, description="Seconds to wait for the kernel; 0 answers at once."
    )

    @field_validator("n")
    @classmethod
    def _known(cls, n: int | None, info: ValidationInfo) -> int | None:
        if n is None and info.data.get("conv") is None:
            raise PydanticCustomError("missing", "Field required")
        return n


class ModelQuery(TuningQuery):
    """The parameters of a model's tuning."""

    n: str | None = Field(
        default=None,
        max_length=200,
        pattern="^[1-9][0-9]{0,8}(,[1-9][0-9]{0,8})*$",
        description="Columns of B, one number or several; a convolution and a layer table know their own.",
        examples=["4096", "1,8,512"],
    )
    cache: str = _choice("cache", "As for a kernel; layers run behind others.", "network")
    name: str | None = Field(
        default=None,
        min_length=1,
        max_length=200,
        description="What the model is called; else as its file is.",
        examples=["resnet50"],
    )
    biases: bool = Field(
        default=False,
        description="Each kernel adds the bias that lies beside its weight in the model: fc.bias of fc.weight.",
    )
    min_sparsity: float = Field(
        default=MIN_SPARSITY,
        ge=0,
        le=1,
        description="Layers with a smaller share of zeros are skipped, unless a layer table names them; 0 skips none.",
    )
    wait: float = Field(
        default=0.0, ge=0, le=MAX_WAIT, description="Seconds to wait for all layers; 0 answers at once."
    )


class Problem(BaseModel):
    """RFC 9457. ``type`` is stable; ``detail`` is one line that says what was wrong and where."""

    model_config = ConfigDict(frozen=True)

    type: str = Field(examples=["/problems/bad-matrix"])
    title: str = Field(examples=["The matrix file cannot be used"])
    status: int = Field(examples=[422])
    detail: str = Field(examples=["W.npz: truncated or damaged archive; save or copy it again"])


class JobState(StrEnum):
    """The state of a job."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    PARTIAL = "partial"  # a model some of whose layers have kernels, and others have failed
    FAILED = "failed"
    CANCELLED = "cancelled"


class LayerStage(StrEnum):
    """The state of a model's layer: that of its kernel's job, or skipped."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    SKIPPED = "skipped"


class StageProgress(BaseModel):
    """Parts of a stage that are done."""

    done: int
    total: int


class LayerView(BaseModel):
    """A layer of a model."""

    name: str = Field(examples=["encoder.0.weight"])
    n: int | None = Field(description="Columns of B; a layer has a row for each.")
    state: LayerStage
    stage: str | None
    progress: dict[str, StageProgress]
    error: Problem | None = Field(description="Why it has no kernel; the other layers go on.")
    skipped: str | None = Field(description="Why no kernel was asked for.")
    m: int | None
    k: int | None
    nnz: int | None
    speedup_over_dense: float | None = Field(
        description="Over cuBLAS in float32, or in the 16-bit type of B, where both were timed."
    )
    estimated_micros: float | None = Field(
        description="Forecast of one launch of its kernel in microseconds, as the manifest's search.estimated_micros."
    )
    job: str | None = Field(description="Where its job is. Equal layers have the same.")
    kernel: str | None = Field(description="Where its kernel is, once there is one.")


class JobLinks(BaseModel):
    """URLs of a job."""

    self: str
    events: str
    kernel: str | None = Field(description="Where the kernel is, once the job of one has succeeded.")
    archive: str | None = Field(description="Where all kernels of a model are as one zip, once it has ended.")


class JobView(BaseModel):
    """A job of a kernel or a model."""

    id: str = Field(description="The digest of the kernel, or the model's id.", examples=[EXAMPLE_DIGEST])
    kind: Literal["kernel", "model"]
    name: str | None = Field(description="A model's, or that of a kernel's file or tensor.")
    state: JobState
    cancelling: bool = Field(description="It is told to stop and has not done so yet.")
    attempts: int = Field(description="How often a worker has begun it.")
    created: datetime | None
    started: datetime | None
    ended: datetime | None
    stage: str | None = Field(description="The stage that reported last.", examples=["compile"])
    progress: dict[str, StageProgress] = Field(examples=[{"compile": {"done": 12, "total": 64}}])
    error: Problem | None
    layers: list[LayerView] | None = Field(description="A model's, in its order; left out in lists.")
    links: JobLinks


class JobList(BaseModel):
    """A page of the list of jobs."""

    jobs: list[JobView]
    next: str | None = Field(description="The ``cursor`` of the next page; null on the last.")


@dataclass(frozen=True, slots=True)
class KernelLinks:
    """URLs of a kernel's files."""

    self: str
    cubin: str
    source: str
    tuning: str
    matrix: str | None  # null where an earlier version made the kernel
    space: str | None
    bias: str | None  # null where it adds none


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel(Manifest):
    """The kernel's manifest.json, its digest and the URLs of its files."""

    digest: str
    links: KernelLinks


class Health(BaseModel):
    """State of the service."""

    status: str = Field(examples=["ok"])
