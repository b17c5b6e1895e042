"""Prometheus metrics of ``/metrics``: one table of names, and the figures of one process.

To add a metric, add a row to ``METRICS``, count it in one of the methods of ``Metrics``, show it in a panel of the
dashboard (docker/grafana/dashboards) and describe it in docs/operations.md; tests check that all four agree.

No label is unbounded. One with ``values`` takes these and puts every other one into ``OTHER``. One with a ``limit``
takes the first so many values that it meets, and ``OTHER`` from then on: names of models come from users.
"""

import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from lospmm.stages import STAGES
from lospmm.tuning.options import CHOICES
from lospmm_server.observations import DENSE, PLACES, REASONS, STEPS
from lospmm_server.problems import METHODS

MEDIA_TYPE = CONTENT_TYPE_PLAIN_0_0_4

#: The value of a label beyond its limit.
OTHER = "other"

#: The model label of a kernel that was posted on its own, and the key label of a service that needs no keys.
NO_MODEL = NO_KEY = "none"

#: The most values of a label that are not known in advance, NO_MODEL and NO_KEY included.
MODELS, ROUTES, KEYS = 20, 64, 50

#: The most characters of such a value.
LABEL_CHARACTERS = 80

#: Sizes of layers: the most nonzeros, and the name.
LAYER_SIZES: Sequence[tuple[float, str]] = (
    (1e3, "to 1k"), (1e4, "to 10k"), (1e5, "to 100k"), (1e6, "to 1M"), (float("inf"), "over 1M")
)  # fmt: skip

#: In seconds: 10 ms to 30 minutes.
STAGE_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)

#: The same from 1 ms, for requests; a long poll may hold one for 10 minutes.
REQUEST_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0, 60.0, 600.0)

#: Buckets of speedups over the dense product.
SPEEDUP_BUCKETS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0)

STATUSES = (200, 201, 202, 204, 206, 303, 304, 400, 401, 403, 404, 405, 406, 408, 409, 413, 415, 422, 429, 500, 503)


@dataclass(frozen=True, slots=True)
class Label:
    """A label, with either ``values`` or a ``limit``."""

    name: str
    values: tuple[str, ...] = ()
    limit: int = 0


Type: TypeAlias = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric of the table."""

    name: str  # counters end in _total
    type: Type
    help: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()  # upper bounds of a histogram


_STAGE = Label("stage", STAGES)
_MODEL = Label("model", limit=MODELS)
_SIZE = Label("layer_size", tuple(name for _, name in LAYER_SIZES))
_ROUTE, _METHOD = Label("route", limit=ROUTES), Label("method", METHODS)
_KEY = Label("key", limit=KEYS)
_STATUS = Label("status", tuple(map(str, STATUSES)))
_RANKER = Label("ranker", CHOICES["ranker"])

METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        metric.name: metric
        for metric in (
            Metric("lospmm_stage_seconds", "histogram", "Time of a stage of a tuning.", (_STAGE,), STAGE_BUCKETS),
            Metric("lospmm_tuning_seconds", "histogram", "Time of a whole tuning.", (_MODEL, _SIZE), STAGE_BUCKETS),
            Metric(
                "lospmm_search_tile_sizes_total",
                "counter",
                "Tile sizes that were named, and that were left after each constraint.",
                (Label("step", STEPS),),
            ),
            Metric("lospmm_search_shortlisted_total", "counter", "Candidates that the ranker put first."),
            Metric("lospmm_search_measured_total", "counter", "Candidates that were timed."),
            Metric(
                "lospmm_ranker_winners_total",
                "counter",
                "Kernels chosen by time, by the place that the ranker had given the winner.",
                (_RANKER, Label("place", PLACES)),
            ),
            Metric(
                "lospmm_speedup_over_dense",
                "histogram",
                "Time of the dense product of cuBLAS over the kernel's.",
                (Label("dense", DENSE),),
                SPEEDUP_BUCKETS,
            ),
            Metric("lospmm_gpu_busy_seconds_total", "counter", "Time in which kernels were timed and run on GPUs."),
            Metric(
                "lospmm_jobs_ended_total",
                "counter",
                "Jobs that ended; found: another had made the kernel meanwhile.",
                (Label("outcome", ("tuned", "found", "failed", "cancelled")),),
            ),
            Metric(
                "lospmm_failures_total",
                "counter",
                "Jobs that failed, by the type of their problem.",
                (Label("reason", REASONS),),
            ),
            Metric(
                "lospmm_artifact_requests_total",
                "counter",
                "Kernels that were asked for; hit: there was one already.",
                (Label("cache", ("hit", "miss")),),
            ),
            Metric("lospmm_queue_jobs", "gauge", "Jobs that are not done.", (Label("state", ("queued", "running")),)),
            Metric("lospmm_queue_oldest_seconds", "gauge", "How long the oldest of the queued jobs has waited."),
            Metric(
                "lospmm_queue_key_oldest_seconds",
                "gauge",
                "How long the oldest of the queued jobs of a key has waited; none: of those without a key.",
                (_KEY,),
            ),
            Metric("lospmm_requests_total", "counter", "HTTP requests.", (_ROUTE, _METHOD, _STATUS)),
            Metric(
                "lospmm_request_seconds",
                "histogram",
                "Time to the end of the answer to an HTTP request.",
                (_ROUTE, _METHOD),
                REQUEST_BUCKETS,
            ),
        )
    }
)


@dataclass(frozen=True, slots=True)
class QueueFigures:
    """State of the queue."""

    queued: float
    running: float
    oldest_seconds: float  # of the queued ones; 0 without
    oldest_by_key: Mapping[str, float] = field(default_factory=dict)


_UNKNOWN = QueueFigures(float("nan"), float("nan"), float("nan"))


class Metrics:
    """The figures of this process, from 0 at its start; thread-safe."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._made = {name: _make(metric, self._registry) for name, metric in METRICS.items()}
        self._lock = threading.Lock()
        self._known: dict[str, set[str]] = {_MODEL.name: {NO_MODEL}, _ROUTE.name: set(), _KEY.name: {NO_KEY}}

    def observe(self, kind: str, data: Mapping[str, Any]) -> None:
        """Count an event of a kernel's job; events of models and other kinds are ignored.

        ``data`` is made by ``observations``. Events of other versions may lack fields: what is missing is not
        counted.
        """
        match "model" if "layers" in data else kind:
            case "queued":  # start its series at 0, so that the first tuning of a model counts as an increase
                self._labelled("lospmm_tuning_seconds", _model(data), _layer_size(data))
            case "succeeded" if data.get("cache") == "hit":  # a hit's times are those of an earlier job
                self._add("lospmm_jobs_ended_total", 1, "found")
            case "succeeded":
                self._add("lospmm_jobs_ended_total", 1, "tuned")
                self._tuned(data)
            case "failed":
                self._add("lospmm_jobs_ended_total", 1, "failed")
                self._add("lospmm_failures_total", 1, str(data.get("reason")))
            case "cancelled":
                self._add("lospmm_jobs_ended_total", 1, "cancelled")

    def artifact_requested(self, *, hit: bool) -> None:
        """Count a request for a kernel, which existed already (``hit``) or not."""
        self._add("lospmm_artifact_requests_total", 1, "hit" if hit else "miss")

    def request_served(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count a request; ``route`` is its route's path, or "" if no route matched."""
        self._add("lospmm_requests_total", 1, route, method, str(status))
        self._note("lospmm_request_seconds", seconds, route, method)

    def render(self, queue: QueueFigures | None) -> bytes:
        """Return the page of ``MEDIA_TYPE``; with None, the figures of the queue are NaN."""
        known = queue or _UNKNOWN
        self._set("lospmm_queue_jobs", known.queued, "queued")
        self._set("lospmm_queue_jobs", known.running, "running")
        self._set("lospmm_queue_oldest_seconds", known.oldest_seconds)
        ages = dict.fromkeys(self._known[_KEY.name], float("nan") if queue is None else 0.0)
        for key, age in known.oldest_by_key.items():
            name = self._bounded(_KEY, key or NO_KEY)
            ages[name] = max(age, ages.get(name, 0.0))
        for name, age in ages.items():
            self._set("lospmm_queue_key_oldest_seconds", age, name)
        return generate_latest(_MetricsPage(self._registry))

    def _tuned(self, data: Mapping[str, Any]) -> None:
        seconds, search = data.get("seconds", {}), data.get("search", {})
        for stage in STAGES:
            if seconds.get(stage):  # 0: the stage was skipped
                self._note("lospmm_stage_seconds", seconds[stage], stage)
        if "total" in seconds:
            self._note("lospmm_tuning_seconds", seconds["total"], _model(data), _layer_size(data))
        for step in STEPS:
            self._add("lospmm_search_tile_sizes_total", search.get(step, 0), step)
        self._add("lospmm_search_shortlisted_total", search.get("shortlisted", 0))
        self._add("lospmm_search_measured_total", search.get("measured", 0))
        if (place := data.get("winner_place")) is not None:
            self._add("lospmm_ranker_winners_total", 1, str(search.get("ranker")), place)
        for dense, speedup in (data.get("speedup_over_dense") or {}).items():
            self._note("lospmm_speedup_over_dense", speedup, dense)
        self._add("lospmm_gpu_busy_seconds_total", data.get("gpu_busy_seconds", 0.0))

    def _add(self, name: str, amount: float, *values: str) -> None:
        counter = self._labelled(name, *values)
        assert isinstance(counter, Counter)
        counter.inc(amount)

    def _set(self, name: str, figure: float, *values: str) -> None:
        gauge = self._labelled(name, *values)
        assert isinstance(gauge, Gauge)
        gauge.set(figure)

    def _note(self, name: str, figure: float, *values: str) -> None:
        histogram = self._labelled(name, *values)
        assert isinstance(histogram, Histogram)
        histogram.observe(figure)

    def _labelled(self, name: str, *values: str) -> Counter | Gauge | Histogram:
        labels = METRICS[name].labels
        if not labels:
            return self._made[name]
        return self._made[name].labels(*map(self._bounded, labels, values))

    def _bounded(self, label: Label, value: str) -> str:
        if label.values:
            return value if value in label.values else OTHER
        name = _writable(value)
        with self._lock:
            known = self._known[label.name]
            if len(known) < label.limit and name:
                known.add(name)
            return name if name in known else OTHER


class _MetricsPage(Collector):
    """A registry without the creation times of series, which Prometheus does not use."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Family]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


_TYPES: Final = {"counter": Counter, "gauge": Gauge}


def _make(metric: Metric, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    """Return the metric, with all series whose labels are known in advance at 0."""
    names = [label.name for label in metric.labels]
    made: Counter | Gauge | Histogram
    if metric.type == "histogram":
        made = Histogram(metric.name, metric.help, names, registry=registry, buckets=metric.buckets)
    else:
        made = _TYPES[metric.type](metric.name, metric.help, names, registry=registry)
    if names and all(label.values for label in metric.labels):
        for values in product(*(label.values for label in metric.labels)):
            made.labels(*values)
    return made


def _model(data: Mapping[str, Any]) -> str:
    return str(data.get("model") or NO_MODEL)


def _writable(name: str) -> str:
    """Return a name that can be encoded: half a surrogate pair would break the whole page."""
    return name[:LABEL_CHARACTERS].encode(errors="replace").decode()


def _layer_size(data: Mapping[str, Any]) -> str:
    limits = [limit for limit, _ in LAYER_SIZES]
    return LAYER_SIZES[bisect_left(limits, data.get("nnz", 0))][1]
