"""Which toolkit is taken, and what is said where none will do. The tools are shell scripts."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lospmm.errors import BadRequest, ToolchainFault, Unsupported
from lospmm.toolchain import discover
from lospmm.toolchain.discover import Toolkit, check_arch, find_host_compiler, find_toolkit

Tool = Callable[[str, str], Path]
PARTS = ("nvcc", "ptxas", "nvlink")


@pytest.fixture
def make_toolkit(tmp_path: Path, write_tool: Tool) -> Callable[..., Path]:
    def make(name: str, version: str = "13.0.88", parts: tuple[str, ...] = PARTS, archs: str = "sm_75 sm_90") -> Path:
        for part in parts:
            script = f'case "$1" in --version) echo "tools, release X, V{version}" ;; *) echo {archs} ;; esac'
            write_tool(f"{name}/bin/{part}", script)
        return tmp_path / name

    return make


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(discover, "find_nvidia_binary_utility", lambda _: None)


def test_the_order_of_places(make_toolkit: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each place is taken when the ones before it are gone."""
    names = ("LOSPMM_TOOLKIT", "CUDA_HOME", "CUDA_PATH", "PATH", "PyPI")
    roots = {name: make_toolkit(f"{name}/site-packages") for name in names}
    for name in names[:3]:
        monkeypatch.setenv(name, str(roots[name]))
    monkeypatch.setenv("PATH", f"{roots['PATH'] / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(discover, "find_nvidia_binary_utility", lambda tool: str(roots["PyPI"] / "bin" / tool))
    for name in names:
        found = find_toolkit()
        assert (found.origin, found.nvcc) == (name, roots[name] / "bin" / "nvcc")
        if name == "PATH":
            monkeypatch.setenv("PATH", "/usr/bin:/bin")
        else:
            monkeypatch.delenv(name, raising=False)
        discover.settings.cache_clear()
        find_toolkit.cache_clear()


@pytest.mark.parametrize(
    "flaw",
    [{"parts": ("nvcc", "ptxas")}, {"version": "11.8.89"}, {"version": "unknown"}],
    ids=["no nvlink", "too old", "no version"],
)
def test_an_unusable_toolkit_is_passed_over(
    make_toolkit: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, flaw: dict[str, object]
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(make_toolkit("flawed", **flaw)))
    monkeypatch.setenv("CUDA_PATH", str(make_toolkit("good", version="12.8.61")))
    found = find_toolkit()
    assert (found.origin, found.version) == ("CUDA_PATH", "12.8.61")


def test_tools_of_two_releases_are_passed_over(
    make_toolkit: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvcc of one release writes PTX that ptxas of another refuses."""
    make_toolkit("mixed", version="13.5.37", parts=("nvcc",))
    monkeypatch.setenv("CUDA_HOME", str(make_toolkit("mixed", version="13.0.88", parts=("ptxas", "nvlink"))))
    with pytest.raises(ToolchainFault, match=r"CUDA_HOME: the tools in .* are of different releases: 13\.5"):
        find_toolkit()


def test_a_link_on_the_path_leads_to_the_toolkit(
    make_toolkit: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = make_toolkit("cuda")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "nvcc").symlink_to(root / "bin" / "nvcc")
    monkeypatch.setenv("PATH", f"{tmp_path / 'links'}:/usr/bin:/bin")
    assert find_toolkit().ptxas == root / "bin" / "ptxas"


def test_a_toolkit_named_by_the_user_is_not_replaced(
    make_toolkit: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOSPMM_TOOLKIT", str(make_toolkit("named", parts=("nvcc", "nvlink"))))
    monkeypatch.setenv("CUDA_HOME", str(make_toolkit("good")))
    with pytest.raises(BadRequest, match=r"LOSPMM_TOOLKIT: no ptxas in .*named/bin"):
        find_toolkit()


def test_no_toolkit_says_where_it_was_looked_for(
    make_toolkit: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(make_toolkit("old", version="11.2.1")))
    with pytest.raises(ToolchainFault, match=r"LOSPMM_TOOLKIT.*CUDA_HOME: CUDA 11\.2\.1 in .*old/bin is older"):
        find_toolkit()


def toolkit(archs: set[str]) -> Toolkit:
    return Toolkit(Path("nvcc"), Path("ptxas"), Path("nvlink"), "13.0.88", frozenset(archs), "PyPI")


def test_a_v100_needs_an_older_toolkit() -> None:
    with pytest.raises(Unsupported, match=r"V100 \(sm_70\) needs a CUDA 12 toolkit; name one with LOSPMM_TOOLKIT"):
        check_arch(toolkit({"sm_75", "sm_100", "sm_90"}), "sm_70")
    check_arch(toolkit({"sm_70", "sm_90"}), "sm_70")


def test_a_new_gpu_needs_a_newer_toolkit() -> None:
    with pytest.raises(Unsupported, match=r"sm_130 is not among the targets of CUDA 13\.0\.88.*newer toolkit"):
        check_arch(toolkit({"sm_75", "sm_90"}), "sm_130")


def test_an_architecture_with_its_features_is_the_same_target() -> None:
    check_arch(toolkit({"sm_90"}), "sm_90a")


def test_a_word_is_not_an_architecture() -> None:
    with pytest.raises(Unsupported, match="'hopper' is not a GPU architecture"):
        check_arch(toolkit({"sm_90"}), "hopper")


def test_no_host_compiler_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_tool: Tool) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_host_compiler() is None
    find_host_compiler.cache_clear()
    compiler = write_tool("g++", "true")
    assert find_host_compiler() == compiler
