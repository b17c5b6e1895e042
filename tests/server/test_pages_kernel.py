"""The page of a kernel: its space, its candidates, its times and its files, whatever version made it."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from lospmm.artifact import artifact, tile_map
from lospmm.artifact.artifact import SPACE_FILE, TUNING_FILE, Artifact
from lospmm.store import Store
from lospmm_server.space_drawing import draw
from tests.artifact.test_tile_map import WHOLE, searched
from tests.server.page_reader import BROWSER, page
from tests.server.page_service import HOSTILE, FakeView, app_of, changed, digest_of, timed, tuned, without_space

KERNEL = digest_of("kernel")


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return tuned(Store(tmp_path_factory.mktemp("store")))


@pytest.fixture
def view(kernel: Artifact) -> FakeView:
    return FakeView(kernels={KERNEL: kernel})


@pytest.fixture
def client(view: FakeView) -> Iterator[TestClient]:
    with TestClient(app_of(view), base_url="http://localhost", raise_server_exceptions=False) as client:
        client.headers.update(BROWSER)
        yield client


@pytest.mark.parametrize("path", ["/jobs/", "/kernels/"])
def test_a_kernel_shows_its_space_its_times_and_its_files(client: TestClient, kernel: Artifact, path: str) -> None:
    found = page(client, path + KERNEL)
    manifest = kernel.manifest
    text = found.text
    assert manifest["name"] in text and "Matrix 16 x 24" in text
    drawn = tile_map.parse(kernel.files[SPACE_FILE], SPACE_FILE)
    assert f"left: {manifest['search']['after_balance']} of {manifest['search']['space']}" in text
    assert f"The winner is {manifest['tile']['rows']} x {manifest['tile']['cols']}." in text
    assert len([c for c in found.all("circle") if c.get("class") == "ring"]) == 1 + len(
        {(entry.rows, entry.cols) for entry in drawn.shortlist}
    )
    assert len([p for p in found.all("path") if p.get("class") == "winner"]) == 2  # in the drawing and in its legend
    svg = next(svg for svg in found.all("svg") if svg.get("class") == "space")
    assert (svg["role"], svg["aria-labelledby"], svg["aria-describedby"]) == ("img", "space-title", "space-text")
    for stage, seconds in manifest["seconds"].items():
        assert (stage in ("total",)) or (f"{stage.replace('_', ' ')} " in text) or seconds == 0
    assert "Verified on the CPU against float64 in 50 columns of C: the greatest relative error is" in text
    assert "Nothing was timed" in text
    links = [link["href"] for link in found.all("a") if "download" in link]
    assert links == [f"/v1/kernels/{KERNEL}{end}" for end in ("/cubin", "/source", "", "/tuning")]
    assert "kernel.sass: listing of the machine code" in text.replace(" :", ":")
    lines = kernel.files[TUNING_FILE].splitlines()
    assert text.count("winner 1 ") == 1 and len(lines) == manifest["search"]["shortlisted"]


def test_measured_figures_stand_beside_the_libraries(client: TestClient, view: FakeView, kernel: Artifact) -> None:
    view.kernels[KERNEL] = timed(kernel)
    text = page(client, f"/kernels/{KERNEL}").text
    assert "this kernel 21.50 µs" in text
    assert "cuBLAS fp32, dense 43.00 µs 2.00 times the kernel's" in text
    assert "cuBLAS TF32, dense 17.20 µs 0.80 times the kernel's" in text
    assert "Sputnik" not in text and "cuSPARSELt" not in text
    assert "Advice dense" in text and "1980 MHz" in text
    assert "B comes from memory" in text
    times = {"cusparselt_fp16_micros": 12.9, "cusparselt_weights": "A pruned to 2:4"}
    view.kernels[KERNEL] = changed(kernel, measured={**view.kernels[KERNEL].manifest["measured"], **times})
    text = page(client, f"/kernels/{KERNEL}").text
    assert "cuSPARSELt fp16, 2:4 12.90 µs 0.60 times the kernel's" in text and "cuSPARSELt A pruned to 2:4" in text


def test_two_kernels_stand_side_by_side(client: TestClient, view: FakeView, kernel: Artifact) -> None:
    """Rows in which they differ are marked, and what only one of them has is a dash."""
    other = digest_of("other")
    view.kernels[other] = timed(changed(kernel, registers=255))
    form = page(client, f"/kernels/{KERNEL}")
    assert any(one["action"] == f"/kernels/{KERNEL}/beside" for one in form.all("form"))
    found = page(client, f"/kernels/{KERNEL}/beside?other={other}")
    assert "Registers" in found.text and "255 a thread" in found.text
    assert f"Time, this kernel - {timed(kernel).manifest['measured']['micros']:.2f} µs" in found.text
    rows = {row.get("class") for row in found.all("tr")}
    assert rows == {None, "chosen"}
    same = page(client, f"/kernels/{KERNEL}/beside?other={KERNEL}")
    assert not any(row.get("class") for row in same.all("tr"))
    for wrong in (f"/kernels/{KERNEL}/beside?other=1", f"/kernels/{KERNEL}/beside?other={'0' * 64}"):
        assert client.get(wrong).status_code == 404
    assert client.get(f"/kernels/{KERNEL}/beside").status_code == 422


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        ({"cold": False, "cache": "network"}, "the L2 cache, if it fits, and all else from memory, as in a network"),
        ({"cold": False, "cache": "warm"}, "the L2 cache, if it fits"),
        ({"cold": False}, "the L2 cache, if it fits"),  # of before there was a third
    ],
)
def test_it_says_what_was_in_the_cache(
    client: TestClient, view: FakeView, kernel: Artifact, measured: dict[str, Any], words: str
) -> None:
    shown = timed(kernel).manifest["measured"]
    del shown["cache"]
    view.kernels[KERNEL] = changed(kernel, measured={**shown, **measured})
    assert f"B comes from {words} Bound" in page(client, f"/kernels/{KERNEL}").text


def test_candidates_that_were_timed_are_shown_with_the_fastest_as_winner(
    client: TestClient, view: FakeView, kernel: Artifact
) -> None:
    lines = [json.loads(line) for line in kernel.files[TUNING_FILE].splitlines()][:3]
    times = ({"measured_micros": 9.5}, {"measured_micros": 7.25}, {"measured_micros": None, "failure": HOSTILE})
    log = "".join(json.dumps({**line, **measured}) + "\n" for line, measured in zip(lines, times, strict=True))
    view.kernels[KERNEL] = artifact.from_files({**kernel.files, TUNING_FILE: log.encode()}, "the test's")
    text = page(client, f"/kernels/{KERNEL}").text
    assert "Those that were timed, in that order." in text
    assert "winner 2 " in text and " 7.25 " in text and f" {HOSTILE} Time by stage" in text


def test_a_kernel_without_a_map_of_its_space_is_shown(client: TestClient, view: FakeView, kernel: Artifact) -> None:
    view.kernels[KERNEL] = without_space(kernel)
    found = page(client, f"/kernels/{KERNEL}")
    assert "An earlier version made this kernel and kept no map" in found.text
    assert not any(svg.get("class") == "space" for svg in found.all("svg"))
    assert kernel.manifest["name"] in found.text


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (SPACE_FILE, b"{", "There is no drawing: space.json is damaged"),
        (SPACE_FILE, json.dumps({**WHOLE, "cells": ["."]}).encode(), "no drawing: space.json contradicts itself."),
        (TUNING_FILE, b"{", "The log of the search cannot be read."),
        (TUNING_FILE, b"", "The log of the search cannot be read."),
        (TUNING_FILE, b"[1]\n", "The log of the search cannot be read."),
        (TUNING_FILE, b'{"measured_micros": "<b>"}\n', "The log of the search cannot be read."),
    ],
)
def test_a_damaged_file_is_said_to_be(
    client: TestClient, view: FakeView, kernel: Artifact, name: str, content: bytes, words: str
) -> None:
    view.kernels[KERNEL] = artifact.from_files({**kernel.files, name: content}, "the test's")
    assert words in page(client, f"/kernels/{KERNEL}").text


def test_what_a_manifest_says_is_text(client: TestClient, view: FakeView, kernel: Artifact) -> None:
    view.kernels[KERNEL] = changed(kernel, name=HOSTILE, toolchain=HOSTILE)
    assert page(client, f"/kernels/{KERNEL}").text.count(HOSTILE) >= 2


@hypothesis_settings(deadline=None, max_examples=40)
@given(m=st.integers(1, 300), n=st.integers(1, 3000))
def test_a_drawing_covers_exactly_what_was_removed(m: int, n: int) -> None:
    choice = searched(m, n).choice
    assert choice is not None
    found = tile_map.map_of(choice.space, [], choice.winner)
    drawing = draw(found)
    x, y, width, height = drawing.frame
    cell = width * height / found.size
    area = 0.0
    for region in drawing.regions:
        for rect in re.findall(r"M([\d.]+) ([\d.]+)H([\d.]+)V([\d.]+)H\1z", region.path):
            left, bottom, right, top = map(float, rect)
            assert x <= left < right <= x + width and y <= top < bottom <= y + height
            area += (right - left) * (bottom - top)
    assert region.left == drawing.left == len(choice.space.survivors)
    assert area == pytest.approx(cell * (found.size - drawing.left), rel=0.05, abs=0.05 * width)
    assert sum(count for _, _, count in drawing.stages) + drawing.left == drawing.size
