"""Contents of a kernel's page, as lists for a template."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from lospmm.artifact import tile_map
from lospmm.artifact.artifact import SOURCE_FILES, SPACE_FILE, TUNING_FILE, Artifact
from lospmm.artifact.describe import facts_of
from lospmm.errors import BadRequest
from lospmm.gpu.libraries import BASELINES
from lospmm.stages import STAGES
from lospmm_server.observations import candidate_lines
from lospmm_server.space_drawing import Drawing, draw

#: Columns of a candidate, by their heads.
_CANDIDATE = {
    "M1": "rows",
    "N1": "cols",
    "prefetch": "prefetch",
    "column group": "column_group",
    "split K": "split_k",
    "words a thread": "thread_words",
    "walks": "walks",
}


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of a chart; ``share`` is its length, 0 to 1."""

    name: str
    text: str
    share: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class Download:
    """A file to download."""

    href: str
    name: str
    what: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class CandidateTable:
    """The candidates of the search."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    chosen: int  # the row of the one that was built
    are_timed: bool


@dataclass(frozen=True, slots=True)
class KernelView:
    """Everything that a kernel's page shows."""

    digest: str
    name: str
    facts: tuple[tuple[str, str], ...]
    drawing: Drawing | None
    no_drawing: str  # why there is none
    candidates: CandidateTable | None
    stages: tuple[Bar, ...]
    total_seconds: float
    verification: str
    measured: tuple[Bar, ...]  # empty where nothing was timed
    measured_facts: tuple[tuple[str, str], ...]
    downloads: tuple[Download, ...]


def view_kernel(digest: str, artifact: Artifact) -> KernelView:
    """Return the view of an artifact of any version; what an old one lacks is said to be missing."""
    manifest = artifact.manifest
    drawing, no_drawing = _drawing(artifact)
    return KernelView(
        digest=digest,
        name=str(manifest["name"]),
        facts=_facts(manifest),
        drawing=drawing,
        no_drawing=no_drawing,
        candidates=_candidates(artifact),
        stages=_stages(manifest["seconds"]),
        total_seconds=manifest["seconds"]["total"],
        verification=_verification(manifest["verified"]),
        measured=_measured(manifest["measured"]),
        measured_facts=_measured_facts(manifest["measured"]),
        downloads=_downloads(digest, artifact),
    )


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """What two kernels have of one thing."""

    name: str
    texts: tuple[str, str]

    @property
    def differs(self) -> bool:
        """Whether they differ in it."""
        return self.texts[0] != self.texts[1]


def compared(one: KernelView, other: KernelView) -> tuple[ComparedRow, ...]:
    """Return the rows of two kernels side by side: facts, times, checks and files."""
    both = [_rows(kernel) for kernel in (one, other)]
    names = dict.fromkeys(name for rows in both for name in rows)
    return tuple(ComparedRow(name, (both[0].get(name, "-"), both[1].get(name, "-"))) for name in names)


def _rows(kernel: KernelView) -> dict[str, str]:
    times = {f"Time, {bar.name}": f"{bar.text} {bar.note}".strip() for bar in kernel.measured}
    cubin = next((f"{file.size_bytes:,} bytes" for file in kernel.downloads if file.href.endswith("/cubin")), "-")
    total = {"Tuning": f"{kernel.total_seconds:.1f} s", "Verified": kernel.verification, "File": cubin}
    return {**dict(kernel.facts), **times, **dict(kernel.measured_facts), **total}


def _facts(manifest: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    search = manifest["search"]
    chosen = f"{search['chosen_by']}; the estimate is {search['estimated_micros']:.1f} µs"
    return tuple((name.capitalize(), text) for name, text in {**facts_of(manifest), "chosen by": chosen}.items())


def _drawing(artifact: Artifact) -> tuple[Drawing | None, str]:
    if SPACE_FILE not in artifact.files:
        if artifact.manifest["plan"] is not None:
            return None, "No unrolled kernel took part, and other families have no tiling space."
        return None, "An earlier version made this kernel and kept no map of its tiling space; tune it again for one."
    try:
        return draw(tile_map.parse(artifact.files[SPACE_FILE], SPACE_FILE)), ""
    except BadRequest as error:
        return None, f"There is no drawing: {error}."
    except (ArithmeticError, LookupError, ValueError):
        return None, f"There is no drawing: {SPACE_FILE} contradicts itself."


def _candidates(artifact: Artifact) -> CandidateTable | None:
    """Return the log of the search; None if it cannot be read."""
    try:
        lines = candidate_lines(artifact)
        timed = [line for line in lines if line["measured_micros"] is not None]
        chosen = min(timed, key=lambda line: float(line["measured_micros"])) if timed else lines[0]
        rows = tuple(_candidate(line) for line in lines)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return CandidateTable(("rank", *_CANDIDATE, "estimate, µs", "measured, µs"), rows, lines.index(chosen), bool(timed))


def _candidate(line: Mapping[str, Any]) -> tuple[str, ...]:
    micros = line["measured_micros"]
    failure = line.get("failure")
    measured = f"{micros:.2f}" if micros is not None else f"{failure}" if failure else "-"
    return (
        str(line["rank"]),
        *(_SHOWN.get(field, str)(line[field]) for field in _CANDIDATE.values()),
        f"{line['estimated_micros']:.2f}",
        measured,
    )


#: Formats of fields that are not shown as they are.
_SHOWN: Mapping[str, Callable[[Any], str]] = {
    "column_group": lambda column_group: "all" if column_group == 0 else str(column_group),
}


def _stages(seconds: Mapping[str, float]) -> tuple[Bar, ...]:
    longest = max((seconds.get(stage, 0.0) for stage in STAGES), default=0.0)
    return tuple(
        Bar(stage.replace("_", " "), _seconds(seconds[stage]), _share(seconds[stage], longest))
        for stage in STAGES
        if seconds.get(stage, 0.0) > 0
    )


def _seconds(value: float) -> str:
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.1f} s"


def _share(value: float, greatest: float) -> float:
    return min(1.0, max(0.0, value / greatest)) if greatest > 0 else 0.0


def _verification(verified: Mapping[str, Any] | None) -> str:
    if verified is None:
        return "Not verified: that was asked for."
    where = {"gpu": "on the GPU", "cpu": "on the CPU"}.get(verified["on"], f"on {verified['on']}")
    return (
        f"Verified {where} against float64 in {verified['columns']:,} columns of C: "
        f"the greatest relative error is {verified['max_relative_error']:.1e}."
    )


#: By the state of the cache.
B_COMES_FROM: Mapping[str, str] = MappingProxyType(
    {
        "cold": "memory",
        "streamed": "memory, and so does A",
        "warm": "the L2 cache, if it fits",
        "network": "the L2 cache, if it fits, and all else from memory, as in a network",
    }
)


def _measured(measured: Mapping[str, Any] | None) -> tuple[Bar, ...]:
    if measured is None:
        return ()
    times = {"this kernel": measured["micros"]}
    known = {one.title: measured[f"{name}_micros"] for name, one in BASELINES.items()}
    times |= {title: micros for title, micros in known.items() if micros is not None}
    longest = max(times.values())
    return tuple(
        Bar(name, f"{micros:.2f} µs", _share(micros, longest), _against(micros, measured["micros"], name))
        for name, micros in times.items()
    )


def _against(micros: float, own_micros: float, name: str) -> str:
    return "" if name == "this kernel" or own_micros <= 0 else f"{micros / own_micros:.2f} times the kernel's"


def _measured_facts(measured: Mapping[str, Any] | None) -> tuple[tuple[str, str], ...]:
    if measured is None:
        return ()
    clocks = measured["clocks"]
    facts = [
        ("Advice", f"{measured['advice']}"),
        ("GPU", f"{measured['gpu']}"),
        ("B comes from", B_COMES_FROM[measured["cache"]]),
        ("Bound", f"{measured['bound_micros']:.2f} µs, by the GPU's published peaks"),
        ("Spread", f"{measured['spread']:.1%} of the replays"),
        ("Noise", f"{measured['noise']:.1%} between three timings of the kernel"),
    ]
    if (weights := measured["cusparselt_weights"]) is not None:
        facts.append(("cuSPARSELt", weights))
    if clocks is not None:
        throttled = f", held back by {', '.join(clocks['throttled'])}" if clocks["throttled"] else ""
        facts.append(
            ("Clocks", f"{clocks['sm_mhz']} MHz, memory {clocks['memory_mhz']} MHz, {clocks['temperature_celsius']} °C"
             f"{throttled}")
        )  # fmt: skip
    return tuple(facts)


def _downloads(digest: str, artifact: Artifact) -> tuple[Download, ...]:
    """Return the URLs of docs/rest.md."""
    url, emitter = f"/v1/kernels/{digest}", artifact.manifest["emitter"]
    source = "listing of the machine code" if emitter == "sass" else "source"
    return (
        Download(f"{url}/cubin", f"{artifact.manifest['name']}.cubin", "machine code", len(artifact.cubin)),
        Download(f"{url}/source", SOURCE_FILES[emitter], source, len(artifact.source)),
        Download(url, "manifest.json", "what the kernel is and how to launch it", len(artifact.files["manifest.json"])),
        Download(f"{url}/tuning", TUNING_FILE, "log of the search", len(artifact.files[TUNING_FILE])),
    )


def speedup_scale(speedups: Sequence[float | None]) -> float:
    """Return the speedup of the longest bar: at least 1, that of dense."""
    return max([1.0, *(speedup for speedup in speedups if speedup is not None)])
