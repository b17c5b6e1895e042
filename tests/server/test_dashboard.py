"""The dashboard: its queries against the table of metrics, and the page that describes both."""

import json
import re
from itertools import combinations
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, prometheus
from grafana_foundation_sdk.models.dashboard import Dashboard

from lospmm_server.metrics import METRICS, MODELS
from tests.docs.pages import DOCS, ROOT, entries, names, section
from tests.fixtures.nested import lost
from tests.server.prometheus import series_of
from tests.server.promql import DASHBOARD, PANELS, TARGETS, VARIABLES, filled, selectors

QUERIES = [target["expr"] for target in TARGETS]

#: Units of width of the page.
COLUMNS = 24

#: Metrics that no panel shows.
NOT_SHOWN: frozenset[str] = frozenset()

#: Labels that Prometheus itself adds.
ADDED_LABELS = {"le"}


def metric_of(series: str) -> Any:
    found = [metric for metric in METRICS.values() if series in series_of(metric)]
    assert found, f"{series} is no series of the table"
    return found[0]


def test_the_dashboard_conforms_to_grafanas_types() -> None:
    """Each field is one of Grafana's model, panels' options and queries too: what is none would be lost."""
    plugins.register_default_plugins()
    model = Dashboard.from_json(DASHBOARD)
    assert lost(DASHBOARD, json.loads(JSONEncoder().encode(model))) == []
    panels = [panel for panel in model.panels or () if panel.type_val != "row"]
    assert len(panels) == len(PANELS)
    for panel in panels:
        assert all(isinstance(target, prometheus.Dataquery) for target in panel.targets)
        drawn = panel.field_config.defaults.custom
        assert panel.type_val == "stat" or isinstance(drawn, common.GraphFieldConfig)


def test_a_share_of_nothing_is_no_figure() -> None:
    """A service without requests would show NaN in the first row."""
    shares = [target["expr"] for panel in PANELS if panel["type"] == "stat" for target in panel["targets"]]
    assert all(share.endswith(" > 0)") for share in shares if " / " in share)


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query[:60])
def test_a_query_parses_and_names_series_and_labels_that_there_are(query: str) -> None:
    chosen = list(selectors(filled(query)))
    assert chosen
    for selector in chosen:
        metric = metric_of(selector.name)
        labels = {label.name: label.values for label in metric.labels}
        for matcher in selector.matchers.matchers:
            assert matcher.name in labels.keys() | ADDED_LABELS, (selector.name, matcher.name)
            if matcher.name == "le":
                assert float(matcher.value) in metric.buckets, matcher.value
            elif str(matcher.op) == "MatchOp.Equal" and labels[matcher.name]:
                assert matcher.value in labels[matcher.name], matcher.value


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target["expr"][:60])
def test_what_a_query_groups_by_and_its_legend_are_labels(target: dict[str, str]) -> None:
    query = target["expr"]
    labels = {label.name for selector in selectors(filled(query)) for label in metric_of(selector.name).labels}
    grouped = {name for group in re.findall(r"by \(([^)]*)\)", query) for name in re.split(r",\s*", group)}
    assert grouped - ADDED_LABELS <= labels
    legend = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
    assert legend <= labels
    if grouped:  # lines that differ in nothing that their legend says could not be told apart
        assert legend == grouped - ADDED_LABELS


@pytest.mark.parametrize("query", [query for query in QUERIES if " / " in query], ids=lambda query: query[:60])
def test_what_a_figure_is_divided_by_is_counted_from_the_start(query: str) -> None:
    """A series that is first seen above 0 has not risen for Prometheus: the mean would be of too few, or of none."""
    for selector in selectors(filled(query).partition(" / ")[2]):
        assert all(label.values for label in metric_of(selector.name).labels), selector.name


@pytest.mark.parametrize("text", ["sum(", "rate(lospmm_requests_total)[5m]", "lospmm requests"])
def test_what_is_no_query_is_noticed(text: str) -> None:
    with pytest.raises(ValueError):
        list(selectors(text))


def test_selectors_are_found_wherever_they_stand() -> None:
    query = (
        "histogram_quantile(scalar(a), sum by (le) (rate(b[5m]))) / -(c or topk(scalar(d), max_over_time(e[1h:1m])))"
    )
    assert {selector.name for selector in selectors(query)} == {"a", "b", "c", "d", "e"}


def test_every_metric_is_shown_or_said_not_to_be() -> None:
    shown = {metric_of(selector.name).name for query in QUERIES for selector in selectors(filled(query))}
    assert shown | NOT_SHOWN == set(METRICS)
    assert not shown & NOT_SHOWN


def test_panels_have_a_place_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    places = [tuple(panel["gridPos"][side] for side in "xywh") for panel in panels]
    assert all(x >= 0 and x + w <= COLUMNS for x, _, w, _ in places)
    for (x, y, w, h), (x2, y2, w2, h2) in combinations(places, 2):
        assert x + w <= x2 or x2 + w2 <= x or y + h <= y2 or y2 + h2 <= y


def test_the_dashboard_finds_the_provisioned_datasource() -> None:
    file = ROOT / "docker" / "grafana" / "provisioning" / "datasources" / "prometheus.yml"
    (provisioned,) = yaml.safe_load(file.read_text())["datasources"]
    provisioned_as = {"type": provisioned["type"], "uid": provisioned["uid"]}
    (variable,) = (variable for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query")
    assert all(one["datasource"] == provisioned_as for one in (variable, *PANELS, *TARGETS))


def test_variables_are_those_that_queries_use() -> None:
    used = {name for query in QUERIES for name in re.findall(r"\$\w+", query)}
    window, model = DASHBOARD["templating"]["list"]
    assert used == {f"${window['name']}", f"${model['name']}"}
    assert {"$window": window["current"]["value"], "$model": model["allValue"]} == VARIABLES


def test_the_page_describes_every_metric() -> None:
    page = (DOCS / "operations.md").read_text()
    listed = list(entries(section(page, "## Metrics")))
    described = {name: (kind.partition(";")[0], set(names(kind))) for name, kind, _ in listed}
    expected = {name: (metric.type, {label.name for label in metric.labels}) for name, metric in METRICS.items()}
    assert described == expected
    assert len(listed) == len(METRICS)
    assert f"{MODELS - 1} names of models" in page
