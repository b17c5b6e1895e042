"""Tables of long rows (docs/accuracy.md) and of kernels for some of their columns (docs/library.md)."""

from tests.docs.results import Record, records, table

NOTHING = "Not measured yet.\n"


def long_rows() -> str:
    """The greatest errors of both forms, of either B, and the fastest of their turns, each as chosen for its form."""
    layers: dict[str, list[Record]] = {}
    for record in records("long_rows"):
        if record["chosen_for"] == record["form"]:
            layers.setdefault(record["layer"], []).append(record)
    lines = []
    for layer, found in layers.items():
        chain, parts = ([one for one in found if one["form"] == form] for form in ("one chain", "in parts"))
        lines.append(
            (
                layer,
                f"{parts[0]['longest_row']:,}",
                *(_tile(one[0]) for one in (chain, parts)),
                *(_error(one) for one in (chain, parts)),
                *(_micros(one) for one in (chain, parts)),
            )
        )
    if not lines:
        return NOTHING
    heads = ("layer", "longest row", "tile, one chain", "in parts", "error, one chain", "in parts", "us, one chain")
    return table((*heads, "in parts"), lines, right=4)


def _tile(record: Record) -> str:
    """M1 x N1, and the blocks that share one."""
    return f"{record['rows']} x {record['cols']}" + (f" / {record['split_k']}" if record["split_k"] > 1 else "")


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
