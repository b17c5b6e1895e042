"""The folders of a model's layers, and the table of their kernels, whatever the layers are called."""

from pathlib import PurePosixPath
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lospmm.errors import BadRequest
from lospmm.matrix.layers import KERNELS_FILE, REPORT_FILE, check_names, folder_of
from lospmm.model.report import LayerError, LayerReport, Total, launch_table, totals_of
from lospmm.problem.launch import Launch


def test_a_line_for_each_kernel_whatever_its_name() -> None:
    """Layers without a kernel, and those of a report of an earlier version, have none."""
    launch = Launch((4, 2, 1), 128, 1024)
    lines = launch_table(
        (
            LayerReport(name="a\tb\nc", folder="a-1", entry="f", launch=launch, m=3, k=5, n=7),
            LayerReport(name="failed", folder="failed", error=LayerError("NothingFits", "none", 3)),
            LayerReport(name="old", folder="old", m=1, k=1, digest="d"),
        )
    ).splitlines()
    assert lines[1:] == ["f\t3\t5\t7\t4\t2\t1\t128\t1024\ta-1\ta\\tb\\nc"]


def test_totals_are_of_what_is_called() -> None:
    """The kernel, or cuBLAS where that was chosen; measured times before forecasts, and no half of a pair."""
    forecast: dict[str, Any] = {"estimated_micros": 4.0, "dense_forecast_micros": 3.0}
    rows = (
        LayerReport(name="a", folder="a@8", n=8, **forecast, micros=2.0, dense_micros=5.0, family="bitmap"),
        LayerReport(name="b", folder="b@8", n=8, **forecast, micros=7.0, dense_micros=6.0, family="dense"),
        LayerReport(name="a", folder="a@1", n=1, **forecast, micros=2.0, family="bitmap"),
        LayerReport(name="b", folder="b@1", n=1, estimated_micros=1.0),
        LayerReport(name="c", folder="c", n=1, error=LayerError("NothingFits", "none", 3)),
    )
    assert totals_of(rows) == (
        Total(n=1, layers=1, timed=0, dense_micros=3.0, chosen_micros=4.0),
        Total(n=8, layers=2, timed=2, dense_micros=11.0, chosen_micros=8.0),
    )
    assert [str(total) for total in totals_of(rows)] == [
        "N 1: ~4.00 us, dense ~3.00 us (1 layer)",
        "N 8: 8.00 us, dense 11.00 us (2 layers)",
    ]
    assert totals_of(rows[1:3]) == (  # as of a network's layers: each has columns of its own
        Total(n=None, layers=2, timed=1, dense_micros=9.0, chosen_micros=10.0),
    )
    assert str(*totals_of(rows[1:3])) == "all: ~10.00 us, dense ~9.00 us (2 layers)"
    assert [row.kernel for row in rows] == ["a@8", "b@8", "a@1", "b@1", "c"]


@given(st.text(max_size=120))
@example("..")
@example("report.JSON")
@example("kernels.tsv")
@example("a\x00b")
@example("\ud800")
def test_a_folder_of_any_name(name: str) -> None:
    folder = folder_of(name)
    assert PurePosixPath(folder).parts == (folder,)
    assert folder not in ("", ".", "..") and folder[0] not in ".-" and folder.lower() not in (REPORT_FILE, KERNELS_FILE)
    assert len(folder.encode()) <= 100 and folder.isprintable() and folder.isascii() and "\\" not in folder
    check_names([folder]) if folder != name else check_names([name])


@given(st.lists(st.text(max_size=8), unique_by=str.lower, max_size=6))
def test_different_names_have_different_folders(names: list[str]) -> None:
    check_names(names)
    assert len({folder_of(name).lower() for name in names}) == len(names)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["w", "w"], "two layers are called 'w'"),
        (["W", "w"], "'W' and 'w' would have the same folder"),
        (["a/b", folder_of("a/b")], "would have the same folder"),
    ],
)
def test_layers_that_would_share_a_folder(names: list[str], says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        check_names(names)
