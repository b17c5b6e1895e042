"""What the command line shows of artifacts, spaces and entries of the store."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lospmm.model import Problem, TileSize
from lospmm.space import Space
from lospmm.store import Entry
from lospmm.terminal import print_json, print_pairs, print_table, printable

#: Stages shorter than this are not listed.
SHOWN_SECONDS = 0.005


def show_manifest(manifest: Mapping[str, Any], directory: Path, *, as_json: bool) -> None:
    if as_json:
        print_json(manifest)
        return
    tile, search, launch, verified = (manifest[name] for name in ("tile", "search", "launch", "verified"))
    pairs = {
        "folder": f"{directory}",
        "kernel": manifest["name"],
        "matrix": f"{manifest['m']} x {manifest['k']}, {manifest['nnz']:,} nonzeros, values {manifest['values']}",
        "B": f"{manifest['k']} x {manifest['n']}, {manifest['dtype']}, row-major",
        "device": f"{manifest['device']} ({manifest['arch']}), {manifest['toolchain']}",
        "tile": f"{tile['rows']} rows x {tile['cols']} columns, {tile['prefetch']} loads ahead, "
        f"{tile['order']} index fastest",
        "tiles": f"{tile['count']:,} with nonzeros, {tile['zero_blocks']:,} of empty rows; "
        f"{tile['nnc_sum']:,} loads a column, {tile['nnc_max']:,} at most",
        "launch": f"grid {launch['grid'][0]} x {launch['grid'][1]}, {launch['block']} threads",
        "registers": f"{manifest['registers']} a thread, {manifest['spill_bytes']} bytes spilled",
        "code": f"{manifest['code_bytes']:,} bytes",
        "search": f"{search['space']:,} tile sizes, {search['after_registers']:,} after registers, "
        f"{search['after_utilization']:,} after utilization, {search['after_balance']:,} after balance",
        "chosen by": f"{search['chosen_by']}, {search['estimated_micros']:.1f} us; not measured",
        "verified": "no"
        if verified is None
        else f"on the {verified['on']}, relative error {verified['max_relative_error']:.1e}",
        "seconds": _stages(manifest["seconds"]),
    }
    print_pairs(pairs)


def show_space(problem: Problem, found: Space, *, as_json: bool) -> None:
    if as_json:
        print_json(_space_object(problem, found))
        return
    left = found.size
    rows = [("tile sizes", "", f"{left:,}")]
    for name, count in _removed(found).items():
        left -= count
        rows.append((name + (" (limit moved)" if name in found.relaxed else ""), f"{count:,}", f"{left:,}"))
    print_table(("constraint", "removed", "left"), rows, numbers=("removed", "left"))
    if found.survivors:
        print()
        survivors = _rows_by_columns([candidate.tile for candidate in found.survivors])
        print_table(("columns", "rows of the tile sizes that are left"), survivors, numbers=("columns",))


def show_entries(entries: Sequence[Entry], title: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"entries": [asdict(entry) for entry in entries]})
        return
    size_bytes = sum(entry.size_bytes for entry in entries)
    print(f"{printable(title)}: {len(entries):,} entries, {size_bytes:,} bytes")
    if entries:
        rows = [(entry.kind, entry.key, f"{entry.size_bytes:,}") for entry in entries]
        print_table(("kind", "key", "bytes"), rows, numbers=("bytes",))


def _stages(seconds: Mapping[str, float]) -> str:
    listed = [f"{name} {value:.2f}" for name, value in seconds.items() if name != "total" and value >= SHOWN_SECONDS]
    return f"{seconds['total']:.2f} in all" + "".join(f", {stage}" for stage in listed)


def _removed(found: Space) -> dict[str, int]:
    """Tile sizes that each constraint removed, in the order in which constraints apply."""
    return dict(Counter(verdict.constraint for verdict in found.verdicts))


def _space_object(problem: Problem, found: Space) -> dict[str, object]:
    return {
        "m": problem.matrix.m,
        "k": problem.matrix.k,
        "n": problem.n,
        "nnz": problem.matrix.nnz,
        "device": problem.device.name,
        "space": found.size,
        "after_registers": found.after("registers"),
        "after_utilization": found.after("utilization"),
        "after_balance": found.after("balance"),
        "removed": _removed(found),
        "relaxed": list(found.relaxed),
        "survivors": [list(candidate.tile) for candidate in found.survivors],
    }


def _rows_by_columns(tiles: Sequence[TileSize]) -> list[tuple[str, str]]:
    """The values of M1 for each N1, in runs: ("64", "1-16, 18")."""
    by_cols = sorted(tiles, key=lambda tile: (tile.cols, tile.rows))
    return [
        (str(cols), _runs([tile.rows for tile in group]))
        for cols, group in itertools.groupby(by_cols, key=lambda tile: tile.cols)
    ]


def _runs(numbers: Sequence[int]) -> str:
    """Ascending numbers in words, as in "1-16, 18"."""
    runs = [
        [number for _, number in group]
        for _, group in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
