"""A kernel's manifest in words, for the command line and for its page."""

from collections.abc import Mapping, Sequence
from typing import Any


def facts_of(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return what a kernel computes, its code and its search, by name and in the order in which they are read."""
    m, k, nnz, launch = manifest["m"], manifest["k"], manifest["nnz"], manifest["launch"]
    shared = f", {launch['shared_bytes']:,} bytes of shared memory" if launch["shared_bytes"] else ""
    return {
        "matrix": f"{m} x {k}, {nnz:,} nonzeros ({1.0 - min(nnz, m * k) / (m * k):.1%} zeros), "
        f"values {manifest['values']}",
        "B": f"{k} x {manifest['n']}, {manifest['dtype']}, {_layout(manifest['convolution'])}",
        **_added(manifest["epilogue"]),
        "device": f"{manifest['device']} ({manifest['arch']}), {manifest['toolchain']}",
        "emitter": manifest["emitter"],
        **_kind(manifest),
        "launch": f"grid {' x '.join(map(str, launch['grid']))}, {launch['block']} threads{shared}",
        "registers": f"{manifest['registers']} a thread, {manifest['spill_bytes']} bytes spilled",
        "code": f"{manifest['code_bytes']:,} bytes",
        **_search(manifest["search"]),
    }


def _layout(window: Mapping[str, Any] | None) -> str:
    if window is None:
        return "row-major"
    sizes = " x ".join(str(window[name]) for name in ("batch", "channels", "height", "width"))
    return f"windows of {window['kernel_height']} x {window['kernel_width']} of an input of {sizes}"


def _added(epilogue: Mapping[str, bool]) -> dict[str, str]:
    """Return a row where C is more than A x B."""
    named = {"bias": "bias", "residual": "residual", "relu": "then ReLU"}
    parts = [words for name, words in named.items() if epilogue[name]]
    return {"added": ", ".join(parts)} if parts else {}


def _kind(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return the rows of the family, of its tiles or its plan, and of a plan that was not searched."""
    family, tile, plan, like = _family(manifest), manifest["tile"], manifest["plan"], manifest["search"]["like"]
    taken = [] if like is None else [f"that of an alike layer, {like[:16]}; a tuning with --each searches its own"]
    if plan is not None:
        axes = ", ".join(f"{name} {value}" for name, value in plan["axes"].items())
        return {"family": f"{family}, {plan['data_bytes']:,} bytes of A", "plan": "; ".join([axes, *taken])}
    parts = f", {tile['split_k']} blocks to a tile" if tile["split_k"] > 1 else ""
    walks = f", walked {tile['walks']} times" if tile["walks"] > 1 else ""
    return {
        "family": family,
        "tile": f"{tile['rows']} rows x {_columns(tile)}, {tile['prefetch']} loads ahead, "
        f"{_group(tile['column_group'])}{parts}{walks}",
        "tiles": f"{tile['count']:,} with nonzeros, {tile['zero_blocks']:,} of empty rows; "
        f"{tile['nnc_sum']:,} loads a column, {tile['nnc_max']:,} at most",
        **({"plan": taken[0]} if taken else {}),
    }


def _search(search: Mapping[str, Any]) -> dict[str, str]:
    rows = {}
    if search["space"]:
        rows["search"] = (
            f"{search['space']:,} tile sizes, {search['after_registers']:,} after registers, "
            f"{search['after_utilization']:,} after utilization, {search['after_balance']:,} after balance"
        )
    if others := _others(search["families"]):
        rows["families"] = others
    return rows


def _group(column_group: int) -> str:
    count = "all" if column_group == 0 else f"{column_group:,}"
    return f"{count} column {'block' if column_group == 1 else 'blocks'} of a tile together"


def _columns(tile: Mapping[str, Any]) -> str:
    """Return the columns of C of a thread block, as text."""
    per_thread = tile["thread_columns"]
    return f"{tile['cols'] * per_thread} columns{f' ({per_thread} a thread)' if per_thread > 1 else ''}"


def _family(manifest: Mapping[str, Any]) -> str:
    """Return the family; for "dense" also cuBLAS's time and the family of the kernel in the cubin."""
    dense = manifest["dense"]
    if dense is None:
        return str(manifest["family"])
    micros = f"~{dense['forecast_micros']:.2f}" if dense["micros"] is None else f"{dense['micros']:.2f}"
    return f"dense, {micros} us by cuBLAS; in the cubin {manifest['cubin_family']}"


def _others(families: Sequence[Mapping[str, Any]]) -> str:
    """Return the result of each packed family in one line; empty if none was timed."""
    if all(family["micros"] is None for family in families):
        return ""
    return "; ".join(f"{family['name']} {_of_family(family)}" for family in families)


def _of_family(family: Mapping[str, Any]) -> str:
    if family["refusal"] is not None:
        return f"refused ({family['refusal']})"
    if family["forecast_micros"] is None:
        return "not looked at"
    if family["micros"] is None:
        return f"not timed ({family['forecast_micros']:.1f} us predicted)"
    return f"{family['micros']:.2f} us ({family['timed']} of {family['plans']} plans)"
