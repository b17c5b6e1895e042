"""Queries of the dashboard taken apart."""

from collections.abc import Iterator
from typing import Any

import promql_parser

from lospmm_server.dashboard import DEFAULT_WINDOW

#: What the dashboard puts in the place of its variables at first.
VARIABLES = {"$window": DEFAULT_WINDOW, "$model": ".*"}

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
