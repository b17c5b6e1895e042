"""The real compilers accept every golden text, whole."""

from pathlib import Path

import pytest

from lospmm.artifact.artifact import SOURCE_FILES
from lospmm.codegen.emission import Emission, Language
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel

GOLDEN = Path(__file__).parent.parent / "golden"
LANGUAGES: dict[str, Language] = {".ptx": "ptx", ".cu": "cuda"}
FILES = sorted(path.name for path in GOLDEN.iterdir() if path.suffix in LANGUAGES)


def test_every_language_has_golden_texts() -> None:
    assert {path.suffix for path in GOLDEN.iterdir()} >= {Path(name).suffix for name in SOURCE_FILES.values()}
    assert {Path(name).suffix for name in FILES} == {*LANGUAGES}  # what is compiled as text; test_cubin.py has the rest


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if at % 3 else ()) for at, name in enumerate(FILES)]
)
def test_it_compiles_and_needs_no_stack(name: str, store: Store) -> None:
    text = (GOLDEN / name).read_text()
    emission = Emission(LANGUAGES[Path(name).suffix], "example", text, (text,))
    binary = compile_kernel(emission, arch="sm_90", registers=128, store=store, workers=1)
    assert binary.code_bytes > 0
    assert binary.stack_bytes == binary.spill_bytes == 0
