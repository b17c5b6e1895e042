"""The page about PyTorch: its examples run, and its names are the package's."""

import inspect
import json
import re
import typing
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'lospmm[torch]'")

import lospmm.nn
from lospmm.nn.fusion import FusedConv2d
from lospmm.nn.report import Row
from tests.docs.pages import DOCS, ROOT, blocks, names, rows, section

PAGE = (DOCS / "pytorch.md").read_text()


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    variables: dict[str, object] = {"__name__": "page"}
    for block in blocks(PAGE):
        assert block.language == "python"
        exec(compile(block.text, f"docs/pytorch.md:{block.line}", "exec"), variables)
    assert "2 of 2 layers run on kernels" in capsys.readouterr().out
    assert (tmp_path / "build" / "tuned" / "model.json").is_file()
    assert isinstance(variables["graph"].get_submodule("0"), FusedConv2d)  # type: ignore[attr-defined]


#: What README's example has for a GPU, and what stands for it without one.
WITHOUT_GPU = {
    ".cuda()": "",
    ', device="cuda"': "",
    "torch.randn(32, 128, 768": "torch.randn(1, 8, 768",
    "sparsify_(model, example)": 'sparsify_(model, example, device="h200", choice="sparse")',
    'load_(model, "build/tuned")': 'load_(model, "build/tuned", emulate=True)',
}


def example_of_the_readme() -> str:
    (text,) = (block.text for block in blocks((ROOT / "README.md").read_text()) if "lospmm.nn" in block.text)
    return text


@pytest.mark.slow
def test_the_example_of_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = example_of_the_readme()
    for gpu, cpu in WITHOUT_GPU.items():
        assert text.count(gpu) == 1, gpu
        text = text.replace(gpu, cpu)
    variables: dict[str, typing.Any] = {}
    exec(text, variables)
    assert "2 of 2 layers run on kernels" in capsys.readouterr().out
    assert variables["output"].shape == variables["example"].shape


@pytest.mark.gpu
def test_the_example_of_the_readme_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    variables: dict[str, typing.Any] = {}
    exec(example_of_the_readme(), variables)
    assert variables["output"].shape == variables["example"].shape


def test_the_names_are_the_packages() -> None:
    listed = [name for row in list(rows(section(PAGE, "## Names")))[1:] for name in names(row[0])]
    assert {name.partition("(")[0] for name in listed} == set(lospmm.nn.__all__) <= {*dir(lospmm.nn)}
    for name in listed:
        called, _, rest = name.partition("(")
        if rest:
            own = [one.lstrip("*") for one in inspect.signature(getattr(lospmm.nn, called)).parameters]
            assert [one.lstrip("*") for one in re.split(r", ", rest.rstrip(")")) if one != "*"] == own


def test_the_figures_are_those_that_were_measured() -> None:
    lines = map(json.loads, (ROOT / "benchmarks" / "results" / "nn_overhead.jsonl").read_text().splitlines())
    measured = {line["what"]: line["micros"] for line in lines}
    for what, text in (
        ("python", "an eager layer takes {layer:.2f} us (dense {dense layer:.2f})"),
        ("CUDA graph", "in a CUDA graph {layer:.2f} us (dense {dense layer:.2f})"),
    ):
        micros = measured[what]
        own = {"layer": micros.get("layer without lospmm-torch", micros["layer"])}  # results of when there were two
        assert text.format_map(micros | own) in " ".join(PAGE.split())


def test_the_fields_of_a_row_are_all_there() -> None:
    listed = {name for row in list(rows(section(PAGE, "## The report")))[1:] for name in names(row[0])}
    assert listed == set(Row.__dataclass_fields__)
