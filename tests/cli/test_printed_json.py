"""What ``--json`` prints where it takes a GPU or minutes to print it, against docs/cli.md."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from lospmm.cli.show import show_comparison
from lospmm.gpu.compare import Comparison, Roofline
from lospmm.gpu.libraries import BaselineTime, VariantTime
from lospmm.gpu.timing import Timing
from lospmm.problem.device import Clocks
from tests.docs.pages import ROOT, entries, printed_fields, section

#: Objects of the card whose fields are names of what there happens to be.
CARD_NAMES = ("problems", "ranges", "provenance", "parameters", "others", "importance", "orders", "by")

TIMING = Timing(20.0, 0.01, 15)
FAST, SLOW = VariantTime("CSR_ALG2", TIMING, 1e-7, None), VariantTime("CSR_ALG3", None, None, "a reason")


def described(heading: str) -> list[str]:
    page = section((ROOT / "docs" / "cli.md").read_text(), f"### {heading}")
    return sorted(name for name, _, _ in entries(page))


def test_bench(capsys: pytest.CaptureFixture[str]) -> None:
    baseline = BaselineTime("cusparse", "cuSPARSE 12", (FAST, SLOW), None)
    clocks = Clocks(1980, 3201, 40, ())
    found = Comparison("a GPU", "cold", 2, TIMING, 1e-7, 0.01, Roofline(1.0, "memory"), {"cusparse": baseline}, clocks)
    show_comparison(found, {"name": "kernel"}, as_json=True)
    printed = json.loads(capsys.readouterr().out)
    printed["baselines"] = list(printed["baselines"].values())
    measured = set(printed_fields(asdict(found.measured())))  # which the page of the manifest describes
    assert described("bench") == sorted(set(printed_fields(printed)) - measured)


def test_train_ranker() -> None:
    card = Path(ROOT, "rank_model", "lospmm_rank", "weights", "h200.json")
    assert described("train-ranker") == sorted(set(printed_fields(json.loads(card.read_text()), CARD_NAMES)))
