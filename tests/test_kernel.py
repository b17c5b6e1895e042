"""The library: whatever form the weights come in, the kernel multiplies by them, also after a way through a folder."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import fields
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.io
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import lospmm
from lospmm.artifact.artifact import SOURCE_FILES
from lospmm.artifact.manifest import MANIFEST_FILE
from lospmm.codegen.lower import lower, with_swaps
from lospmm.cpu import shipped
from lospmm.errors import BadMatrix, BadRequest, Unsupported, VerificationFailed
from lospmm.gpu import detect
from lospmm.matrix.csr import from_dense
from lospmm.problem.convolution import unfold
from lospmm.problem.device import DEVICES
from lospmm.problem.epilogue import epilogue_of
from lospmm.problem.problem import Problem
from lospmm.space.candidates import Schedule, TileSize, UnrolledPlan
from lospmm.space.reorder import regroup
from lospmm.toolchain.discover import find_host_compiler
from lospmm.tuning import tuner
from tests.cpu.drawn_layers import convolutions
from tests.fixtures.interpret import interpret

N = 70
FORMS = {
    "dense float64": lambda dense: dense.astype(np.float64),
    "dense, by columns": np.asfortranarray,
    "np.matrix": lambda dense: scipy.sparse.csr_matrix(dense).todense(),
    "SparseMatrix": from_dense,
    "csr_array": scipy.sparse.csr_array,
    "csr_matrix": scipy.sparse.csr_matrix,
    "csc_array": scipy.sparse.csc_array,
    "coo_matrix": scipy.sparse.coo_matrix,
    "bsr_array": lambda dense: scipy.sparse.bsr_array(dense, blocksize=(2, 2)),  # stores zeros
    "dia_array": scipy.sparse.dia_array,
    "lil_array": scipy.sparse.lil_array,
    "dok_array": scipy.sparse.dok_array,
}


def draw(shape: tuple[int, int], *, density: float, seed: int = 0) -> NDArray[np.float32]:
    """Weights, pruned; row 1 and column 2 are empty."""
    rng = np.random.default_rng(seed)
    weights = np.where(rng.random(shape) < density, rng.standard_normal(shape), 0).astype(np.float32)
    weights[1:2] = 0
    weights[:, 2:3] = 0
    return weights


def tune(weights: Any, **options: Any) -> lospmm.Kernel:
    return lospmm.tune(weights, **{"n": N, "device": "h200", **options})


def assert_multiplies(kernel: lospmm.Kernel, dense: NDArray[np.float32], b: NDArray[np.float32]) -> None:
    """Also exactly zero where no term is."""
    c = kernel.run_on_cpu(b)
    exact, exact_b = dense.astype(np.float64), b.astype(np.float64)
    assert (c.dtype, c.shape) == (np.float32, (len(dense), b.shape[1]))
    assert np.all(np.abs(c - exact @ exact_b) <= 1e-5 * (np.abs(exact) @ np.abs(exact_b)))


@pytest.fixture(scope="module")
def dense() -> NDArray[np.float32]:
    return draw((24, 18), density=0.2)


@pytest.fixture(scope="module")
def kernel(dense: NDArray[np.float32]) -> lospmm.Kernel:
    return tune(dense)


@pytest.fixture(scope="module")
def b(dense: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.random.default_rng(1).standard_normal((dense.shape[1], N)).astype(np.float32)


SHAPES = (((24, 18), 0.2, 70), ((1, 1), 1.0, 1), ((70, 5), 0.0, 33), ((130, 40), 0.05, 257))
WINDOW = lospmm.Convolution(2, 3, 7, 6, 3, 3, stride=(1, 2), padding=(1, 1))
WINDOWS = (None, WINDOW, lospmm.Convolution(3, 8, 5, 5, 1, 1, stride=(2, 2)))


def by_emitter(cases: Sequence[Any], of_cuda: Any) -> list[tuple[str, Any]]:
    """All of them; of CUDA one, since nvcc takes a second for each, and the program is the same."""
    return [*product(("sass", "ptx"), cases), ("cuda", of_cuda)]


@pytest.mark.parametrize(("emitter", "case"), by_emitter(SHAPES, SHAPES[0]))
def test_a_kernel_multiplies(emitter: str, case: tuple[tuple[int, int], float, int]) -> None:
    if emitter == "cuda" and find_host_compiler() is None:
        pytest.skip("CUDA C++ runs on a CPU only through g++")
    shape, density, n = case
    weights = draw(shape, density=density)
    b = np.random.default_rng(n).standard_normal((shape[1], n)).astype(np.float32)
    kernel = tune(weights, n=n, emitter=emitter)
    assert_multiplies(kernel, weights, b)
    assert kernel.manifest["emitter"] == emitter


@pytest.mark.parametrize(("density", "n"), [(0.2, 70), (0.6, 300), (0.0, 5)])
def test_machine_code_gives_every_bit_of_the_oracle(density: float, n: int) -> None:
    """From the cubin that was kept: the program, with swapped rows, is lowered anew from what the manifest says."""
    weights = draw((40, 50), density=density)
    kernel = tune(weights, n=n, emitter="sass")
    tile, matrix = kernel.manifest["tile"], from_dense(weights)
    problem = Problem(matrix, n, DEVICES["h200"])
    schedule = Schedule(**{axis.name: tile[axis.name] for axis in fields(Schedule)})
    size = TileSize(tile["rows"], tile["cols"])
    candidate = with_swaps(problem, UnrolledPlan(size, schedule, regroup(matrix, [size.rows])[size.rows]))
    assert tile["nnc_sum"] == candidate.tiling.nnc.sum()
    program = lower(problem, candidate)
    b = np.random.default_rng(n).standard_normal((50, n)).astype(np.float32)
    found = kernel.run_on_cpu(b)
    np.testing.assert_array_equal(found.view(np.uint32), interpret(program, b).view(np.uint32))


@pytest.mark.parametrize(("emitter", "window"), by_emitter(WINDOWS, WINDOW))
def test_a_kernel_is_a_layer(window: lospmm.Convolution | None, emitter: str, tmp_path: Path) -> None:
    """From the folder that it was saved to, against float64."""
    if emitter == "cuda" and find_host_compiler() is None:
        pytest.skip("CUDA C++ runs on a CPU only through g++")
    random, m = np.random.default_rng(5), 20
    k, n = (40, 70) if window is None else (window.k, window.n)
    weights, bias = draw((m, k), density=0.3), random.standard_normal(m)
    tune(weights, n=n, emitter=emitter, convolution=window, bias=bias, relu=True, residual=True).save(tmp_path / "k")
    kernel = lospmm.load(tmp_path / "k")
    b = random.standard_normal((k, n) if window is None else window.input_shape).astype(np.float32)
    residual = random.standard_normal((m, n) if window is None else window.output_shape(m)).astype(np.float32)
    c = kernel.run_on_cpu(b, residual)
    assert c.shape == residual.shape
    unfolded = b if window is None else unfold(window, b, np.arange(n))
    found, third = (a if window is None else a.transpose(1, 0, 2, 3).reshape(m, n) for a in (c, residual))
    expected = weights.astype(np.float64) @ unfolded + third + bias.astype(np.float32)[:, np.newaxis]
    np.testing.assert_allclose(found, np.maximum(expected, 0), atol=1e-5)
    assert [argument["name"] for argument in kernel.manifest["arguments"]] == ["b", "c", "residual"]
    assert kernel.manifest["epilogue"] == {"bias": True, "relu": True, "residual": True}
    assert kernel.artifact.convolution == window
    assert kernel.artifact.epilogue() == epilogue_of(bias, relu=True, residual=True)


@settings(deadline=None, max_examples=15)
@given(window=convolutions(), m=st.integers(1, 6), relu=st.booleans(), seed=st.integers(0, 99))
def test_a_convolution_is_that_of_pytorch(window: lospmm.Convolution, m: int, relu: bool, seed: int) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")
    random = np.random.default_rng(seed)
    shape = (m, window.channels, window.kernel_height, window.kernel_width)
    weights = np.where(random.random(shape) < 0.5, random.standard_normal(shape), 0).astype(np.float32)
    x, bias = random.standard_normal(window.input_shape), random.standard_normal(m)
    y = tune(weights, n=None, convolution=window, bias=bias, relu=relu).run_on_cpu(x)
    expected = torch.nn.functional.conv2d(
        torch.tensor(x.astype(np.float32)).double(),
        torch.tensor(weights).double(),
        torch.tensor(bias.astype(np.float32)).double(),
        stride=window.stride,
        padding=window.padding,
        dilation=window.dilation,
    )
    expected = torch.relu(expected) if relu else expected
    np.testing.assert_allclose(y, expected.numpy(), atol=2e-5)


def test_what_a_layer_is_given_wrong_is_refused(dense: NDArray[np.float32], kernel: lospmm.Kernel) -> None:
    b = np.zeros((18, N), np.float32)
    with pytest.raises(BadRequest, match="this kernel takes no residual"):
        kernel.run_on_cpu(b, b)
    layer = tune(dense, residual=True)
    with pytest.raises(BadRequest, match="this kernel takes a residual"):
        layer.run_on_cpu(b)
    with pytest.raises(BadRequest, match=r"the residual has the shape \(18, 70\); this kernel takes \(24, 70\)"):
        layer.run_on_cpu(b, b)
    with pytest.raises(BadRequest, match="n is missing: give the number of columns of B"):
        lospmm.tune(dense, device="h200")
    with pytest.raises(BadMatrix, match=r"weights of shape \(2, 3, 3, 2\): the convolution takes \(2, 3, 3, 3\)"):
        lospmm.tune(np.ones((2, 3, 3, 2)), convolution=WINDOW, device="h200")
    with pytest.raises(BadRequest, match=r"convolution is of type str: give a lospmm\.Convolution"):
        lospmm.tune(np.ones((2, 3, 3, 3)), convolution="1x3x8x8,3x3", device="h200")
    with pytest.raises(BadRequest, match="the directory is of type NoneType: give a path"):
        kernel.save(None)
    with pytest.raises(BadRequest, match="18 columns, and the convolution 3 channels x 3 x 3 = 27"):
        lospmm.tune(dense, convolution=WINDOW, device="h200")


def test_a_folder_without_its_bias_still_runs_but_cannot_be_compared(
    dense: NDArray[np.float32], tmp_path: Path
) -> None:
    tune(dense, bias=np.ones(24)).save(tmp_path / "k")
    (tmp_path / "k" / "bias.npy").unlink()
    kernel = lospmm.load(tmp_path / "k")
    assert (kernel.run_on_cpu(np.zeros((18, N), np.float32)) == 1).all()
    with pytest.raises(BadRequest, match=r"bias\.npy: .*; tune it again"):
        kernel.artifact.epilogue()


def test_a_product_is_the_kernel_that_it_was(kernel: lospmm.Kernel) -> None:
    """Its name, its files and its arguments say nothing of layers."""
    manifest = kernel.manifest
    assert manifest["name"].startswith("lospmm_24x18_n70_") and len(manifest["name"]) == 25
    assert "bias.npy" not in kernel.artifact.files
    assert (manifest["convolution"], [a["name"] for a in manifest["arguments"]]) == (None, ["b", "c"])


@pytest.mark.parametrize("form", FORMS)
def test_the_form_of_the_weights_does_not_matter(form: str, dense: NDArray[np.float32], kernel: lospmm.Kernel) -> None:
    assert tune(FORMS[form](dense)) == kernel


@pytest.mark.parametrize("suffix", ["npy", "npz", "mtx"])
def test_weights_may_be_a_file(suffix: str, tmp_path: Path, dense: NDArray[np.float32], kernel: lospmm.Kernel) -> None:
    path = tmp_path / f"weights.{suffix}"
    match suffix:
        case "npy":
            np.save(path, dense)
        case "npz":
            scipy.sparse.save_npz(path, scipy.sparse.csr_array(dense))
        case "mtx":
            scipy.io.mmwrite(path, scipy.sparse.coo_array(dense), precision=9)
    assert tune(path) == tune(str(path)) == kernel


def test_a_pattern_is_drawn_by_its_seed(tmp_path: Path) -> None:
    path = tmp_path / "pattern.smtx"
    path.write_text("2, 3, 3\n0 2 3\n0 2 1\n")
    manifest = tune(path, seed=7).manifest
    assert (manifest["values"], manifest["seed"], manifest["nnz"]) == ("drawn", 7, 3)
    assert tune(path, seed=np.int64(7)).manifest == manifest
    assert manifest["fingerprint"] != tune(path, seed=8).manifest["fingerprint"]


def test_a_kernel_comes_back_from_its_folder(
    tmp_path: Path, kernel: lospmm.Kernel, dense: NDArray[np.float32], b: NDArray[np.float32]
) -> None:
    kernel.save(tmp_path / "kernel")
    kernel.save(str(tmp_path / "kernel"))  # in place of itself
    loaded = lospmm.load(tmp_path / "kernel")
    assert loaded == kernel and hash(loaded) == hash(kernel)
    assert loaded.cubin.startswith(b"\x7fELF")
    assert loaded.source.startswith(f"// {kernel.manifest['name']} for sm_90: the tiles")
    assert_multiplies(loaded, dense, b)


def test_what_runs_is_the_text_in_the_folder(
    tmp_path: Path, dense: NDArray[np.float32], b: NDArray[np.float32]
) -> None:
    tune(dense, emitter="ptx").save(tmp_path)
    source = tmp_path / SOURCE_FILES["ptx"]
    source.write_text(source.read_text().replace("fma.rn", "fma.rz", 1))
    with pytest.raises(BadRequest, match=r"kernel\.ptx is not the one that the manifest names"):
        lospmm.load(tmp_path)
    digest = {"source_sha256": hashlib.sha256(source.read_bytes()).hexdigest()}
    (tmp_path / MANIFEST_FILE).write_text(json.dumps(json.loads((tmp_path / MANIFEST_FILE).read_text()) | digest))
    with pytest.raises(VerificationFailed, match=r"fma\.rz"):
        lospmm.load(tmp_path).run_on_cpu(b)


def test_a_kernel_of_several_tiles_to_a_block_still_runs(
    tmp_path: Path, kernel: lospmm.Kernel, b: NDArray[np.float32]
) -> None:
    """Earlier versions made such, of groups of four column blocks; its grid has fewer blocks than it has tiles."""
    kernel.save(tmp_path / "kernel")
    path = tmp_path / "kernel" / MANIFEST_FILE
    manifest = json.loads(path.read_text())
    blocks = manifest["launch"]["grid"][1] - manifest["tile"]["zero_blocks"]
    manifest["tile"] |= {"count": 2 * blocks - 1, "tiles_per_block": 2, "stores_early": False, "column_group": 4}
    path.write_text(json.dumps(manifest))
    found = lospmm.load(tmp_path / "kernel")
    np.testing.assert_array_equal(found.run_on_cpu(b), kernel.run_on_cpu(b))


@pytest.mark.slow
def test_columns_may_be_computed_in_several_runs(
    kernel: lospmm.Kernel, b: NDArray[np.float32], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = kernel.run_on_cpu(b)
    tile = kernel.manifest["tile"]
    block_rows = (tile["count"] + tile["zero_blocks"]) * tile["split_k"]
    monkeypatch.setattr(shipped, "_THREADS_AT_ONCE", 32 * block_rows)
    np.testing.assert_array_equal(kernel.run_on_cpu(b), at_once)
    monkeypatch.setattr(shipped, "_THREADS_AT_ONCE", 1)
    np.testing.assert_array_equal(kernel.run_on_cpu(b), at_once)


@pytest.mark.parametrize(
    "form", [np.asfortranarray, lambda b: b.astype(np.float64), lambda b: b[::-1, ::-1][::-1, ::-1]]
)
def test_the_layout_of_b_does_not_matter(form: Any, kernel: lospmm.Kernel, b: NDArray[np.float32]) -> None:
    np.testing.assert_array_equal(kernel.run_on_cpu(form(b)), kernel.run_on_cpu(b))


def test_the_same_request_is_not_tuned_again(
    dense: NDArray[np.float32], kernel: lospmm.Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(tuner, "prepare")
    assert tune(dense, n=np.int64(N)) == kernel


def test_auto_is_the_gpu_of_this_machine(
    dense: NDArray[np.float32], kernel: lospmm.Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detect, "detect_device", lambda: DEVICES["h200"])
    assert lospmm.tune(dense, n=N) == kernel


def corrupted(name: str, value: int) -> scipy.sparse.csr_array:
    """A CSR whose index arrays were changed after SciPy looked at them."""
    weights = scipy.sparse.csr_array(np.eye(20, 10))
    getattr(weights, name)[3] = value
    return weights


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        (corrupted("indptr", 10**6), "SciPy refuses these weights"),
        (corrupted("indices", 99), "SciPy refuses these weights"),
        (corrupted("indices", -1), "SciPy refuses these weights"),
        (np.ma.array(np.eye(4), mask=np.eye(4) > 0), "a masked array"),
        (scipy.sparse.coo_array(([1.0, 2.0], ([0, 0], [1, 1])), shape=(2, 2)), "given twice"),
        (scipy.sparse.csr_array((np.ones(2), np.array([1, 1]), np.array([0, 2])), shape=(1, 2)), "given twice"),
        (scipy.sparse.coo_array(np.ones(3)), "two sides"),
        (np.ones((2, 2, 2)), "two dimensions"),
        (np.ones((0, 2)), "two sides"),
        (np.array([[1.0, np.nan]]), "not a finite float32"),
        (np.array([[1.0, 1e300]]), "not a finite float32"),
        (np.ones((2, 2), dtype=np.complex64), "not real numbers"),
        (np.array([["a", "b"]]), "not real numbers"),
        ([[1.0, 2.0]], "weights of type list: give a NumPy array, a SciPy"),
        (
            SimpleNamespace(detach=None),
            r"a NumPy array, as weights\.detach\(\)\.cpu\(\)\.float\(\)\.numpy\(\), a S",
        ),
        (SimpleNamespace(detach=None, layout="torch.sparse_csr"), r"\.cpu\(\)\.float\(\)\.to_dense\(\)\.numpy\(\)"),
        (Path("absent.npz"), "no such file"),
    ],
)
def test_bad_weights_are_refused(weights: Any, reason: str) -> None:
    with pytest.raises(BadMatrix, match=reason):
        tune(weights)


@pytest.mark.parametrize(
    ("request_", "error", "reason"),
    [
        ({"n": 0}, BadRequest, "n is 0"),
        ({"device": "h2000"}, BadRequest, "did you mean"),
        ({"emitter": "opencl"}, BadRequest, "choose one of"),
        ({"emitter": "sass", "device": "b200"}, Unsupported, "machine code for sm_100: known are sm_90"),
        ({"tensor": "fc1.weight"}, BadRequest, "not a file"),
        ({"tensor": 5}, BadRequest, "tensor is 5: give the name of one"),
        ({"biass": np.ones(16)}, BadRequest, "no such option; did you mean bias?"),
        ({"n": 1.5}, BadRequest, "n is 1.5: give a whole number"),
        ({"n": True}, BadRequest, "n is True: give a whole number"),
        ({"seed": 1.5}, BadRequest, "seed is 1.5: give a whole number"),
        ({"seed": "a"}, BadRequest, "seed is 'a': give a whole number"),
        ({"seed": True}, BadRequest, "seed is True: give a whole number"),
        ({"convolution": "1x48x8x8,1x1"}, BadRequest, "convolution is of type str: give a lospmm.Convolution"),
        ({"bias": np.ma.array(np.ones(16), mask=np.arange(16) > 3)}, BadRequest, "bias is a masked array: fill what"),
        ({"device": None}, BadRequest, "unknown device 'None'"),
        ({"colour": "red"}, BadRequest, "'colour': no such option; there are device, convolution, bias"),
        ({"n": np.array([4])}, BadRequest, r"n is array\(\[4\]\): give a whole number"),
    ],
)
def test_bad_requests_are_refused(
    request_: dict[str, Any], error: type[Exception], reason: str, dense: NDArray[np.float32]
) -> None:
    with pytest.raises(error, match=reason):
        tune(dense, **request_)


@pytest.mark.parametrize("shape", [(N, 18), (18, N + 1), (18,)])
def test_a_b_of_another_shape_is_refused(shape: tuple[int, ...], kernel: lospmm.Kernel) -> None:
    with pytest.raises(BadRequest, match=r"this kernel takes \(18, 70\)"):
        kernel.run_on_cpu(np.zeros(shape, dtype=np.float32))


def test_a_b_of_no_real_numbers_is_refused(kernel: lospmm.Kernel) -> None:
    with pytest.raises(BadRequest, match="complex64"):
        kernel.run_on_cpu(np.zeros((18, N), dtype=np.complex64))


@pytest.mark.parametrize(
    ("b", "reason"),
    [
        ([[1.0]], "type list"),
        (np.full((18, N), 1e300), r"B holds 1e\+300, beyond the range of float32"),
        (np.ma.ones((18, N)), "B is a masked array: fill what"),
    ],
)
def test_a_b_that_is_no_array_of_float32_is_refused(b: Any, reason: str, kernel: lospmm.Kernel) -> None:
    with pytest.raises(BadRequest, match=reason):
        kernel.run_on_cpu(b)


def test_a_manifest_cannot_be_changed(kernel: lospmm.Kernel) -> None:
    kernel.manifest["tile"]["rows"] = 99
    assert kernel.manifest["tile"]["rows"] != 99


def test_folders_without_a_kernel_are_refused(tmp_path: Path, kernel: lospmm.Kernel) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(BadRequest, match="no such folder"):
        lospmm.load(tmp_path / "absent")
    with pytest.raises(BadRequest, match="the directory is of type NoneType: give a path"):
        lospmm.load(None)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="holds no"):
        lospmm.load(tmp_path)
    with pytest.raises(BadRequest, match="something other"):
        kernel.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_kernel_shows_itself_in_one_line(kernel: lospmm.Kernel) -> None:
    assert repr(kernel) == f"<Kernel {kernel.manifest['name']} for h200 (sm_90)>"
