"""Text output of the command line: artifacts, spaces and entries of the store."""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lospmm.artifact.describe import facts_of
from lospmm.cli.output import print_json, print_pairs, print_table
from lospmm.errors import printable
from lospmm.families.candidate import UNROLLED
from lospmm.gpu.compare import Comparison
from lospmm.gpu.libraries import BASELINES, BaselineTime
from lospmm.problem.device import DEVICES
from lospmm.problem.problem import Problem
from lospmm.space.candidates import TileSize
from lospmm.space.explore import Space
from lospmm.store import Entry
from lospmm.tuning.options import DENSE
from lospmm.tuning.replay import Replay
from lospmm_rank.predict.corrections import SURE, is_learned

#: Stages shorter than this are not listed.
SHOWN_SECONDS = 0.005

#: Other families whose forecasts are shown.
SHOWN_OTHERS = 2


def show_manifest(manifest: Mapping[str, Any], directory: Path, *, as_json: bool) -> None:
    """Print the manifest of a kernel."""
    if as_json:
        print_json(manifest)
        return
    verified = manifest["verified"]
    pairs = {
        "folder": f"{directory}",
        "kernel": manifest["name"],
        **facts_of(manifest),
        "chosen by": _chosen(manifest),
        "verified": "no"
        if verified is None
        else f"on the {verified['on']}, relative error {verified['max_relative_error']:.1e}",
        "seconds": _stages(manifest["seconds"]),
    }
    print_pairs(pairs)


def show_space(problem: Problem, emitter: str, found: Space, *, as_json: bool) -> None:
    """Print how many tile sizes each constraint removes, and those that are left."""
    if as_json:
        print_json({**_space_object(problem, found), "emitter": emitter})
        return
    left = found.size
    rows = [("tile sizes", "", f"{left:,}")]
    for name, count in _removed(found).items():
        left -= count
        rows.append((name + (" (limit relaxed)" if name in found.relaxed else ""), f"{count:,}", f"{left:,}"))
    print_table(("constraint", "removed", "left"), rows, numbers=("removed", "left"))
    if found.survivors:
        print()
        survivors = _rows_by_columns([candidate.tile for candidate in found.survivors])
        print_table(("columns", "rows of the tile sizes that are left"), survivors, numbers=("columns",))


def show_comparison(found: Comparison, manifest: Mapping[str, Any], *, as_json: bool) -> None:
    """Print the times of a kernel and its baselines, with noise, clocks and the roofline."""
    if as_json:
        print_json(_comparison_object(found, manifest))
        return
    print_pairs(
        {
            "kernel": manifest["name"],
            "matrix": f"{manifest['m']} x {manifest['k']}, {manifest['nnz']:,} nonzeros",
            "B": f"{manifest['k']} x {manifest['n']}, {manifest['dtype']}, "
            f"{found.cache}: {found.copies:,} {'copy' if found.copies == 1 else 'copies'} in turn",
            "GPU": found.gpu + _clocks(found),
            "bound": f"{found.bound.micros:.2f} us, by {found.bound.by}",
            "noise": f"{found.noise:.1%} between two timings of the kernel",
            "advice": _advice(found),
        }
    )
    print()
    timing, error = found.timing, found.max_relative_error
    own = ("this kernel", f"{timing.micros:.2f}", f"{timing.spread:.1%}", "1.00", f"{error:.1e}", manifest["emitter"])
    others = [_baseline_row(baseline, found.micros) for baseline in found.baselines.values()]
    heads = ("", "us", "spread", "of the kernel's", "error", "how")
    print_table(heads, [own, *others], numbers=("us", "spread", "of the kernel's", "error"))


def show_entries(entries: Sequence[Entry], title: str, *, as_json: bool) -> None:
    """Print entries of the store, and how many bytes they take."""
    if as_json:
        print_json({"entries": [asdict(entry) for entry in entries]})
        return
    size_bytes = sum(entry.size_bytes for entry in entries)
    print(f"{printable(title)}: {len(entries):,} entries, {size_bytes:,} bytes")
    if entries:
        rows = [(entry.kind, entry.key, f"{entry.size_bytes:,}") for entry in entries]
        print_table(("kind", "key", "bytes"), rows, numbers=("bytes",))


def show_replay(found: Replay) -> None:
    """Print the candidate that was built and the replayed one, side by side.

    The two may be of different families, and then have different axes.
    """
    names = [*dict.fromkeys((*found.built, *found.winner))]
    both = {"built": found.built, "replayed": found.winner}
    rows = [(title, *(str(axes.get(name, "-")) for name in names)) for title, axes in both.items()]
    print(f"{'the same' if found.agrees else 'ANOTHER'} candidate, from {found.timed:,} that were timed")
    print_table(("", *names), rows, numbers=names)


def _chosen(manifest: Mapping[str, Any]) -> str:
    """Return what chose the kernel, with its time, or with the forecasts of it, the nearest others and cuBLAS."""
    search, measured = manifest["search"], manifest.get("measured")
    if measured is not None:
        state = {"warm": " with a warm cache", "network": " as in a network"}.get(measured["cache"], "")
        estimate = f"{search['chosen_by']}, {search['estimated_micros']:.1f} us"
        return f"{estimate}; measured {measured['micros']:.1f} us{state}, {measured['advice']}"
    own = manifest["cubin_family"]
    others = {one["name"]: one["forecast_micros"] for one in search["families"] if one["name"] not in (own, DENSE)}
    others = {name: micros for name, micros in others.items() if micros is not None}
    nearest = sorted(others, key=others.__getitem__)[:SHOWN_OTHERS]
    forecasts = [f"{own} {search['estimated_micros']:.1f} us", *(f"{name} {others[name]:.1f}" for name in nearest)]
    if (dense := search["dense_forecast_micros"]) is not None:
        device = DEVICES.get(manifest["device"])
        least = "" if device is not None and is_learned(device) else "at least "
        forecasts.append(f"cuBLAS {least}{dense:.1f}")
    share = min(others.values(), default=math.inf) / search["estimated_micros"]
    is_near = own == UNROLLED and SURE <= share < 1  # below: families that do not compete, as where all weights are 0
    why = f"; another wins only below {SURE:.0%} of unrolled" if is_near else ""
    return f"{search['chosen_by']}: {', '.join(forecasts)} (predicted, not measured){why}"


def _clocks(found: Comparison) -> str:
    if (clocks := found.clocks) is None:
        return ", clocks not known"
    held = f", held by {', '.join(clocks.throttled)}" if clocks.throttled else ""
    return f", SM {clocks.sm_mhz:,} MHz, memory {clocks.memory_mhz:,} MHz, {clocks.temperature_celsius} C{held}"


def _advice(found: Comparison) -> str:
    faster = [f"{BASELINES[name].title} ({found.baselines[name].micros:.2f} us)" for name in found.faster_dense]
    return f"{found.advice}: faster than the kernel: {'; '.join(faster)}" if faster else found.advice


def _baseline_row(baseline: BaselineTime, kernel_micros: float) -> tuple[str, ...]:
    title, best = BASELINES[baseline.name].title, baseline.best
    if best is None or best.timing is None or best.max_relative_error is None:
        return title, "-", "-", "-", "-", baseline.failure or "not timed"
    micros, spread, _ = best.timing
    failures = "".join(f"; {way.name}: {way.failure}" for way in baseline.variants if way.failure is not None)
    how = f"{best.name}, {baseline.library}{failures}"
    return (
        title,
        f"{micros:.2f}",
        f"{spread:.1%}",
        f"{micros / kernel_micros:.2f}",
        f"{best.max_relative_error:.1e}",
        how,
    )


def _comparison_object(found: Comparison, manifest: Mapping[str, Any]) -> dict[str, object]:
    """Return what the manifest's ``measured`` would be, and everything that led to it."""
    return {
        "name": manifest["name"],
        **asdict(found.measured()),
        "replays": found.timing.replays,
        "max_relative_error": found.max_relative_error,
        "copies": found.copies,
        "bound_by": found.bound.by,
        "baselines": {name: _baseline_object(baseline) for name, baseline in found.baselines.items()},
    }


def _baseline_object(baseline: BaselineTime) -> dict[str, object]:
    return {
        "library": baseline.library,
        "best": None if baseline.best is None else baseline.best.name,
        "failure": baseline.failure,
        "variants": [
            {
                "name": way.name,
                "micros": None if way.timing is None else way.timing.micros,
                "spread": None if way.timing is None else way.timing.spread,
                "max_relative_error": way.max_relative_error,
                "failure": way.failure,
            }
            for way in baseline.variants
        ],
    }


def _stages(seconds: Mapping[str, float]) -> str:
    listed = [f"{name} {value:.2f}" for name, value in seconds.items() if name != "total" and value >= SHOWN_SECONDS]
    return f"{seconds['total']:.2f} in all" + "".join(f", {stage}" for stage in listed)


def _removed(found: Space) -> dict[str, int]:
    """Return the tile sizes that each constraint removed, in the order in which constraints apply."""
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
    """Return the values of M1 for each N1, in runs: ("64", "1-16, 18")."""
    by_cols = sorted(tiles, key=lambda tile: (tile.cols, tile.rows))
    return [
        (str(cols), _runs([tile.rows for tile in group]))
        for cols, group in itertools.groupby(by_cols, key=lambda tile: tile.cols)
    ]


def _runs(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text, as in "1-16, 18"."""
    runs = [
        [number for _, number in group]
        for _, group in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
