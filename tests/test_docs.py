"""The documentation against the code: commands, options, fields, settings, names, links, examples and figures."""

import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from lospmm import errors
from lospmm.artifact.manifest import SCHEMA, Manifest
from lospmm.cli.main import BROKEN_PIPE, run
from lospmm.codegen import EMITTERS, ops
from lospmm.codegen.sass import addresses, machine, scheduler
from lospmm.cpu import hazards
from lospmm.gpu.detect import detect_device, own_gpu
from lospmm.model.report import PARTIAL
from lospmm.settings import Settings
from lospmm.space import estimate
from lospmm.tuning import options
from tests.cli.command import H200, WEIGHTS
from tests.docs.commands import check, commands, leaves, targets
from tests.docs.pages import (
    DOCS,
    ROOT,
    Block,
    anchors,
    blocks,
    entries,
    links,
    names,
    pages,
    printed_fields,
    rows,
    section,
)
from tests.docs.renew import REGIONS, renewed

PAGES = {str(path.relative_to(ROOT)): path for path in pages()}

#: Lines of a kernel's description that depend on the compiler and the clock.
VOLATILE = ("device", "registers", "code", "seconds")

#: Objects whose fields are the names of constraints, or the axes of a family.
ANY_NAMES = ("removed", "winner", "built", "differences")

#: How a block of commands begins that only a machine with a GPU can run.
NEEDS_GPU = "# needs an NVIDIA GPU"


def text_of(name: str) -> str:
    return PAGES[name].read_text()


def table_below(name: str, heading: str) -> list[list[str]]:
    return list(rows(section(text_of(name), heading)))[1:]


@pytest.mark.parametrize("path", REGIONS, ids=lambda path: path.name)
def test_what_follows_from_code_and_results_is_up_to_date(path: Path) -> None:
    assert path.read_text() == renewed(path), "python -m tests.docs.renew writes it anew; read the diff"


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    page = PAGES[name]
    for link in links(page.read_text()):
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.is_relative_to(ROOT) and target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link


def test_the_readme_is_short() -> None:
    assert len(text_of("README.md").split()) <= 900


def test_the_index_lists_every_page() -> None:
    listed = {(DOCS / link).resolve() for link in links(text_of("docs/index.md"))}
    assert listed == {path for path in PAGES.values() if path.is_relative_to(DOCS)} - {DOCS / "index.md"}


@pytest.mark.parametrize("name", PAGES)
def test_commands_are_there_with_their_options(name: str) -> None:
    for block in blocks(text_of(name)):
        if block.language == "sh":
            for words in commands(block.text):
                check(words)


def default_of(parameter: typing.Any) -> str:
    if parameter.required:
        return "required"
    is_unset = parameter.default is None or parameter.default is False or parameter.default == ""
    return "-" if is_unset else f"`{parameter.default}`"


def name_of(parameter: typing.Any) -> str:
    return str(parameter.opts[0] if parameter.param_type_name == "option" else parameter.metavar)


def described_options(heading: str) -> dict[str, str]:
    """The defaults of the options below a heading of docs/cli.md; some are "as `tune`" or "those of `tune`"."""
    text = section(text_of("docs/cli.md"), heading)
    found = {name: default for name, default, _ in entries(text)}
    others = re.search(r"^- those of `tune` but (.*?):", text, re.MULTILINE)
    if others or "as `tune`" in found.values():
        of_tune = described_options("## lospmm tune")
        found = {name: of_tune[name] if default == "as `tune`" else default for name, default in found.items()}
        if others:
            found = {name: of_tune[name] for name in of_tune.keys() - set(names(others[1]))} | found
    return found


@pytest.mark.parametrize(("command", "code"), list(leaves()))
def test_options_and_their_defaults(command: str, code: typing.Any) -> None:
    described, shared = described_options(f"## {command}"), described_options("## Shared options")
    assert not described.keys() & shared.keys()
    expected = {name_of(parameter): default_of(parameter) for parameter in code.params}
    assert {**described, **{name: shared[name] for name in expected.keys() & shared.keys()}} == expected


@pytest.mark.parametrize("option", ["--json", "--quiet"])
def test_commands_of_shared_options(option: str) -> None:
    with_option = {command for command, code in leaves() if option in {name_of(parameter) for parameter in code.params}}
    (meaning,) = (meaning for name, _, meaning in entries(text_of("docs/cli.md")) if name == option)
    _, is_not_for, without = meaning.partition("; not for ")
    listed = {f"lospmm {name}" for name in names(without or meaning)}
    assert listed == ({command for command, _ in leaves()} - with_option if is_not_for else with_option)


def test_the_page_has_no_other_commands() -> None:
    headings = re.findall(r"^## (lospmm.*)$", text_of("docs/cli.md"), re.MULTILINE)
    assert headings == [command for command, _ in leaves()]


def test_choices_of_tune() -> None:
    text = section(text_of("docs/cli.md"), "## lospmm tune")
    described = {name: names(meaning) for name, _, meaning in entries(text)}
    for option, choices in options.CHOICES.items():
        assert set(choices) == set(described[f"--{option}"]), option


def test_options_of_the_library() -> None:
    found = re.search(r"with the same defaults: (.*?)\. ", " ".join(text_of("docs/library.md").split()))
    assert found
    assert set(names(found[1])) == {"tensor", "seed", *(field.name for field in dataclasses.fields(options.Options))}


@pytest.mark.parametrize(
    ("name", "words", "of_a_command"),
    [
        ("docs/cli.md", r"It decides how to search: (.*?) are refused", True),
        ("docs/library.md", r"options of `lospmm.tune`, but (.*?), which the service decides itself", False),
    ],
)
def test_what_a_service_decides_itself(name: str, words: str, of_a_command: bool) -> None:
    shown = {"shortlist_size": "shortlist", "budget_seconds": "budget"}
    own = [field.name for field in dataclasses.fields(options.Options) if field.name not in options.SERVED_OPTIONS]
    found = re.search(words, " ".join(text_of(name).split()))
    assert found
    assert set(names(found[1])) == {f"--{shown.get(option, option)}" if of_a_command else option for option in own}


def test_exit_codes() -> None:
    described = {int(cells[0]) for cells in list(rows(text_of("docs/cli.md").partition("\n## ")[0]))[1:]}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.LospmmError)]
    assert described == {0, BROKEN_PIPE, PARTIAL} | {kind.exit_code for kind in kinds if kind is not errors.LospmmError}
    listed = {name for cells in table_below("docs/library.md", "## Errors") for name in names(cells[0])}
    assert listed == {kind.__name__ for kind in kinds} - {"LospmmError"}


def fields(kind: typing.Any, prefix: str = "") -> Iterator[str]:
    """The fields of a dataclass, those of the dataclasses in it with a dot."""
    for name, hint in typing.get_type_hints(kind).items():
        inner = next((part for part in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(part)), None)
        if inner is None or typing.get_origin(hint) is not None:
            yield prefix + name
        if inner is not None:
            yield from fields(inner, f"{prefix}{name}.")


def test_fields_of_the_manifest() -> None:
    found = list(entries(section(text_of("docs/manifest.md"), "## manifest.json")))
    assert sorted(name for name, _, _ in found) == sorted(fields(Manifest))
    assert ("schema", "-", str(SCHEMA)) in found


@pytest.mark.usefixtures("own_settings", "workplace")
def test_fields_of_what_commands_print(capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"a": WEIGHTS, "nan": np.full((2, 2), np.nan, np.float32)}, "net.safetensors")
    assert run(["keys", "add", "team"]) == 0
    weights, untimed = ("net.safetensors", "--n", 4, *H200), ("--measure", "none", "--verify", "none")
    for heading, status, orders in (
        ("report.json", 6, [("tune-model", *weights, *untimed, "--out", "net")]),
        ("space", 0, [("space", *weights, "--tensor", "a")]),
        ("replay", 0, [("replay", "net/a")]),
        ("verify", 0, [("verify", "net")]),
        ("cache ls, prune and verify", 0, [("cache", "verify"), ("cache", "ls"), ("cache", "prune", "--max-mb", 0)]),
        ("keys ls", 0, [("keys", "ls")]),
    ):
        capsys.readouterr()
        answers = [(run([*map(str, order), "--json"]), capsys.readouterr().out) for order in orders]
        assert {got for got, _ in answers} == {status}, answers
        described = [name for name, _, _ in entries(section(text_of("docs/cli.md"), f"### {heading}"))]
        printed = {field for _, out in answers for field in printed_fields(json.loads(out), ANY_NAMES)}
        assert sorted(described) == sorted(printed), heading


def test_settings_and_their_defaults() -> None:
    described = {name: default for name, default, _ in entries(text_of("docs/settings.md"))}
    for name, field in Settings.model_fields.items():
        default = described.pop(f"LOSPMM_{name.upper()}")
        if field.default_factory is None:
            assert default == ("-" if field.default is None else f"`{field.default}`"), name
    assert not described


def test_every_name_of_the_glossary_is_in_the_code() -> None:
    tables = list(rows(text_of("docs/glossary.md")))
    for cells in tables:
        for name in names(cells[-2]):
            module, _, attribute = name.rpartition(".")
            package = "" if name.startswith("lospmm_") else "lospmm."
            try:
                owner = importlib.import_module(package + module)
            except ModuleNotFoundError:  # a field of a class
                module, _, kind = module.rpartition(".")
                owner = getattr(importlib.import_module(package + module), kind)
            assert hasattr(owner, attribute) or attribute in typing.get_type_hints(owner), name


def test_constants_of_the_estimate() -> None:
    table = [cells for cells in rows(section(text_of("docs/estimate.md"), "## What it adds up")) if len(cells) == 3][1:]
    described = {names(cells[0])[0]: float(cells[1]) for cells in table}
    constants = {name: value for name, value in vars(estimate).items() if name.isupper() and isinstance(value, int)}
    assert described == {**constants, **dataclasses.asdict(estimate.RATES)}


def test_constants_of_the_machine_code() -> None:
    """Every constant that the page gives, by its module; those of the scheduler and of addresses are all there."""
    table = [cells for cells in rows(section(text_of("docs/machine_code.md"), "## Facts")) if len(cells) == 3][1:]
    described = {names(cells[0])[0]: cells[1].split()[0].replace(",", "") for cells in table if names(cells[0])}
    modules = {"scheduler": scheduler, "machine": machine, "addresses": addresses, "ops": ops, "hazards": hazards}
    for name, value in described.items():
        module, constant = name.split(".")
        assert int(value) == getattr(modules[module], constant), name
    values = {**vars(addresses), **vars(scheduler)}
    constants = {name for name, value in values.items() if name.isupper() and type(value) is int}
    of_other_modules = {"PT", "RZ", "ZERO"}
    own = {name for name in constants - of_other_modules if name[0] != "_"}
    assert own <= {name.split(".")[1] for name in described}


def test_targets_of_the_makefile() -> None:
    described = {
        name.removeprefix("make ") for row in table_below("CONTRIBUTING.md", "## Commands") for name in names(row[0])
    }
    assert described == targets()


def test_the_example_shows_every_emitter() -> None:
    assert {f"flow {language}" for language in EMITTERS} <= REGIONS[DOCS / "flow.md"].keys()


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, with this environment's commands first on PATH."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def executed(block: Block) -> str:
    """What a block prints."""
    program = (sys.executable, "-c") if block.language == "python" else ("bash", "-ec")
    done = subprocess.run((*program, block.text), capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0, f"line {block.line}: {done.stderr}"
    return done.stdout


def is_ours(block: Block) -> bool:
    """Whether a block has commands of this program alone, and none that serves until it is stopped."""
    words = commands(block.text) if block.language == "sh" else []
    return bool(words) and all(line[0] == "lospmm" and line[1] != "serve" for line in words)


def steady(output: str) -> list[str]:
    """The lines of an output; of those that depend on the machine, their names."""
    return [line.split()[0] if line.startswith(VOLATILE) else line.rstrip() for line in output.splitlines()]


def draw_the_matrix_of_the_readme() -> None:
    """Write w.npy as README does."""
    executed(next(block for block in blocks(text_of("README.md")) if "w.npy" in block.text))


@pytest.mark.skipif(own_gpu() == "h200", reason="the page shows what is printed without the GPU that it names")
@pytest.mark.usefixtures("workplace")
def test_the_example_of_the_readme() -> None:
    """The commands run, and the lines shown are among those printed, in this order."""
    draw_the_matrix_of_the_readme()
    printed, compared = None, 0
    for block in blocks(text_of("README.md")):
        if is_ours(block) and not block.text.startswith(NEEDS_GPU):
            printed = executed(block)
        elif block.language == "text":
            assert printed is not None
            shown = steady(block.text)
            assert shown == [line for line in steady(printed) if line in shown], f"line {block.line}: {printed}"
            compared += 1
    assert compared == 1


@pytest.mark.slow  # five processes, most with PyTorch
@pytest.mark.usefixtures("workplace")
def test_the_tutorial_of_deployment() -> None:
    """All of it but what needs the GPU, from an empty folder."""
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'lospmm[torch]'")
    model, *rest = (block for block in blocks(text_of("docs/deploy.md")) if not block.text.startswith(NEEDS_GPU))
    Path("model.py").write_text(model.text)
    printed = [executed(block) for block in rest]
    assert len(printed) == 5
    assert [line.split()[-1] for line in printed[3].splitlines()[1:-1]] == ["loaded"] * 3
    assert printed[4] == "0.weight 32 27 2048\n2.weight 32 288 392\n4.weight 10 1568 8\n"


@pytest.mark.usefixtures("workplace")
def test_the_tiling_space_of_the_command_page() -> None:
    draw_the_matrix_of_the_readme()
    (block,) = blocks(section(text_of("docs/cli.md"), "## lospmm space"))
    assert "balance" in executed(block)


@pytest.mark.gpu
@pytest.mark.usefixtures("workplace")
def test_the_gpu_commands_of_the_readme() -> None:
    draw_the_matrix_of_the_readme()
    printed = [executed(block) for block in blocks(text_of("README.md")) if block.text.startswith(NEEDS_GPU)]
    assert printed and all("cuSPARSE" in output for output in printed)


@pytest.mark.usefixtures("workplace")
def test_the_library_page() -> None:
    python = [block.text for block in blocks(text_of("docs/library.md")) if block.language == "python"]
    assert executed(Block("python", "".join(python[:3]), 1)).startswith("<Kernel lospmm_96x64_n200_")


@pytest.mark.gpu
@pytest.mark.usefixtures("workplace")
def test_the_launch_of_the_library_page() -> None:
    torch = pytest.importorskip("torch")
    tune, *_, call = (b.text for b in blocks(text_of("docs/library.md")) if b.language == "python")
    variables: dict[str, typing.Any] = {}
    exec(tune.replace('"h200"', f'"{detect_device().name}"'), variables)
    exec(call, variables)
    expected = torch.tensor(variables["weights"].toarray(), device="cuda") @ variables["b"]
    assert torch.allclose(variables["c"], expected, atol=1e-3)
