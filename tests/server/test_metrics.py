"""The page of metrics: every name of the table, nothing else, and what is counted."""

from collections.abc import Iterable
from math import isnan
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from lospmm.artifact.manifest import Measured, SearchSummary, Seconds
from lospmm.stages import STAGES
from lospmm_server import metrics, observations, problems
from lospmm_server.metrics import METRICS, MODELS, OTHER, Metrics, QueueFigures
from tests.server.manifests import SECONDS, Event, batch, failed, queued, succeeded
from tests.server.prometheus import series_of

IDLE = QueueFigures(0, 0, 0.0)

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def read(page: bytes) -> Series:
    """Every series of a page, by its name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def observed(*events: Event) -> Metrics:
    figures = Metrics()
    for kind, data in events:
        figures.observe(kind, data)
    return figures


def value(figures: Metrics, name: str, **labels: str) -> float:
    return read(figures.render(IDLE)).get((name, tuple(sorted(labels.items()))), 0.0)


def values_of(page: Series, label: str) -> set[str]:
    return {found for _, labels in page for name, found in labels if name == label}


def test_the_page_has_the_metrics_of_the_table_with_their_help() -> None:
    families = list(text_string_to_metric_families(Metrics().render(IDLE).decode()))
    described = {family.name: (family.type, family.documentation) for family in families}
    expected = {name.removesuffix("_total"): (metric.type, metric.help) for name, metric in METRICS.items()}
    assert described == expected


def test_every_series_is_one_of_the_table_with_its_labels() -> None:
    figures = observed(*batch())
    figures.request_served("/v1/kernels", "POST", 201, 0.5)
    for name, labels in read(figures.render(IDLE)):
        (metric,) = (metric for metric in METRICS.values() if name in series_of(metric))
        expected = {label.name for label in metric.labels} | ({"le"} if name.endswith("_bucket") else set())
        assert {label for label, _ in labels} == expected, name


@pytest.mark.parametrize("metric", METRICS.values(), ids=lambda metric: metric.name)
def test_rules_of_the_table(metric: metrics.Metric) -> None:
    assert metric.name.startswith("lospmm_")
    assert metric.name.endswith("_total") == (metric.type == "counter")
    assert bool(metric.buckets) == (metric.type == "histogram")
    assert list(metric.buckets) == sorted(set(metric.buckets))
    for label in metric.labels:
        assert bool(label.values) != bool(label.limit), f"{label.name} is unbounded"


def test_times_of_stages_go_from_10_ms_to_30_minutes() -> None:
    for name in ("lospmm_stage_seconds", "lospmm_tuning_seconds"):
        assert (METRICS[name].buckets[0], METRICS[name].buckets[-1]) == (0.01, 1800)


def test_series_that_are_known_start_at_0() -> None:
    """Prometheus sees the first step of a counter only if it has seen it before."""
    page = read(Metrics().render(IDLE))
    assert values_of(page, "stage") == set(STAGES)
    assert values_of(page, "reason") == set(observations.REASONS)
    assert set(page.values()) == {0.0}


def test_a_tuning() -> None:
    figures = observed(queued("bert", 5_000), succeeded("bert", 5_000))
    for stage in STAGES:
        assert value(figures, "lospmm_stage_seconds_count", stage=stage) == 1
        assert value(figures, "lospmm_stage_seconds_sum", stage=stage) == SECONDS[stage]
    assert value(figures, "lospmm_tuning_seconds_count", model="bert", layer_size="to 10k") == 1
    assert value(figures, "lospmm_tuning_seconds_sum", model="bert", layer_size="to 10k") == SECONDS["total"]
    steps = [value(figures, "lospmm_search_tile_sizes_total", step=step) for step in observations.STEPS]
    assert steps == [64, 38, 12, 6]
    assert value(figures, "lospmm_search_shortlisted_total") == 4
    assert value(figures, "lospmm_search_measured_total") == 11
    assert value(figures, "lospmm_ranker_winners_total", ranker="none", place="shortlist") == 1
    assert value(figures, "lospmm_speedup_over_dense_sum", dense="fp32") == 2.6
    assert value(figures, "lospmm_speedup_over_dense_bucket", dense="tf32", le="1.0") == 1
    assert value(figures, "lospmm_gpu_busy_seconds_total") == 2.5
    assert value(figures, "lospmm_jobs_ended_total", outcome="tuned") == 1


def test_a_stage_that_there_was_no_need_of_has_no_time() -> None:
    figures = observed(succeeded(seconds={**SECONDS, "measure_trials": 0.0}))
    assert value(figures, "lospmm_stage_seconds_count", stage="measure_trials") == 0
    assert value(figures, "lospmm_stage_seconds_count", stage="emit") == 1


def test_what_was_not_timed_has_no_speed_up() -> None:
    figures = observed(succeeded(speedup_over_dense=None, winner_place=None, gpu_busy_seconds=0.0))
    page = read(figures.render(IDLE))
    assert not any(
        figure
        for (name, _), figure in page.items()
        if name.startswith(("lospmm_speedup", "lospmm_ranker", "lospmm_gpu"))
    )


def test_times_of_a_kernel_that_was_found_are_not_counted_again() -> None:
    page = read(observed(succeeded(cache="hit")).render(IDLE))
    assert {series: figure for series, figure in page.items() if figure} == {
        ("lospmm_jobs_ended_total", (("outcome", "found"),)): 1.0
    }


def test_failures_by_reason() -> None:
    figures = observed(failed("toolchain-fault"), failed("toolchain-fault"), failed("of-a-later-version"))
    assert value(figures, "lospmm_failures_total", reason="toolchain-fault") == 2
    assert value(figures, "lospmm_failures_total", reason=OTHER) == 1
    assert value(figures, "lospmm_jobs_ended_total", outcome="failed") == 3


def test_every_error_has_a_reason() -> None:
    for error in problems.ERRORS:
        reason = observations.failed(problems.describe(error("for a test")))["reason"]
        assert reason in observations.REASONS


def test_what_is_no_end_of_a_kernel_counts_nothing() -> None:
    of_models = [(kind, {"model": "bert", "layers": 3}) for kind in ("queued", "cancelled", "succeeded", "failed")]
    figures = observed(("progress", {"stage": "emit"}), ("running", {}), ("kept", {}), *of_models)
    assert not any(read(figures.render(IDLE)).values())


def test_an_event_of_another_version_is_no_fault() -> None:
    figures = observed(("succeeded", {}), ("failed", {}), ("succeeded", {"speedup_over_dense": None, "new": [1]}))
    assert value(figures, "lospmm_jobs_ended_total", outcome="tuned") == 2
    assert value(figures, "lospmm_failures_total", reason=OTHER) == 1


def test_the_queue() -> None:
    page = read(Metrics().render(QueueFigures(queued=7, running=2, oldest_seconds=3.5)))
    assert page["lospmm_queue_jobs", (("state", "queued"),)] == 7
    assert page["lospmm_queue_jobs", (("state", "running"),)] == 2
    assert page["lospmm_queue_oldest_seconds", ()] == 3.5


def test_the_queue_by_key() -> None:
    """A key that waits no longer is at 0, and those beyond the limit share a line: the oldest of them."""
    figures, name = Metrics(), "lospmm_queue_key_oldest_seconds"
    page = read(figures.render(QueueFigures(2, 0, 3.5, {"": 1.0, "team": 3.5})))
    assert (page[name, (("key", "none"),)], page[name, (("key", "team"),)]) == (1.0, 3.5)
    page = read(figures.render(QueueFigures(0, 0, 0.0)))
    assert (page[name, (("key", "none"),)], page[name, (("key", "team"),)]) == (0.0, 0.0)
    many = {f"key{number}": float(number) for number in range(2 * metrics.KEYS)}
    page = read(figures.render(QueueFigures(99, 0, 99.0, many)))
    assert page[name, (("key", OTHER),)] == 2 * metrics.KEYS - 1
    assert sum(found == name for found, _ in page) == metrics.KEYS + 1
    assert isnan(read(figures.render(None))[name, (("key", "team"),)])


def test_without_the_database_the_queue_is_unknown_and_the_rest_is_there() -> None:
    figures = observed(succeeded())
    page = read(figures.render(None))
    assert isnan(page["lospmm_queue_jobs", (("state", "queued"),)])
    assert isnan(page["lospmm_queue_oldest_seconds", ()])
    assert page["lospmm_jobs_ended_total", (("outcome", "tuned"),)] == 1


def test_the_cache() -> None:
    figures = Metrics()
    for hit in (True, False, True):
        figures.artifact_requested(hit=hit)
    assert value(figures, "lospmm_artifact_requests_total", cache="hit") == 2
    assert value(figures, "lospmm_artifact_requests_total", cache="miss") == 1


def test_models_beyond_the_limit_are_others() -> None:
    figures = observed(*(queued(f"model {number}") for number in range(1000)), succeeded("model 0"), succeeded("new"))
    page = read(figures.render(IDLE))
    assert len(values_of(page, "model")) == MODELS  # the one that is posted alone and the others included
    assert value(figures, "lospmm_tuning_seconds_count", model="model 0", layer_size="to 1k") == 1
    assert value(figures, "lospmm_tuning_seconds_count", model=OTHER, layer_size="to 1k") == 1


@pytest.mark.parametrize(
    ("nnz", "size"),
    [(0, "to 1k"), (1000, "to 1k"), (1001, "to 10k"), (10**6, "to 1M"), (10**6 + 1, "over 1M"), (10**12, "over 1M")],
)
def test_sizes_of_layers(nnz: int, size: str) -> None:
    assert value(observed(succeeded(nnz=nnz)), "lospmm_tuning_seconds_count", model="none", layer_size=size) == 1


ANYTHING = st.text(st.characters(), max_size=100)  # half surrogate pairs too, as JSON may hold them


@settings(deadline=None)
@given(
    events=st.lists(
        st.one_of(
            st.builds(queued, ANYTHING, st.integers(0, 10**9)),
            st.builds(succeeded, ANYTHING, st.integers(0, 10**9)),
            st.builds(lambda reason: ("failed", {"reason": reason}), ANYTHING),
            st.tuples(ANYTHING, st.dictionaries(ANYTHING, ANYTHING)),
        ),
        max_size=40,
    ),
    requests=st.lists(st.tuples(ANYTHING, ANYTHING, st.integers(0, 999)), max_size=40),
)
def test_no_name_of_a_user_spoils_the_page(events: list[Event], requests: list[tuple[str, str, int]]) -> None:
    figures = observed(*events)
    for route, method, status in requests:
        figures.request_served(route, method, status, 0.1)
    page = read(figures.render(IDLE))
    for label in {label for metric in METRICS.values() for label in metric.labels}:
        assert len(values_of(page, label.name)) <= bound((label,))
    ended = sum(kind in ("succeeded", "failed", "cancelled") for kind, _ in events)
    assert sum(figure for (name, _), figure in page.items() if name == "lospmm_jobs_ended_total") == ended


def bound(labels: Iterable[metrics.Label]) -> int:
    """The most values of labels, that for the others included."""
    total = 1
    for label in labels:
        total *= (len(label.values) or label.limit) + 1
    return total


def test_there_is_a_most_of_series() -> None:
    """The page can have no more than this, whatever anybody sends."""
    parts: dict[str, int] = {
        name: bound(metric.labels) * (len(metric.buckets) + 3 if metric.type == "histogram" else 1)
        for name, metric in METRICS.items()
    }
    assert parts["lospmm_tuning_seconds"] < 3000
    assert sum(parts[name] for name in METRICS if "request" not in name) < 4000


def test_the_data_are_of_fields_of_the_manifest() -> None:
    """A field that changes its name must not become a figure that stays 0."""

    def fields(kind: Any) -> set[str]:
        return set(kind.__dataclass_fields__)

    assert {*STAGES, "total"} == fields(Seconds)
    assert {*observations.STEPS, "shortlisted", "measured", "ranker", "chosen_by"} <= fields(SearchSummary)
    assert {"micros", "cublas_fp32_micros", "cublas_tf32_micros"} <= fields(Measured)
