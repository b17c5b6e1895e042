"""Queries of the dashboard, and what they are made of."""

import json
from collections.abc import Iterator
from typing import Any

import promql_parser

from tests.docs.pages import ROOT

DASHBOARD = json.loads((ROOT / "docker" / "grafana" / "dashboards" / "lospmm.json").read_text())

#: Its panels without the titles of its sections, and their queries.
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [target for panel in PANELS for target in panel["targets"]]

#: What the dashboard puts in the place of its variables at first.
VARIABLES = {"$window": "30m", "$model": ".*"}

#: Where an expression keeps those inside it.
_INNER = ("lhs", "rhs", "expr", "param", "vector_selector")


def filled(query: str, **others: str) -> str:
    """The query with a value for each variable; ``window="1m"`` in place of the default."""
    for name, value in (VARIABLES | {f"${name}": value for name, value in others.items()}).items():
        query = query.replace(name, value)
    assert "$" not in query, query
    return query


def selectors(query: str) -> Iterator[Any]:
    """Every choice of series in a query without variables. Raises ValueError for a query that is none."""
    yield from _selectors(promql_parser.parse(query))


def _selectors(expression: Any) -> Iterator[Any]:
    if isinstance(expression, promql_parser.VectorSelector):
        yield expression
    for name in _INNER:
        inner = getattr(expression, name, None)
        if inner is not None and not isinstance(inner, str):
            yield from _selectors(inner)
    for argument in getattr(expression, "args", None) or ():
        yield from _selectors(argument)
