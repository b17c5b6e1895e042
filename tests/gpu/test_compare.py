"""The comparison: its bound, its advice, what fails in it, and the whole of it with a fake GPU and fake libraries."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lospmm.artifact import artifact
from lospmm.artifact.artifact import Artifact
from lospmm.cli import bench as bench_command
from lospmm.cli.main import run
from lospmm.cli.show import show_comparison, show_manifest
from lospmm.errors import BadRequest, GpuFault, VerificationFailed
from lospmm.gpu import bench as measure
from lospmm.gpu.bench import Bench
from lospmm.gpu.compare import Comparison, bound, compare
from lospmm.gpu.libraries import BASELINES, BaselineTime, VariantTime, baselines_of, cusparselt
from lospmm.gpu.libraries.work import COMMAND, BaselineTask
from lospmm.gpu.messages import Measurement, Ready
from lospmm.gpu.timing import COPIES_BEHIND, FULL, Effort, Timing
from lospmm.matrix.csr import SparseMatrix, from_dense
from lospmm.matrix.npz import write_npz
from lospmm.problem.convolution import Convolution
from lospmm.problem.device import DEVICES, Clocks
from lospmm.problem.dtype import DTYPES, FLOAT32
from lospmm.problem.epilogue import Epilogue
from lospmm.problem.launch import Launch
from lospmm.problem.problem import Problem
from lospmm.problem.values import VALUE_TYPES
from lospmm.settings import settings
from lospmm.toolchain.compile import Compiled
from tests.artifact.test_artifact import MANIFEST, WHOLE
from tests.fixtures import bench_worker, fake_gpu
from tests.gpu.test_bench import LAUNCH, N, gate_library, weights

__all__ = ["gate_library"]  # a fixture

CLOCKS = Clocks(1980, 3201, 41, ("power cap",))


def drawn(m: int, k: int, nnz: int) -> SparseMatrix:
    flat = np.zeros(m * k, dtype=np.float32)
    flat[np.random.default_rng(0).choice(m * k, nnz, replace=False)] = 1
    return from_dense(flat.reshape(m, k))


# The bounds that were written down beside the first measurements on an H200, in microseconds.
@pytest.mark.parametrize(
    ("m", "k", "n", "density", "arithmetic", "memory"),
    [(768, 768, 4096, 0.1, 7.2, 5.2), (768, 768, 4096, 0.02, 1.4, 5.2), (64, 576, 50176, 0.1, 5.5, 26.8)],
)
def test_the_bound(m: int, k: int, n: int, density: float, arithmetic: float, memory: float) -> None:
    found = bound(Problem(drawn(m, k, round(m * k * density)), n, DEVICES["h200"]))
    assert found.micros == pytest.approx(max(arithmetic, memory), rel=0.02)
    assert found.by == ("arithmetic" if arithmetic > memory else "memory")


@pytest.mark.parametrize(
    ("name", "dense_arithmetic", "memory"), [("tf32", 9.77, 5.24), ("float16", 4.88, 2.62), ("bfloat16", 4.88, 2.62)]
)
def test_the_bound_of_a_type(name: str, dense_arithmetic: float, memory: float) -> None:
    """Of 768 x 768 x 4096 on an H200: its tensor cores do 494.7 and 989.4 TFLOP/s."""
    for nnz, micros in ((768 * 768, dense_arithmetic), (7680, memory)):
        found = bound(Problem(drawn(768, 768, nnz), 4096, DEVICES["h200"], dtype=DTYPES[name]))
        assert found.micros == pytest.approx(micros, rel=0.01)
    old = Problem(drawn(768, 768, 768 * 768), 4096, DEVICES["v100"], dtype=DTYPES["bfloat16"])
    assert bound(old).by == "arithmetic"
    assert bound(old).micros == pytest.approx(2 * 768 * 768 * 4096 / 15.7e6)


@given(m=st.integers(1, 40), k=st.integers(1, 40), n=st.integers(1, 10**6), share=st.floats(0, 1))
def test_the_bound_grows_with_the_work(m: int, k: int, n: int, share: float) -> None:
    def micros(nnz: int, columns: int) -> float:
        return bound(Problem(drawn(m, k, nnz), columns, DEVICES["a100"])).micros

    nnz = round(m * k * share)
    assert 0 < micros(0, n) <= micros(nnz, n) <= micros(m * k, n)
    assert micros(nnz, 2 * n) == pytest.approx(2 * micros(nnz, n))


def timed(name: str, micros: float, way: str = "way") -> BaselineTime:
    return BaselineTime(name, f"{name} 1.0 (lib.so)", (VariantTime(way, Timing(micros, 0.01, 15), 2e-7, None),), None)


class FakeBench:
    """A ``Bench`` that answers from lists; every use of it is written down."""

    def __init__(
        self, kernel: list[Measurement], baselines: dict[str, BaselineTime | str], cache: str = "cold"
    ) -> None:
        self.problem = Problem(drawn(8, 8, 9), 16, DEVICES["h200"])
        self.cache = cache
        self.kernel, self.baselines = kernel, baselines
        self.asked: list[object] = []
        self.efforts: set[Effort] = set()

    def measure(self, *kernel: object, effort: Effort) -> Measurement:
        assert kernel == (KERNEL.cubin, KERNEL.entry, KERNEL.launch)
        self.efforts.add(effort)
        self.asked.append(KERNEL.entry)
        return self.kernel.pop(0)

    def request(self, command: str, task: object) -> object:
        assert command == "baseline"
        assert isinstance(task, BaselineTask)
        self.efforts.add(task.effort)
        self.asked.append(task)
        answer = self.baselines[task.name]
        if isinstance(answer, str):
            raise GpuFault(answer)
        return answer

    def start(self) -> Ready:
        return Ready("NVIDIA H200", 7, "580.159.04")


def measured(micros: float) -> Measurement:
    return Measurement(Timing(micros, 0.02, 15), 3e-7, None, CLOCKS)


KERNEL = Compiled(b"cubin", "kernel", Launch((2, 1, 1), 32))


def compared(
    micros: float = 20.0, last: float = 20.5, cache: str = "cold", **baselines: float | BaselineTime | str
) -> tuple[Comparison, FakeBench]:
    found = {name: timed(name, value) if isinstance(value, float) else value for name, value in baselines.items()}
    fake: Any = FakeBench([measured(micros), measured(micros), measured(last)], found, cache)
    return compare(fake, KERNEL, names=tuple(baselines)), fake


def test_the_kernel_comes_before_among_and_after_the_libraries() -> None:
    steps: list[tuple[str, int, int]] = []
    times = [measured(21.0), measured(19.0), measured(20.0)]
    fake: Any = FakeBench(times, {name: timed(name, 90.0) for name in ("cusparse", "cublas_fp32")})
    path = Path("libsputnik.so")
    names = ["cusparse", "cublas_fp32"]
    found = compare(fake, KERNEL, names=names, sputnik=path, progress=lambda *step: steps.append(step))
    tasks = [BaselineTask(name, "cold", path) for name in names]
    assert fake.asked == ["kernel", tasks[0], "kernel", tasks[1], "kernel"]
    assert (found.micros, found.noise) == (20.0, pytest.approx(2 / 19))  # the median, and how far they are apart
    assert (found.gpu, found.copies, found.clocks, found.max_relative_error) == ("NVIDIA H200", 7, CLOCKS, 3e-7)
    assert steps == [
        ("compare", 0, 5),
        ("compare", 1, 5),
        ("compare", 2, 5),
        ("compare", 3, 5),
        ("compare", 4, 5),
        ("compare", 1, 1),
    ]


def test_a_kernel_measured_right_before_is_timed_once_more() -> None:
    fake: Any = FakeBench([measured(20.0)], {"cusparse": timed("cusparse", 90.0)})
    found = compare(fake, KERNEL, names=["cusparse"], before=measured(21.0))
    assert fake.asked == ["kernel", BaselineTask("cusparse", "cold")]
    assert (found.micros, found.noise) == (21.0, pytest.approx(0.05))


def test_no_library_takes_a_convolution() -> None:
    """The kernel is timed three times all the same."""
    window = Convolution(2, 4, 5, 5, 2, 2)
    fake: Any = FakeBench([measured(20.0), measured(22.0), measured(21.0)], {})
    fake.problem = Problem(drawn(8, 16, 9), window.n, DEVICES["h200"], window)
    found = compare(fake, KERNEL)
    assert (found.micros, found.baselines, found.advice) == (21.0, {}, "sparse")
    assert fake.asked == ["kernel"] * 3


def test_the_bound_counts_what_is_read_and_written() -> None:
    window, matrix = Convolution(2, 4, 50, 50, 3, 3), drawn(8, 36, 9)
    h200 = DEVICES["h200"]
    plain = bound(Problem(matrix, window.n, h200, window))
    assert plain.micros == pytest.approx(4 * (2 * 4 * 2500 + 8 * window.n) / h200.memory_bandwidth * 1e6)
    added = bound(Problem(matrix, window.n, h200, window, Epilogue(residual=True)))
    assert added.micros - plain.micros == pytest.approx(4 * 8 * window.n / h200.memory_bandwidth * 1e6)


def test_a_warm_comparison_says_so() -> None:
    found, fake = compared(cache="warm", cusparse=90.0)
    assert fake.asked[2] == BaselineTask("cusparse", "warm", None)
    assert fake.efforts == {FULL}, "all of a comparison is timed alike"
    assert found.copies == 1
    assert not found.measured().cold


def test_a_comparison_as_in_a_network_is_one_of_all() -> None:
    found, fake = compared(cache="network", cusparse=90.0)
    assert fake.asked[2] == BaselineTask("cusparse", "network", None)
    assert found.copies == min(COPIES_BEHIND, fake.start().copies)
    assert (found.measured().cold, found.measured().cache) == (False, "network")


@pytest.mark.parametrize(
    ("fp32", "tf32", "faster"),
    [
        (90.0, 30.0, ()),
        (90.0, 15.0, ("cublas_tf32",)),
        (18.0, 15.0, ("cublas_tf32", "cublas_fp32")),
        (19.0, "no such library", ("cublas_fp32",)),
        ("no such library", "no such library", ()),
    ],
)
def test_dense_is_the_advice_where_dense_wins(fp32: float | str, tf32: float | str, faster: tuple[str, ...]) -> None:
    found, _ = compared(cusparse=1.0, cublas_fp32=fp32, cublas_tf32=tf32)
    assert found.faster_dense == faster
    assert found.advice == found.measured().advice == ("dense" if faster else "sparse")


@pytest.mark.parametrize("name", DTYPES)
def test_libraries_of_the_type_alone_are_timed(name: str) -> None:
    own = baselines_of(DTYPES[name])
    fake: Any = FakeBench([measured(20.0)] * 3, {one: timed(one, 15.0) for one in own})
    fake.problem = replace(fake.problem, dtype=DTYPES[name])
    found = compare(fake, KERNEL)
    assert tuple(found.baselines) == own
    dense = {one.removeprefix("cublas_") for one in own if one.startswith("cublas")}
    assert dense == {"float16": {"fp16"}, "bfloat16": {"bf16"}}.get(name, {"fp32", "tf32"})
    kept = asdict(found.measured())
    assert {one for one in ("fp32", "tf32", "fp16", "bf16") if kept[f"cublas_{one}_micros"] is not None} == dense
    assert kept["advice"] == "dense"


def test_codes_are_compared_with_the_product_of_their_own_type() -> None:
    """Which has another B: faster or not, the advice is as without it."""
    fake: Any = FakeBench([measured(20.0)] * 3, {one: timed(one, 90.0) for one in BASELINES})
    fake.baselines["cublas_int8"] = timed("cublas_int8", 15.0)
    fake.problem = replace(fake.problem, dtype=DTYPES["float16"], values=VALUE_TYPES["int8"])
    found = compare(fake, KERNEL).measured()
    assert (found.cublas_int8_micros, found.cublas_fp8_micros, found.advice) == (15.0, None, "sparse")


def test_what_the_manifest_keeps() -> None:
    first, faster = timed("cusparse", 120.0, "CSR_ALG2"), timed("cusparse", 90.0, "CSR_ALG3")
    cusparse = replace(first, variants=first.variants + faster.variants)
    found, _ = compared(cusparse=cusparse, cublas_fp32=80.0, cublas_tf32="lost")
    assert asdict(found.measured()) == {
        "micros": 20.0,
        "spread": 0.02,
        "noise": pytest.approx(0.025),
        "cold": True,
        "cache": "cold",
        "bound_micros": found.bound.micros,
        "cusparse_micros": 90.0,
        "cusparse_algorithm": "CSR_ALG3",
        "cusparse_alg2_micros": 120.0,
        "cublas_fp32_micros": 80.0,
        **dict.fromkeys(("cublas_tf32_micros", "sputnik_micros", "cublas_fp16_micros", "cublas_bf16_micros")),
        **dict.fromkeys(("cublas_int8_micros", "cublas_fp8_micros")),
        **dict.fromkeys(("cusparselt_fp16_micros", "cusparselt_bf16_micros", "cusparselt_weights")),
        "advice": "sparse",
        "gpu": "NVIDIA H200",
        "driver": "580.159.04",
        "clocks": asdict(CLOCKS),
    }
    kept = replace(MANIFEST, measured=found.measured())
    files = {**made_files(), artifact.MANIFEST_FILE: kept.to_json().encode()}
    read = artifact.from_files(files, "here").manifest
    assert read["measured"] == json.loads(json.dumps(asdict(found.measured())))
    show_manifest(read, Path("here"), as_json=False)


def made_files() -> dict[str, bytes]:
    cubin = b"\x7fELF, or so"
    assert WHOLE["cubin_sha256"] == sha256(cubin).hexdigest()
    return {artifact.CUBIN_FILE: cubin, "kernel.ptx": b"", artifact.TUNING_FILE: b""}


def test_a_kernel_that_fails_ends_the_comparison() -> None:
    wrong: Any = FakeBench([Measurement(None, 0.5, "row 1, column 2: got 3")], {})
    with pytest.raises(VerificationFailed, match="kernel: row 1, column 2: got 3"):
        compare(wrong, KERNEL)
    lost: Any = FakeBench([measured(1.0), Measurement(None, None, "CUDA_ERROR_ILLEGAL_ADDRESS")], {})
    with pytest.raises(GpuFault, match="kernel: CUDA_ERROR_ILLEGAL_ADDRESS"):
        compare(lost, KERNEL, names=[])


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = compared(
        cusparse=BaselineTime(
            "cusparse",
            "cuSPARSE 12.6.3 (libcusparse.so.12)",
            (
                VariantTime("CSR_ALG2", Timing(90.0, 0.01, 15), 2e-7, None),
                VariantTime("CSR_ALG3", None, None, "cusparseSpMM: CUSPARSE_STATUS_NOT_SUPPORTED"),
            ),
            None,
        ),
        cublas_fp32=119.04,
        cublas_tf32=15.0,
        sputnik=BaselineTime("sputnik", None, (), "no library is named"),
    )
    show_comparison(found, WHOLE, as_json=False)
    assert (
        capsys.readouterr().out
        == """\
kernel  lospmm_2x3_n4_00000000
matrix  2 x 3, 3 nonzeros
B       3 x 4, float32, cold: 7 copies in turn
GPU     NVIDIA H200, SM 1,980 MHz, memory 3,201 MHz, 41 C, held by power cap
bound   0.00 us, by memory
noise   2.5% between two timings of the kernel
advice  dense: faster than the kernel: cuBLAS TF32, dense (15.00 us)

                        us  spread  of the kernel's    error  how
this kernel          20.00    2.0%             1.00  3.0e-07  ptx
cuSPARSE             90.00    1.0%             4.50  2.0e-07  CSR_ALG2, cuSPARSE 12.6.3 (libcusparse.so.12); \
CSR_ALG3: cusparseSpMM: CUSPARSE_STATUS_NOT_SUPPORTED
cuBLAS fp32, dense  119.04    1.0%             5.95  2.0e-07  way, cublas_fp32 1.0 (lib.so)
cuBLAS TF32, dense   15.00    1.0%             0.75  2.0e-07  way, cublas_tf32 1.0 (lib.so)
Sputnik                  -       -                -        -  no library is named
"""
    )


def test_the_object(capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = compared(cusparse=90.0, sputnik=BaselineTime("sputnik", None, (), "no library is named"))
    show_comparison(found, WHOLE, as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert printed.items() >= json.loads(json.dumps(asdict(found.measured()))).items()
    assert printed["baselines"]["sputnik"] == {
        "library": None,
        "best": None,
        "failure": "no library is named",
        "variants": [],
    }
    assert printed["baselines"]["cusparse"]["variants"][0]["micros"] == 90.0
    assert (printed["copies"], printed["bound_by"], printed["replays"]) == (7, "memory", 15)


def kept(matrix: SparseMatrix, cubin: bytes, **changes: Any) -> Artifact:
    manifest = replace(
        MANIFEST,
        name="kernel",
        m=matrix.m,
        k=matrix.k,
        n=N,
        nnz=matrix.nnz,
        fingerprint=matrix.fingerprint,
        cubin_sha256=sha256(cubin).hexdigest(),
        launch=Launch(LAUNCH.grid, LAUNCH.block, 0),
        **changes,
    )
    files = {
        artifact.CUBIN_FILE: cubin,
        "kernel.ptx": b"",
        artifact.TUNING_FILE: b"",
        artifact.MATRIX_FILE: write_npz(matrix),
        artifact.MANIFEST_FILE: manifest.to_json().encode(),
    }
    return artifact.from_files(files, "here")


def test_a_kernel_for_another_gpu_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    artifact.write(kept(drawn(3, 3, 2), b""), tmp_path / "kernel")
    assert run(["bench", str(tmp_path / "kernel"), "--device", "a100"]) == 2
    assert "kernel is for h200 (sm_90), this GPU is a100 (sm_80): tune it for this one" in capsys.readouterr().err


@pytest.fixture
def fake_libraries(tmp_path: Path) -> Path:
    """The fake libraries."""
    if (compiler := shutil.which("gcc")) is None:
        pytest.skip("no gcc")
    source = Path(__file__).parents[1] / "fixtures" / "fake_libraries.c"
    command = [compiler, "-shared", "-fPIC", "-DSTREAM=0", "-o", str(tmp_path / "libfake.so"), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return tmp_path / "libfake.so"


@pytest.fixture
def fake_worker(gate_library: Path, fake_libraries: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """The command of a worker on the CPU that has these libraries."""
    monkeypatch.setattr(measure, "compile_gate", lambda _arch: b"gate")
    return (sys.executable, "-P", bench_worker.__file__, str(gate_library), str(fake_libraries))


@pytest.mark.parametrize(("name", "values"), [("float16", "int8"), ("bfloat16", "fp8_e4m3")])
def test_libraries_are_held_to_what_they_multiply(fake_worker: tuple[str, ...], name: str, values: str) -> None:
    """And the others to A again."""
    dense = np.random.default_rng(3).normal(size=(32, 48)).astype(np.float32)
    problem = Problem(from_dense(dense), 24, DEVICES["h200"], dtype=DTYPES[name], values=VALUE_TYPES[values])
    libraries = baselines_of(problem.dtype, problem.values)
    with Bench(problem, cache="streamed", command=fake_worker) as bench:
        for library in (*reversed(libraries), *libraries):
            found = bench.request(COMMAND, BaselineTask(library, "streamed"))
            assert isinstance(found, BaselineTime)
            assert found.failure is None and found.best is not None
            assert (found.best.name == cusparselt.PRUNED) == library.startswith("cusparselt")


@pytest.fixture
def on_a_fake_gpu(
    fake_worker: tuple[str, ...], fake_libraries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """``lospmm bench`` with a worker on the CPU; gives the folder of a kernel, and its fake libraries."""
    monkeypatch.setattr(bench_command, "Bench", lambda problem, cache: Bench(problem, cache=cache, command=fake_worker))
    monkeypatch.setattr(bench_command, "detect_device", lambda: DEVICES["h200"])
    monkeypatch.setenv("LOSPMM_SPUTNIK", str(fake_libraries))
    settings.cache_clear()
    artifact.write(kept(from_dense(weights()), fake_gpu.kernel("good", weights(), N)), tmp_path / "good")
    artifact.write(kept(from_dense(weights()), fake_gpu.kernel("zeros", weights(), N)), tmp_path / "wrong")
    yield tmp_path
    settings.cache_clear()


def test_the_command_from_end_to_end(on_a_fake_gpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", str(on_a_fake_gpu / "good"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["gpu"] == "a fake GPU"
    assert printed["cold"]
    assert set(printed["baselines"]) == set(baselines_of(FLOAT32))
    for name, baseline in printed["baselines"].items():
        assert baseline["failure"] is None, name
        assert [way["failure"] for way in baseline["variants"]] == [None] * {"cusparse": 2, "sputnik": 1}.get(name, 3)
        assert all(way["max_relative_error"] < 1e-6 for way in baseline["variants"]) == (name != "cublas_tf32")
        assert printed[f"{name}_micros"] > 0
    assert run(["bench", str(on_a_fake_gpu / "good"), "--cache", "warm", "--quiet"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[-5:]] == [
        "this kernel",
        *(BASELINES[name].title for name in baselines_of(FLOAT32)),
    ]
    assert "warm: 1 copy in turn" in lines[2]


def test_the_command_refuses_a_wrong_kernel(on_a_fake_gpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", str(on_a_fake_gpu / "wrong"), "--quiet"]) == VerificationFailed.exit_code
    assert "error: kernel: row" in capsys.readouterr().err


def test_the_command_without_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact.write(kept(drawn(3, 3, 2), b""), tmp_path / "kernel")

    def none() -> Any:
        raise BadRequest("device auto: this machine has no NVIDIA GPU")

    monkeypatch.setattr(bench_command, "detect_device", none)
    assert run(["bench", str(tmp_path / "kernel")]) == 2
    assert capsys.readouterr().err.startswith(
        "error: bench needs a GPU, and this machine has none of the device table; "
    )
    assert run(["bench", str(tmp_path / "none")]) == 2
