"""Contents of the Grafana dashboard: ``SECTIONS``, in the order in which they are read.

Queries name series of ``metrics.METRICS``; tests parse every one and run it on a Prometheus. ``$window`` and
``$model`` are chosen at the top of the page: tunings are minutes apart, so a rate over the usual minute would mostly
be empty. After a change, ``python -m lospmm_server.dashboard`` rewrites the dashboard.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lospmm_server.metrics import MODELS

#: Grafana's names.
Unit = Literal["s", "short", "percentunit", "reqps", "none"]
Look = Literal["timeseries", "stat"]


@dataclass(frozen=True, slots=True)
class Query:
    """A query of Prometheus and its legend."""

    text: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel of the dashboard."""

    title: str
    about: str
    queries: tuple[Query, ...]
    unit: Unit = "short"
    look: Look = "timeseries"
    width: int = 12
    is_stacked: bool = False
    needs_gpu: bool = False  # NaN before a kernel was timed


@dataclass(frozen=True, slots=True)
class DashboardSection:
    """A section of the dashboard."""

    title: str
    panels: tuple[Panel, ...]


def _share(part: str, whole: str) -> str:
    """Return the query of a share of events in the window; no figure without events."""
    return f"sum(increase({part}[$window])) / sum(increase({whole}[$window]))"


def _percentile(share: float, histogram: str, by: str = "", where: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({labels}) (rate({histogram}_bucket{where}[$window])))"


def _percentiles(histogram: str, where: str = "") -> tuple[Query, ...]:
    return tuple(Query(_percentile(share, histogram, where=where), f"p{share * 100:.0f}") for share in (0.5, 0.9, 0.99))


def _stat(title: str, about: str, query: str, unit: Unit = "short") -> Panel:
    """Return a panel of one figure."""
    return Panel(title, about, (Query(query),), unit, look="stat", width=4)


_OF_MODEL = '{model=~"$model"}'
_TUNING, _STAGE = "lospmm_tuning_seconds", "lospmm_stage_seconds"
_ASKED = "lospmm_artifact_requests_total"
_FOUND = f'{_ASKED}{{cache="hit"}}'
_TUNED = 'lospmm_jobs_ended_total{outcome="tuned"}'
_SPEEDUP, _FP32 = "lospmm_speedup_over_dense", '{dense="fp32"}'

SECTIONS: Sequence[DashboardSection] = (
    DashboardSection(
        "Now",
        (
            _stat("Queued", "Jobs that wait.", 'lospmm_queue_jobs{state="queued"}'),
            _stat("Running", "Jobs at work.", 'lospmm_queue_jobs{state="running"}'),
            _stat("Oldest waits for", "The age of the oldest queued job.", "lospmm_queue_oldest_seconds", "s"),
            _stat("Kernels tuned", "In the window.", f"sum(increase({_TUNED}[$window]))"),
            _stat(
                "Cache hits",
                "Of the kernels that were asked for in the window, those that there were.",
                _share(_FOUND, _ASKED),
                "percentunit",
            ),
            _stat(
                "Failed",
                "Of the jobs that ended in the window.",
                _share('lospmm_jobs_ended_total{outcome="failed"}', "lospmm_jobs_ended_total"),
                "percentunit",
            ),
        ),
    ),
    DashboardSection(
        "At a glance",
        (
            Panel(
                "Time by stage",
                "Mean seconds of each stage per tuning: the layers add up to the mean tuning.",
                (
                    Query(
                        f"sum by (stage) (rate({_STAGE}_sum[$window])) / scalar(sum(rate({_TUNED}[$window])))",
                        "{{stage}}",
                    ),
                ),
                unit="s",
                is_stacked=True,
            ),
            Panel(
                "Queue age by key",
                "How long the oldest queued job of each key has waited.",
                (Query("lospmm_queue_key_oldest_seconds", "{{key}}"),),
                unit="s",
            ),
            Panel(
                "Speed-up of what was tuned",
                "Mean over dense, by the arithmetic of cuBLAS. Below 1 the dense product is faster.",
                (
                    Query(
                        f"sum by (dense) (rate({_SPEEDUP}_sum[$window]))"
                        f" / sum by (dense) (rate({_SPEEDUP}_count[$window]))",
                        "{{dense}}",
                    ),
                ),
                needs_gpu=True,
            ),
            Panel(
                "Failures",
                "In the window, by cause: the type of the problem.",
                (Query("sum by (reason) (increase(lospmm_failures_total[$window])) > 0 or vector(0)", "{{reason}}"),),
            ),
        ),
    ),
    DashboardSection(
        "Tuning times",
        (
            Panel(
                "Slowest stages",
                "The 90th percentile of each stage that was run.",
                (Query(_percentile(0.9, _STAGE, "stage"), "{{stage}}"),),
                unit="s",
            ),
            Panel("Tuning time", "Of the models chosen above.", _percentiles(_TUNING, _OF_MODEL), unit="s"),
            Panel(
                "Tuning time by model",
                f"Medians. The first {MODELS - 1} names since the start have lines of their own; none: posted alone.",
                (Query(_percentile(0.5, _TUNING, "model", _OF_MODEL), "{{model}}"),),
                unit="s",
            ),
            Panel(
                "Tuning time by layer size",
                "The 90th percentile, by nonzeros.",
                (Query(_percentile(0.9, _TUNING, "layer_size", _OF_MODEL), "{{layer_size}}"),),
                unit="s",
            ),
        ),
    ),
    DashboardSection(
        "Search",
        (
            Panel(
                "Search space after each constraint",
                "Mean tile sizes of a search: all that were named, and what each constraint left.",
                (
                    Query(
                        "sum by (step) (rate(lospmm_search_tile_sizes_total[$window]))"
                        f" / scalar(sum(rate({_TUNED}[$window])))",
                        "{{step}}",
                    ),
                ),
            ),
            Panel(
                "Candidates",
                "Mean candidates of a search that the ranker put first, and that were timed.",
                (
                    Query(_share("lospmm_search_shortlisted_total", _TUNED), "shortlisted"),
                    Query(_share("lospmm_search_measured_total", _TUNED), "measured"),
                ),
            ),
            Panel(
                "Ranker hits",
                "Of the kernels chosen by time, those whose winner the ranker had put first, in the shortlist, or "
                "neither. No figure where nothing was timed.",
                (
                    Query(
                        "sum by (place, ranker) (increase(lospmm_ranker_winners_total[$window]))"
                        " / scalar(sum(increase(lospmm_ranker_winners_total[$window])))",
                        "{{ranker}}: {{place}}",
                    ),
                ),
                unit="percentunit",
                is_stacked=True,
                needs_gpu=True,
            ),
            Panel(
                "Cache hit rate",
                "Of the kernels that were asked for, those that there were already.",
                (Query(_share(_FOUND, _ASKED), "hits"),),
                unit="percentunit",
            ),
        ),
    ),
    DashboardSection(
        "Kernels",
        (
            Panel(
                "Speed-up over dense fp32",
                "cuBLAS in full fp32 over the kernel. No figure where nothing was timed.",
                _percentiles(_SPEEDUP, _FP32),
                width=8,
                needs_gpu=True,
            ),
            Panel(
                "Faster than dense fp32",
                "The share of the kernels that were timed.",
                (
                    Query(
                        "1 - " + _share(f'{_SPEEDUP}_bucket{{dense="fp32",le="1.0"}}', f"{_SPEEDUP}_count{_FP32}"),
                    ),
                ),
                unit="percentunit",
                width=8,
                needs_gpu=True,
            ),
            Panel(
                "GPU use",
                "GPUs at work: 1 is one GPU all the time. A job's seconds are counted when it ends.",
                (Query("sum(rate(lospmm_gpu_busy_seconds_total[$window]))", "busy"),),
                width=8,
                needs_gpu=True,
            ),
        ),
    ),
    DashboardSection(
        "Service",
        (
            Panel("Queue", "Jobs that are not done.", (Query("lospmm_queue_jobs", "{{state}}"),)),
            Panel(
                "Jobs that ended",
                "In the window; found: another job had made the kernel meanwhile.",
                (Query("sum by (outcome) (increase(lospmm_jobs_ended_total[$window]))", "{{outcome}}"),),
            ),
            Panel(
                "Requests",
                "By route and status.",
                (
                    Query(
                        "sum by (route, method, status) (rate(lospmm_requests_total[$window]))",
                        "{{method}} {{route}} {{status}}",
                    ),
                ),
                unit="reqps",
            ),
            Panel(
                "Request time",
                "The 99th percentile by route; one that waits for a job takes as long.",
                (Query(_percentile(0.99, "lospmm_request_seconds", "route, method"), "{{method}} {{route}}"),),
                unit="s",
            ),
        ),
    ),
)
