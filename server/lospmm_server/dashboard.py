"""The Grafana dashboard of tuning times, made of panels.py.

``python -m lospmm_server.dashboard`` writes it.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lospmm_server.panels import SECTIONS, Look, Panel, Query

#: Fixed, so that links to it stay good and a provisioned one takes the place of the one before.
UID = "lospmm"
DATASOURCE = {"type": "prometheus", "uid": "lospmm-prometheus"}

#: Where it is provisioned from, in the root of the repository.
FILE = Path("docker/grafana/dashboards/lospmm.json")

WINDOWS = ("5m", "30m", "2h", "12h", "1d")
DEFAULT_WINDOW = "30m"

#: The version of Grafana's format; later Grafanas read it.
SCHEMA_VERSION = 39

#: The page is so many units wide.
COLUMNS = 24
ROW_HEIGHT = 1
HEIGHTS: Mapping[Look, int] = {"stat": 4, "timeseries": 8}


def dashboard() -> dict[str, Any]:
    """Return Grafana's model of the page."""
    return {
        "uid": UID,
        "title": "lospmm: tuning times",
        "description": "Written by python -m lospmm_server.dashboard.",
        "tags": ["lospmm"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": False,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_WINDOW, _MODEL]},
        "panels": _placed(),
    }


def text() -> str:
    """Return the contents of ``FILE``."""
    return json.dumps(dashboard(), indent=2) + "\n"


_WINDOW: Mapping[str, Any] = {
    "name": "window",
    "label": "Window",
    "type": "interval",
    "query": ",".join(WINDOWS),
    "current": {"text": DEFAULT_WINDOW, "value": DEFAULT_WINDOW, "selected": True},
    "options": [{"text": length, "value": length, "selected": length == DEFAULT_WINDOW} for length in WINDOWS],
}

_MODEL: Mapping[str, Any] = {
    "name": "model",
    "label": "Model",
    "type": "query",
    "datasource": DATASOURCE,
    "query": {"query": "label_values(lospmm_tuning_seconds_count, model)", "refId": "model"},
    "refresh": 2,  # whenever the time range changes
    "sort": 1,
    "multi": True,
    "includeAll": True,
    "allValue": ".*",
    "current": {"text": ["All"], "value": ["$__all"], "selected": True},
}


def _placed() -> list[dict[str, Any]]:
    """Return every panel with its position: left to right below its section's title, in rows."""
    placed: list[dict[str, Any]] = []
    y = 0
    for section in SECTIONS:
        placed.append(_row(section.title, len(placed) + 1, y))
        x, y = 0, y + ROW_HEIGHT
        for panel in section.panels:
            if x + panel.width > COLUMNS:
                x, y = 0, y + HEIGHTS[panel.look]
            placed.append(_panel(panel, len(placed) + 1, x, y))
            x += panel.width
        y += HEIGHTS[section.panels[-1].look]
    return placed


def _row(title: str, number: int, y: int) -> dict[str, Any]:
    place = {"x": 0, "y": y, "w": COLUMNS, "h": ROW_HEIGHT}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}


def _panel(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": panel.look,
        "title": panel.title,
        "description": panel.about,
        "datasource": DATASOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": HEIGHTS[panel.look]},
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _OPTIONS[panel.look],
        "targets": [_target(query, "ABCDEFGH"[at], panel.look) for at, query in enumerate(panel.queries)],
    }


def _target(query: Query, letter: str, look: Look) -> dict[str, Any]:
    is_instant = look != "timeseries"
    return {
        "refId": letter,
        "datasource": DATASOURCE,
        "expr": query.text,
        "legendFormat": query.legend or "__auto",
        "instant": is_instant,
        "range": not is_instant,
        "editorMode": "code",
    }


def _defaults(panel: Panel) -> dict[str, Any]:
    limits = {"min": 0, **({"max": 1} if panel.unit == "percentunit" else {})}
    stacking = {"mode": "normal" if panel.is_stacked else "none", "group": "A"}
    lines = {"drawStyle": "line", "fillOpacity": 30 if panel.is_stacked else 0, "stacking": stacking}
    return {"unit": panel.unit, **limits, **({"custom": lines} if panel.look == "timeseries" else {})}


_OPTIONS: Mapping[Look, Mapping[str, Any]] = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "none",
        "graphMode": "none",
    },
}


def main(root: Path = Path()) -> int:
    """Write ``FILE`` below ``root``; return the exit status."""
    file = root / FILE
    if not file.parent.is_dir():
        print(f"error: {file.parent} is no folder; run this in the root of the repository", file=sys.stderr)
        return 2
    file.write_text(text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
