"""The paper's tables and figures, from invented records."""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest

from benchmarks.paper import __main__ as paper
from benchmarks.paper import cost, emitters, fetch, load, loss, regrouped, speed
from benchmarks.paper.cost import OURS, TOP
from benchmarks.paper.tables import AXES, Table
from lospmm.problem.device import DEVICES
from lospmm.problem.problem import Problem
from lospmm.space.explore import explore
from lospmm.space.reorder import natural_order, regroup
from lospmm_datasets.synthetic import uniform

POINTS = [(8, 64, 1, 8, 1, 0), (8, 96, 1, 8, 1, 0), (16, 64, 1, 8, 1, 128)]
COUNTS = {
    "exhaustive": [4_000_000, 40],
    "constraints": [2_000_000, 20],
    "constraints, each text once": [500_000, 20],
    "proxies": [100_000, 20],
    "rank and proxies": [50_000, 10],
}


@pytest.fixture(autouse=True)
def _no_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mpl.rcParams, "backend", "agg")


def choice(name: str = "shapes", problem: str = "one", times: tuple[float, ...] = (10.0, 11.0, 12.0)) -> dict[str, Any]:
    return {
        "set": name,
        "problem": problem,
        "chosen": {"default": POINTS[1], "estimate": POINTS[2], "proxies": POINTS[0]},
        "micros": [[*point, micros, micros, 2 * micros] for point, micros in zip(POINTS, times, strict=True)],
        "proxies": [[*point, value] for point, value in zip(POINTS, (3.0, 2.0, 1.0), strict=True)],
        "seconds": {"default": 2.0},
        "cores": 5,
        "counts": COUNTS,
    }


def tables() -> list[Table]:
    points = [[*point, "spread", micros, micros] for point, micros in zip(POINTS, (10.0, 11.0, 12.0), strict=True)]
    return [Table({"problem": "one", "points": points, "finalists": [[*POINTS[0], 9.9, 10.0, 10.1]]})]


def test_one_tile_size_is_the_best_in_the_mean() -> None:
    def timed(**micros: float) -> Table:
        points = {(rows, 64, 1, 8, 1, 0): one for rows, one in zip((8, 16), micros.values(), strict=True)}
        best = min(points, key=lambda point: points[point])
        lines = [[*point, "spread", one, one] for point, one in points.items()]
        return Table({"problem": "one", "points": lines, "finalists": [[*best, points[best]]]})

    assert loss.by_one_tile_size([timed(low=10, high=12), timed(low=15, high=10)]) == pytest.approx([0.2, 0.0])


def pair(emitter: str = "cuda", kernel: float = 10.0, proxy: float = 5.0) -> dict[str, Any]:
    return {
        "m": 64,
        "k": 64,
        "n": 96,
        "nnz": 400,
        "emitter": emitter,
        "kernel_micros": kernel,
        "proxy_micros": proxy,
        "plain_micros": proxy / 2,
        "kernel_seconds": 6.0,
        "proxy_seconds": 3.0,
        "kernel_instructions": 60_000,
        "proxy_instructions": 30_000,
    }


def test_a_loss_is_over_the_fastest_of_all_and_told_by_set_and_way() -> None:
    assert loss.losses(choice()) == pytest.approx({"default": 0.1, "estimate": 0.2, "proxies": 0.0})
    rows = loss.rows([choice(), choice("real", "layer", (10.0, 20.0, 30.0))], tables())
    told = {row.what: (row.paper, row.here) for row in rows}
    assert told["proxies, 1 of the 205: mean loss (median, greatest)"] == ("2.07 %, 1.34 %", "0.00% (0.00%, 0.00%)")
    assert told["default, 1 real layers: mean loss (median, greatest)"] == ("-", "100.00% (100.00%, 100.00%)")
    assert told["rank correlation of proxies and kernels, 1 of the 205: median"][1] == "-1.00 (-1.00 to -1.00)"
    assert told["the fastest's estimate over the least, cut at 2: median (greatest)"][1] == "1.00 (1.00)"
    assert told["problems, of 1 of the 205, whose fastest kernel the thinned space lacks"][1] == "0"
    other = choice(times=(20.0, 11.0, 10.0)) | {"micros": [[*POINTS[0], 9.0], [24, 32, 1, 4, 1, 0, 8.0]]}
    assert (loss.is_beyond(choice(), tables()[0]), loss.is_beyond(other, tables()[0])) == (False, True)
    assert told["pass that found the fastest"][1] == "spread 1"


def test_searches_by_nvcc_are_the_sample_times_their_instructions() -> None:
    assert cost.nvcc_rate([pair(), pair("sass")]) == pytest.approx(1e-4)
    found = cost.seconds([choice()], [pair()])
    assert found["exhaustive"] == pytest.approx([400 + 40 * cost.TIMING_SECONDS])
    assert found[OURS] == [2.0]
    rows = cost.rows([choice()], [pair()])
    (ratio,) = (row.here for row in rows if row.what.startswith("constraints, each text once by nvcc"))
    assert ratio == "25, 25; 5, 5"


def test_what_searches_compile_is_counted() -> None:
    problem = Problem(uniform(96, 64, 0.8, seed=0), 256, DEVICES["h200"])
    found = cost.counts(problem)
    space = explore(problem, lambda limits: regroup(problem.matrix, limits))
    assert found["constraints"][1] == len(space.survivors)
    assert found["rank and proxies"][1] == TOP
    assert found["exhaustive"][0] >= found["constraints"][0] > found["constraints, each text once"][0]
    assert found["constraints, each text once"][0] >= found["proxies"][0] > found["rank and proxies"][0] > 0
    sizes = {one.tile.rows: one.tiling for one in space.survivors}
    every = sum(int(tiling.nnc.sum()) + problem.matrix.nnz + problem.matrix.m for tiling in sizes.values())
    assert found["constraints, each text once"][0] == every


def test_figure_4_holds_the_nonzeros_while_the_columns_change() -> None:
    for nnz, nnc in ((2048, 64), (3072, 2048), (4096, 1536)):
        matrix = load.matrix_of(nnz, nnc)
        tiling = natural_order(matrix, load.M)
        assert (matrix.nnz, tiling.nnc.tolist(), tiling.sizes.tolist()) == (nnz, [nnc], [load.M])
    records = [
        {"nnz": nnz, "nnc": nnc, "prefetch": prefetch, "micros": nnc / prefetch}
        for nnz in load.NNZ
        for nnc in load.NNC
        for prefetch in load.PREFETCHES
    ]
    assert [row.here for row in load.rows(records)] == ["32.00; 32.00"]


def test_figure_6_tells_what_regrouping_gives_where_rows_are_alike() -> None:
    records = [
        {"load_ratio": ratio, "similarity": at, "method": method, "micros": micros}
        for ratio in regrouped.LOAD_RATIOS
        for at in regrouped.SIMILARITIES
        for method, micros in zip(regrouped.STYLES, (10.0, 10 - 5 * at, 8 - 4 * at, 5 - 2.5 * at), strict=True)
    ]
    assert [row.here for row in regrouped.rows(records)] == [f"{of}, {of}, {of}" for of in ("0.55", "1.25", "2.00")]
    assert len(regrouped.rows([one for one in records if one["method"] != "Mt-KaHyPar"])) == 2


def timed(rows: int, iterations: int) -> dict[str, Any]:
    return {"figure": "9", "rows": rows, "iterations": iterations, "instructions": 100, "micros": min(iterations, 600)}


def test_figure_9_compares_long_code_with_that_of_300_dense_iterations() -> None:
    records = [timed(rows, iterations) for rows, iterations in fetch.KERNELS]
    assert [row.here for row in fetch.rows(records)] == ["1.00, 1.00, 1.00"]
    counted = [
        {"figure": "9 counted", "rows": rows, "iterations": iterations, fetch.LOOKUPS: 1200.0, fetch.MISSES: iterations}
        for rows, iterations in fetch.KERNELS
    ]
    (first, *_) = fetch.rows(records + counted)
    assert first.here == ", ".join(["50% to 100%"] * len(fetch.ROWS))


def test_counters_that_do_not_answer_are_told_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert list(fetch.counted(str(tmp_path / "none"), 1.0)) == []
    assert "ncu counts nothing" in capsys.readouterr().err


def test_counters_are_read_kernel_by_kernel(tmp_path: Path) -> None:
    program = tmp_path / "ncu"
    lines = ['"ID","Kernel Name","Metric Name","Metric Value"']
    for number in range(len(fetch.KERNELS)):
        lines += [f'"{number}","lospmm_1","{fetch.MISSES}","1,00{number % 10}"']
    program.write_text(f"#!{sys.executable}\nprint('==PROF== begun')\nprint('''{chr(10).join(lines)}''')\n")
    program.chmod(0o755)
    found = list(fetch.counted(str(program), 20.0))
    assert [(one["rows"], one["iterations"]) for one in found] == list(fetch.KERNELS)
    assert found[3][fetch.MISSES] == 1003.0


def test_figure_10_counts_where_a_kernel_is_faster() -> None:
    ratios = {"cusparse": 2.0, "cublas_fp32": 0.5, "bound": 0.5}
    one = {"set": "shapes", "drawn_sparsity": 0.9, "ratios": ratios}
    other = {**one, "ratios": {**ratios, "cublas_fp32": 8.0}}
    rows = speed.rows([one, other, {**one, "set": "seven"}, {**one, "failure": "why"}])
    assert [row.here for row in rows] == ["2.00 (2)", "2.00 (1)"]


def test_every_figure_is_drawn_and_has_no_rows_without_its_files(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    assert all(paper.table(name, results) == [] for name in paper.FIGURES)
    rng = np.random.default_rng(0)
    figures = [
        *({"figure": "4", "nnz": nnz, "nnc": nnc, "prefetch": 4 + 68 * deep, "micros": 1.0 + rng.random()}
          for nnz in load.NNZ for nnc in load.NNC for deep in (0, 1)),
        *({"figure": "6", "load_ratio": ratio, "similarity": similarity, "method": method, "micros": 1.0}
          for ratio in regrouped.LOAD_RATIOS for similarity in regrouped.SIMILARITIES for method in regrouped.STYLES),
        *(timed(rows, iterations) for rows, iterations in fetch.KERNELS),
    ]  # fmt: skip
    (results / paper.MEASURED).write_text("".join(json.dumps(one) + "\n" for one in figures))
    pairs = [pair(emitter, 10.0 + at, 5.0 + at) for emitter in emitters.LANGUAGES for at in range(4)]
    (results / "proxies_on_gpu.jsonl").write_text("".join(json.dumps(one) + "\n" for one in pairs))
    (tmp_path / "choices-0.jsonl").write_text(json.dumps(choice()) + "\n")
    (tmp_path / "exhaustive-0.jsonl").write_text(json.dumps(tables()[0].line) + "\n")
    paper.pack(sorted(tmp_path.glob("*.jsonl")), results)
    pictures = set()
    for name, figure in paper.FIGURES.items():
        if name != "Figure 10":
            assert paper.table(name, results)
            paper.draw(name, results)
            pictures.add(figure.picture)
    assert {path.name for path in results.glob("*.png")} == pictures - {None}


def test_choices_of_a_later_search_take_the_place_of_an_earlier_one_s(tmp_path: Path) -> None:
    before, after = choice(times=(10.0, 11.0, 12.0)), choice(times=(20.0, 21.0, 22.0))
    ways = list(after["chosen"])[:1]
    after |= {name: {way: after[name][way] for way in ways} for name in ("chosen", "seconds")} | {"ways": ways}
    for name, line in (("choices-old", {**before, "ways": list(before["chosen"])}), ("choices-new", after)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(line) + "\n")
    paper.pack([tmp_path / "choices-old.jsonl"], tmp_path, [tmp_path / "choices-new.jsonl"])
    found = paper.read_lines(tmp_path / paper.CHOICES)
    assert {tuple(line["chosen"]) for line in found} == {tuple(ways), tuple(list(before["chosen"])[1:])}
    assert all(list(line["chosen"]) == line["ways"] for line in found)
    paper.pack([tmp_path / "choices-new.jsonl"], tmp_path, [tmp_path / "choices-old.jsonl"])
    assert len(paper.read_lines(tmp_path / paper.CHOICES)) == 1, "nothing is left of the other"


def test_parts_are_packed_by_problem_and_the_last_line_counts(tmp_path: Path) -> None:
    for part, times in enumerate([(10.0, 11.0, 12.0), (20.0, 21.0, 22.0)]):
        (tmp_path / f"choices-{part}.jsonl").write_text(json.dumps(choice(times=times)) + "\n")
    paper.pack(sorted(tmp_path.glob("choices-*.jsonl")), tmp_path)
    (found,) = paper.read_lines(tmp_path / paper.CHOICES)
    assert found["micros"][0][: len(AXES) + 1] == [*POINTS[0], 20.0]
    first = (tmp_path / paper.CHOICES).read_bytes()
    paper.pack(sorted(tmp_path.glob("choices-*.jsonl")), tmp_path)
    assert (tmp_path / paper.CHOICES).read_bytes() == first
