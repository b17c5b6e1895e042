"""The part of docs/families.md that follows from the results of ``benchmarks.families``."""

from benchmarks.families_table import read_results, summary, torch_times
from tests.docs.pages import DOCS, ROOT

PAGE = DOCS / "families.md"
RESULTS = ROOT / "benchmarks" / "results" / "families.jsonl"
TORCH = ROOT / "benchmarks" / "results" / "families_torch.jsonl"
MAP = ROOT / "benchmarks" / "results" / "families_map.png"


def measured() -> str:
    """The summary as the benchmark prints it, and the map where it was drawn."""
    records = list(read_results(RESULTS).values())
    if not records:
        return "Not measured yet.\n"
    devices = " and ".join(sorted({record["machine"]["title"] for record in records}))
    picture = f"\n![Which family wins](../{MAP.relative_to(ROOT).as_posix()})\n" if MAP.exists() else ""
    return f"On {devices}:\n\n```\n{summary(records, torch_times(TORCH))}\n```\n{picture}"


REGIONS = {"families": measured}
