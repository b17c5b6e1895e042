"""The command of a benchmark whose results are a file of lines, one for each thing that it measures."""

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def values(row: Row) -> str:
    """All of a line but the device."""
    return " ".join(str(value) for name, value in row.items() if name != "device")


def record(name: str, rows: Iterable[Row], shown: Callable[[Row], str] = values, *, description: str | None) -> None:
    """``python -m benchmarks.NAME [--out DIR]``: writes DIR/NAME.jsonl, a line as soon as it is known, and shows it."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    with (out / f"{name}.jsonl").open("w") as file:
        for row in rows:
            print(json.dumps(row), file=file, flush=True)
            print(shown(row), flush=True)
