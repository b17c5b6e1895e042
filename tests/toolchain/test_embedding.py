"""docs/embedding.md: its commands as they stand, with a driver that runs the machine code on the CPU."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from lospmm.model.report import COLUMNS
from tests.docs.pages import names, rows, section
from tests.toolchain.embedded import PAGE, PROGRAM, commands, compiler, draw_layers, headers, printed, run

WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Werror")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's layers, tuned, and its program beside them, linked with the emulated driver."""
    folder = tmp_path_factory.mktemp("embedding")
    source = Path(__file__).with_name("emulated_driver.c")
    library = ("-shared", "-fPIC", "-I", str(headers() / "include"), "-o", str(folder / "libcuda.so.1"))
    subprocess.run((compiler("cc"), "-O2", *WARNINGS, *library, str(source)), check=True)
    draw_layers(folder / "layers")
    tune, program = commands()
    tuned = run(tune, folder)
    assert tuned.returncode == 0, tuned.stderr
    built = run(program.splitlines()[0], folder, CUDA=str(headers()), LIBRARY_PATH=str(folder))
    assert built.returncode == 0, built.stderr
    return folder


def launched(folder: Path, arguments: str = "kernels layers") -> subprocess.CompletedProcess[str]:
    command = commands()[1].splitlines()[1].replace("kernels layers", arguments)
    return run(
        command,
        folder,
        LD_LIBRARY_PATH=str(folder),
        EMULATED_FOLDER=str(folder),
        EMULATED_COMMAND=f"{sys.executable} -m tests.toolchain.emulated_launch",
    )


def without_errors(text: str) -> str:
    return re.sub(r"error [0-9.e+-]+", "error", text)


@pytest.fixture
def spoiled(workplace: Path) -> Iterator[Path]:
    """The table of kernels, which a test may spoil."""
    table = workplace / "kernels" / "kernels.tsv"
    text = table.read_text()
    yield table
    table.write_text(text)


@pytest.mark.parametrize(("program", "standard"), [("cc", "c11"), ("c++", "c++17")])
def test_the_program_compiles_as_c_and_as_cpp(program: str, standard: str, tmp_path: Path) -> None:
    language = ("-x", "c++") if program == "c++" else ()
    options = (*language, f"-std={standard}", "-O2", *WARNINGS, "-I", str(headers() / "include"))
    subprocess.run((compiler(program), *options, "-c", str(PROGRAM), "-o", str(tmp_path / "object")), check=True)


@pytest.mark.slow
def test_the_page_does_what_it_says(workplace: Path) -> None:
    answer = launched(workplace)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert without_errors(answer.stdout) == without_errors(printed())
    errors = [float(error) for error in re.findall(r"error ([0-9.e+-]+)", answer.stdout)]
    assert len(errors) == 2 and all(0 < error < 1e-6 for error in errors)


def test_the_page_has_every_column() -> None:
    found = [cells for cells in rows(section(PAGE.read_text(), "## The folder")) if len(cells) == 2]
    start = next(at for at, cells in enumerate(found) if cells[0] == "column")
    assert [name for cells in found[start + 1 :] for name in names(cells[0])] == list(COLUMNS)


def test_other_weights_are_noticed(workplace: Path, tmp_path: Path) -> None:
    layers = draw_layers(tmp_path / "layers")
    layers["fc2"][3, 5] += 0.01
    np.save(tmp_path / "layers" / "fc2.npy", layers["fc2"])
    answer = launched(workplace, f"kernels {tmp_path / 'layers'}")
    assert (answer.returncode, answer.stderr) == (1, "")
    assert answer.stdout.endswith("2 kernels, 1 wrong\n")


def _one_more(found: re.Match[str]) -> str:
    """A grid with a block too many along x."""
    return f"\t1024\t{int(found[1]) + 1}\t"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: re.sub(r"\t1024\t(\d+)\t", _one_more, text, count=1), "CUDA_ERROR_LAUNCH_FAILED"),
        (lambda text: text.replace("\tfc1\t", "\tfc3\t"), "CUDA_ERROR_FILE_NOT_FOUND"),
        (lambda text: text.replace("\t64\t", "\tmany\t"), "a line is not as this program knows them"),
        (lambda text: text.replace("\t64\t64\t", "\t64\t65\t"), "in the shape of the kernel"),
        (lambda text: text.replace("\tfc1\n", "\tfc4\n"), "layers/fc4.npy: cannot be opened"),
        (lambda _: "", "kernels.tsv: cannot be read"),
    ],
)
def test_what_fails_has_a_reason(workplace: Path, spoiled: Path, change: Callable[[str], str], says: str) -> None:
    text = spoiled.read_text()
    spoiled.write_text(change(text))
    assert spoiled.read_text() != text
    answer = launched(workplace)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert says in answer.stderr
