"""Tables of docs/decisions/0014 and docs/pytorch.md: a linear layer from tokens to tokens, and its activations turned
over alone. They come from tokens_first.jsonl and turning.jsonl of benchmarks/results."""

from lospmm.dtype import DTYPES
from tests.docs.results import Record, records, table


def from_tokens_to_tokens() -> str:
    """Of every layer: its kernel, turning its operands over, both together; and the fastest that reads tokens first."""
    problems: dict[tuple[int, int], list[Record]] = {}
    for record in records("tokens_first"):
        problems.setdefault((record["m"], record["k"]), []).append(record)
    lines = []
    for (m, k), found in problems.items():
        kernel = next(one["micros"] for one in found if one["what"] == "features first, tuned")
        turned = [one["micros"] for one in found if one["what"].startswith("turning")]
        shapes = [one for one in found if one["what"] == "tokens first" and not one["writes_first"]]
        best = min((one for one in shapes if not one["without"]), key=lambda one: one["micros"])
        parts = {one["without"]: one["micros"] for one in shapes if one["without"]}
        lines.append(
            (
                f"{m} x {k}",
                f"{kernel:.1f}",
                f"{turned[0]:.1f} + {turned[1]:.1f}",
                f"{kernel + sum(turned):.1f}",
                f"{best['micros']:.1f} ({best['rows']} x {best['tokens']})",
                f"{_part(parts, 'copies')} / {_part(parts, 'multiply-adds')}",
            )
        )
    heads = ("A", "kernel", "turned over", "together", "tokens first", "no copies / no multiply-adds")
    return table(heads, lines, right=5)


def _part(parts: dict[str, float], name: str) -> str:
    return f"{parts[name]:.1f}" if name in parts else "-"


def turned_over() -> str:
    """Of each type and width: the kernel of ``lospmm.nn``, PyTorch's copy, and what the kernel moves a second."""
    lines = []
    for record in records("turning"):
        moved = 2 * record["tokens"] * record["features"] * DTYPES[record["dtype"]].element_bytes
        ours, others = record["kernel_micros"], record["pytorch_micros"]
        lines.append(
            (
                f"{record['tokens']} x {record['features']}",
                record["dtype"],
                f"{ours:.1f}",
                f"{others:.1f}",
                f"{others / ours:.1f}",
                f"{moved / ours / 1e6:.1f} TB",
            )
        )
    heads = ("tokens x features", "type", "kernel", "PyTorch", "PyTorch / kernel", "moved a second")
    return table(heads, lines, right=4)


REGIONS = {"tokens": from_tokens_to_tokens}
TURNING = {"turning": turned_over}
