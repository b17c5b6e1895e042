"""Short texts about a manifest's tile and families."""

from collections.abc import Mapping, Sequence
from typing import Any


def columns_of_tile(tile: Mapping[str, Any]) -> str:
    """Return the columns of C of a thread block, as text."""
    per_thread = tile["thread_columns"]
    return f"{tile['cols'] * per_thread} columns{f' ({per_thread} a thread)' if per_thread > 1 else ''}"


def family_in_words(manifest: Mapping[str, Any]) -> str:
    """Return the family; for "dense" also cuBLAS's time and the family of the kernel in the cubin."""
    dense = manifest["dense"]
    if dense is None:
        return str(manifest["family"])
    micros = f"~{dense['forecast_micros']:.2f}" if dense["micros"] is None else f"{dense['micros']:.2f}"
    return f"dense, {micros} us by cuBLAS; in the cubin {manifest['cubin_family']}"


def other_families(families: Sequence[Mapping[str, Any]]) -> str:
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
