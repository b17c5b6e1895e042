"""Tables of long rows (docs/accuracy.md) and of kernels for some of their columns (docs/library.md)."""

from tests.docs.results import Record, records, table

NOTHING = "Not measured yet.\n"


def long_rows() -> str:
    """The greatest errors of both forms, of either B, and the fastest of their turns, by layer."""
    layers: dict[int, list[Record]] = {}
    for record in records("long_rows"):
        if record["chosen_for"] == "in parts":
            layers.setdefault(record["layer"], []).append(record)
    lines = []
    for layer, found in layers.items():
        chain, parts = ([one for one in found if one["form"] == form] for form in ("one chain", "in parts"))
        split = f", {parts[0]['split_k']} blocks to a tile" if parts[0]["split_k"] > 1 else ""
        lines.append(
            (
                str(layer),
                f"{parts[0]['longest_row']:,}",
                f"{parts[0]['rows']} x {parts[0]['cols']}{split}",
                *(_error(one) for one in (chain, parts)),
                *(_micros(one) for one in (chain, parts)),
            )
        )
    if not lines:
        return NOTHING
    heads = ("layer", "longest row", "M1 x N1", "error, one chain", "in parts", "us, one chain", "in parts")
    return table(heads, lines, right=5)


def _error(found: list[Record]) -> str:
    names = ("greatest_error_normal", "greatest_error_gelu")
    return f"{max(one[name] for one in found for name in names if name in one):.1e}"


def _micros(found: list[Record]) -> str:
    return f"{min(one['micros'] for one in found):.1f}"


def fewer_columns() -> str:
    """What a kernel for 4,096 columns takes for the first of them, and kernels that are made for so many."""
    layers: dict[tuple[int, int], list[Record]] = {}
    for record in records("fewer_columns"):
        layers.setdefault((record["m"], record["k"]), []).append(record)
    if not layers:
        return NOTHING
    lines = []
    for (m, k), found in layers.items():
        most = max(one["n"] for one in found)
        for name, wanted in ((f"for {most:,}, started for fewer", most), ("made for so many", None)):
            times = {one["columns"]: one["micros"] for one in found if one["n"] == (wanted or one["columns"])}
            lines.append((f"{m} x {k}", name, *(f"{times[columns]:.1f}" for columns in sorted(times))))
    counts = sorted({record["columns"] for found in layers.values() for record in found})
    return table(("A, us", "kernel", *(f"{count:,} columns" for count in counts)), lines, right=len(counts))


REGIONS = {"long rows": long_rows}
LIBRARY = {"fewer columns": fewer_columns}
