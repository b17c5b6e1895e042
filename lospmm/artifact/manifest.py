"""manifest.json: a kernel, its launch, and how it was found. docs/manifest.md describes its fields."""

import json
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveInt, TypeAdapter, ValidationError

from lospmm.errors import BadRequest
from lospmm.problem.accuracy import ACCURACY, Accuracy
from lospmm.problem.convolution import Convolution
from lospmm.problem.device import Clocks
from lospmm.problem.dtype import check_sums, dtype_named
from lospmm.problem.launch import Launch

SCHEMA = 2
MANIFEST_FILE = "manifest.json"


@dataclass(frozen=True, slots=True)
class Tile:
    """Tile size and schedule of an unrolled kernel."""

    rows: PositiveInt
    cols: PositiveInt
    prefetch: NonNegativeInt
    column_group: NonNegativeInt  # column blocks next to each other that run the same tile; 0: all of them
    count: NonNegativeInt  # tiles with nonzeros
    zero_blocks: NonNegativeInt  # block rows that only write the zeros of empty rows
    nnc_sum: int
    nnc_max: int
    split_k: PositiveInt = 1  # blocks that share a tile, block rows next to each other
    thread_columns: PositiveInt = 1  # that a thread computes; ``cols`` counts threads
    thread_words: PositiveInt = 1  # of the search, of a thread: 2 where it has two columns with sums in float32
    walks: PositiveInt = 1  # columns of a thread, one after another, each by a walk of its own


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """A packed kernel's plan: its parameters, the columns of C of a block, and the bytes of A."""

    axes: dict[str, int]
    cols: PositiveInt
    data_bytes: int


@dataclass(frozen=True, slots=True)
class FamilySummary:
    """The result of a family in a search.

    ``micros`` is null if none of its plans was timed, ``refusal`` if it took part.
    """

    name: str
    plans: int
    timed: int
    micros: float | None
    forecast_micros: float | None
    refusal: str | None


@dataclass(frozen=True, slots=True)
class DenseSummary:
    """The family "dense": the time of cuBLAS in this type, if measured, and its error."""

    library: str | None  # its name, version and file
    micros: float | None
    max_relative_error: float | None
    forecast_micros: float


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a kernel."""

    name: str
    type: str
    layout: str


@dataclass(frozen=True, slots=True)
class Added:
    """What the kernel does with A x B before it stores it. The bias itself is in ``artifact.BIAS_FILE``."""

    bias: bool
    relu: bool
    residual: bool


@dataclass(frozen=True, slots=True)
class SearchSummary:
    """Figures of the search that found a kernel."""

    space: int
    after_registers: int
    after_utilization: int
    after_balance: int
    shortlisted: int
    measured: int
    ranker: str
    trials: str
    relaxed: tuple[str, ...]
    chosen_by: str  # "estimate", an analytic rule, or "measurement"
    estimated_micros: float
    families: tuple[FamilySummary, ...] = ()
    dense_forecast_micros: float | None = None
    memory: str = "fast"
    like: str | None = None  # fingerprint of the alike layer whose plan was timed in place of all plans


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds of tuning, in total and by the stages of ``stages.STAGES``; 0: the stage was skipped."""

    total: float
    reorder: float
    constraints: float
    rank: float
    compile_trials: float
    measure_trials: float
    emit: float
    compile: float
    verify: float
    compare: float = 0.0


@dataclass(frozen=True, slots=True)
class Verified:
    """Where and how exactly a kernel was verified."""

    on: str
    max_relative_error: float
    columns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Microseconds of one launch, all of one run on one GPU; null: not measured."""

    micros: float
    spread: float  # interquartile range of the replays over their median
    noise: float  # how far two or three times of the same kernel were apart, relative to the smallest
    cold: bool  # B came from memory, not from the L2 cache
    cache: Literal["cold", "warm", "streamed", "network"] = "cold"  # state of the caches: docs/measuring.md
    bound_micros: float
    cusparse_micros: float | None
    cusparse_algorithm: str | None  # the faster one
    cusparse_alg2_micros: float | None = None  # which needs no preprocessing
    cublas_fp32_micros: float | None
    cublas_tf32_micros: float | None
    sputnik_micros: float | None
    cublas_fp16_micros: float | None = None
    cublas_bf16_micros: float | None = None
    cublas_int8_micros: float | None = None  # B has 8 bits too: another product
    cublas_fp8_micros: float | None = None
    cusparselt_fp16_micros: float | None = None
    cusparselt_bf16_micros: float | None = None
    cusparselt_weights: str | None = None  # whether A is 2:4, or was pruned to it: then it is another product
    advice: Literal["sparse", "dense"]
    gpu: str  # the driver's name of it
    driver: str | None = None  # its version, as in "580.159.04"; null in manifests of older versions
    clocks: Clocks | None  # by NVML, right after the measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """manifest.json; docs/manifest.md describes each field."""

    schema: int = SCHEMA
    version: str | None = None  # of lospmm; null in manifests of older versions
    name: str
    m: PositiveInt
    k: PositiveInt
    n: PositiveInt
    nnz: NonNegativeInt
    dtype: str
    fingerprint: str
    values: Literal["stored", "drawn"]
    seed: int | None
    device: str
    arch: str
    emitter: str
    toolchain: str
    tile: Tile | None  # null of a packed kernel
    launch: Launch
    arguments: tuple[Argument, ...]
    registers: int
    spill_bytes: int
    code_bytes: int
    cubin_sha256: str
    source_sha256: str | None = None  # null in manifests of older versions
    bias_sha256: str | None = None  # likewise, and without a bias
    search: SearchSummary
    seconds: Seconds
    verified: Verified | None
    measured: Measured | None = None
    convolution: Convolution | None = None
    epilogue: Added = Added(bias=False, relu=False, residual=False)
    family: str = "unrolled"
    plan: PlanSummary | None = None  # null of an unrolled kernel
    accuracy: Accuracy = ACCURACY["float32"]
    sums: str = "float32"  # what sums may be rounded to; ``accuracy`` says what this kernel rounds
    weights: str = "dtype"  # what A is held in; ``values`` says whether they were stored
    cubin_family: str = "unrolled"  # that of the kernel in the cubin: another than ``family`` where that is "dense"
    dense: DenseSummary | None = None  # null of any other family

    def to_json(self) -> str:
        """Return the manifest as JSON text."""
        return json.dumps(asdict(self), indent=2) + "\n"


@cache
def _adapter() -> "TypeAdapter[Manifest]":
    """Return the check of a manifest, which takes 30 ms to build."""
    return TypeAdapter(Manifest)


def parse(content: bytes, where: str) -> dict[str, Any]:
    """Return the fields of a manifest.json, all checked: those that earlier versions lack too, none of later ones."""
    try:
        manifest = json.loads(content)
        schema = manifest["schema"]
    except (KeyError, TypeError, ValueError, RecursionError):
        raise BadRequest(f"{where}: {MANIFEST_FILE} is damaged, or not that of a kernel") from None
    if schema != SCHEMA:
        is_later = isinstance(schema, int) and schema > SCHEMA
        do = "read it with a later version of lospmm" if is_later else "tune it again"
        raise BadRequest(f"{where}: manifest schema {str(schema)[:20]}; this version reads {SCHEMA}; {do}")
    try:
        found = _adapter().validate_json(content, strict=True)
        check_sums(dtype_named(found.dtype).name, found.sums)
        if (found.tile is None) == (found.plan is None):
            raise BadRequest("tile, plan: one of them is null")
        if found.tile is not None and not found.tile.count + found.tile.zero_blocks:
            raise BadRequest("tile: it has no blocks")
        if (found.family == "dense") != (found.dense is not None):
            raise BadRequest("dense: only the family dense has it")
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise BadRequest(f"{where}: {MANIFEST_FILE} is damaged: {field}: {first['msg']}") from None
    except BadRequest as error:
        raise BadRequest(f"{where}: {MANIFEST_FILE} is damaged: {error}") from None
    fields: dict[str, Any] = _adapter().dump_python(found, mode="json")
    fields["cubin_family"] = manifest.get("cubin_family", found.family)
    if found.measured is not None and "cache" not in manifest["measured"]:
        fields["measured"]["cache"] = "cold" if found.measured.cold else "warm"
    return fields
