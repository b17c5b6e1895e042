"""Exit codes 2 to 5: one line that says what was wrong, and nothing written."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from lospmm.artifact import artifact, kept
from lospmm.codegen.ir import KernelProgram
from lospmm.codegen.lower import lower
from lospmm.matrix.csr import from_dense
from lospmm.matrix.npz import write_npz
from lospmm.problem.problem import Problem
from lospmm.space.candidates import UnrolledPlan
from lospmm.store import Store
from lospmm.toolchain import discover
from lospmm.tuning import build
from tests.cli.command import H200, WEIGHTS, Command
from tests.fixtures.files import csr, npy, npz, safetensors, saved, tensor


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name a command"),
        (["fly"], "No such command 'fly'"),
        (["cache"], "Missing command"),
        (["cache", "fly"], "No such command 'fly'"),
        (["tune"], "Missing argument 'MATRIX'"),
        (["tune", "{w}", "--out", "{o}"], "n is missing: give the number of columns of B, or a convolution"),
        (["tune-model", "{w}", "--out", "{o}"], "n is missing: give --n, --conv or --layers"),
        (["tune", "{w}", "--n", "4"], "Missing option '--out'"),
        (["tune", "{w}", "--n", "4", "--out", "{o}", "--fast"], "No such option: --fast"),
        (["tune", "{w}", "--n", "four", "--out", "{o}"], "Invalid value for '--n'"),
        (["tune", "{w}", "--n", "4.5", "--out", "{o}"], "Invalid value for '--n'"),
        (["tune", "{w}", "--n", "1e3", "--out", "{o}"], "Invalid value for '--n'"),
        (["tune", "{w}", "{w}", "--n", "4", "--out", "{o}"], "unexpected extra argument"),
        (["cache", "prune", "--max-mb", "-1"], "Invalid value for '--max-mb'"),
        (["cache", "prune", "--older-than-days", "-1"], "Invalid value for '--older-than-days'"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_usage(
    lospmm_command: Command, tmp_path: Path, matrix: Path, arguments: list[str], words: str, as_json: bool
) -> None:
    given = [argument.format(w=matrix, o=tmp_path / "out") for argument in arguments]
    if as_json and given in ([], ["cache"]):
        words = "No such option: --json"  # it belongs to commands
    answer = lospmm_command(*given, *(["--json"] if as_json else []))
    assert answer.status == 2
    assert words in answer.error
    if as_json:
        assert json.loads(answer.out)["error"] == {"type": "BadRequest", "message": answer.error}
    else:
        assert answer.out == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--n", "0"], "n is 0: B must have from 1 to"),
        (["--n", "-3"], "n is -3: B must have from 1 to"),
        (["--n", str(2**30)], "n is 1073741824: B must have from 1 to"),
        (["--n", str(10**30)], "n is 1000000000000000000000000000000: B must have"),
        (["--device", "h20"], "unknown device 'h20' (did you mean h200"),
        (["--device", "my.toml"], "my.toml: cannot be read: No such file or directory"),
        (["--device", "v100"], "V100 (sm_70) needs a CUDA 12 toolkit; name one with LOSPMM_TOOLKIT"),
        (["--emitter", "llvm"], "emitter 'llvm': choose one of auto, sass, ptx, cuda"),
        (["--ranker", "best"], "ranker 'best': choose one of auto, none, lambdamart"),
        (["--ranker", "oracle"], "ranker 'oracle': choose one of auto"),
        (["--measure", "gpu"], "measure gpu: h200 is needed, and this machine has no GPU of the device table"),
        (["--measure", "often"], "measure 'often': choose one of auto, gpu, none"),
        (["--verify", "gpu"], "verify gpu: h200 is needed, and this machine has no GPU of the device table"),
        (["--verify", "yes"], "verify 'yes': choose one of auto, gpu, cpu, none"),
        (["--dtype", "int8"], "dtype 'int8': choose one of float32, tf32, float16, bfloat16"),
        (["--sums", "half"], "sums 'half': choose one of float32, float16, bfloat16"),
        (["--sums", "float16"], "sums 'float16': with dtype float32 choose float32"),
        (["--shortlist", "0"], "shortlist 0: at least 1"),
        (["--trials", "some"], "trials 'some': choose one of full"),
        (["--trials", "all"], "trials 'all': choose one of full, proxy"),
        (["--budget", "-1"], "budget -1.0: give seconds, 0 or more"),
        (["--budget", "nan"], "budget nan: give seconds, 0 or more"),
        (["--tensor", "fc"], "w.npy: tensor chooses from a .safetensors, .onnx or .pt file"),
        (["--seed", "-1"], "w.npy: seed -1 is negative"),
    ],
)
def test_options(lospmm_command: Command, tmp_path: Path, matrix: Path, options: list[str], words: str) -> None:
    arguments = {"--n": "4", "--device": "h200"} | dict([options])
    answer = lospmm_command(
        "tune", matrix, "--out", tmp_path / "out", *[word for pair in arguments.items() for word in pair]
    )
    assert (answer.status, answer.out) == (2, "")
    assert words in answer.error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["tune", "tune-model"])
def test_a_key_of_no_service(
    lospmm_command: Command, tmp_path: Path, set_environment: Callable[[str, object], None], command: str
) -> None:
    """Whoever gives one believes that a service does the work."""
    save_file({"w": WEIGHTS}, tmp_path / "w.safetensors")
    ask = (command, tmp_path / "w.safetensors", "--n", 4, *H200, "--quiet", "--out", tmp_path / "out", "--key", "k")
    answer = lospmm_command(*ask)
    assert (answer.status, answer.out) == (2, "")
    assert answer.error.startswith("--key goes with a service: name it with --server or in LOSPMM_SERVER")
    set_environment("LOSPMM_SERVER", "http://127.0.0.1:9")
    assert lospmm_command(*ask, "--server", "").status == 0  # this machine, in spite of the settings


def test_settings(
    lospmm_command: Command, tmp_path: Path, matrix: Path, set_environment: Callable[[str, object], None]
) -> None:
    """An empty variable is as if it were not set; a wrong one is named."""
    ask = ("tune", matrix, "--n", 4, *H200, "--out", tmp_path / "out", "--quiet")
    set_environment("XDG_CACHE_HOME", tmp_path / "user")
    for name in ("CACHE_DIR", "WORKERS", "TOOLKIT", "SERVER"):
        set_environment(f"LOSPMM_{name}", "")
    assert lospmm_command(*ask).status == 0
    assert (tmp_path / "user" / "lospmm" / "kernel").is_dir()
    set_environment("HOME", tmp_path / "home")
    set_environment("LOSPMM_CACHE_DIR", "~/kept")
    assert lospmm_command(*ask).status == 0
    assert (tmp_path / "home" / "kept" / "kernel").is_dir()
    set_environment("LOSPMM_CACHE_DIR", "~nobody-here/kept")
    answer = lospmm_command(*ask)
    assert answer.status == 2
    assert answer.error == "LOSPMM_CACHE_DIR: '~nobody-here/kept': no such user"
    set_environment("LOSPMM_WORKERS", "some")
    set_environment("LOSPMM_CACHE_DIR", tmp_path)
    answer = lospmm_command(*ask)
    assert answer.status == 2
    assert answer.error.startswith("LOSPMM_WORKERS: 'some': Input should be a valid integer")


def test_a_gpu_without_a_model(lospmm_command: Command, tmp_path: Path, matrix: Path) -> None:
    asked = ("tune", matrix, "--n", 4, "--device", "a100", "--ranker", "lambdamart", "--out", tmp_path / "out")
    answer = lospmm_command(*asked)
    assert (answer.status, answer.out) == (2, "")
    assert "ranker lambdamart: no model was trained for a100" in answer.error


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("gone.npy", None, "gone.npy: there is no such file"),
        ("empty.npz", b"", "is empty"),
        ("text.npy", b"not a matrix at all", "does not begin as a .npy file does"),
        ("cut.npy", saved(np.save, WEIGHTS)[:-1], "truncated"),
        ("pickle.npy", saved(np.save, np.array([{}], object)), "a pickle"),
        ("huge.npy", npy((2**20, 2**21)), "promises"),
        ("nan.npy", saved(np.save, WEIGHTS * np.nan), "is not a finite float32"),
        ("bomb.npz", npz([("data.npy", npy((2**24,), values=bytes(2**26)))]), "would inflate to"),
        ("twice.npz", csr(indices=[2, 2, 1]), "is given twice"),
        ("index.npz", csr(indices=[0, 9, 1]), "column index number 1 is 9"),
        ("head.mtx", b"%%MatrixMarket tensor coordinate real general\n", "tensor"),
        ("body.smtx", b"2, 2, 3\n0 1 2\n0 1\n", "body.smtx: "),
        ("two.safetensors", safetensors({x: tensor("F32", [1, 1], 0, 4) for x in "ab"}, bytes(4)), "two.safetensors: "),
        ("suffix.mtx", saved(np.save, WEIGHTS), "the name says .mtx but the content is .npy"),
    ],
)
@pytest.mark.parametrize("command", ["tune", "space"])
def test_hostile_files(
    lospmm_command: Command, tmp_path: Path, command: str, name: str, content: bytes | None, words: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    out = ("--out", tmp_path / "out") if command == "tune" else ()
    answer = lospmm_command(command, tmp_path / name, "--n", 4, *H200, *out)
    assert (answer.status, answer.out) == (2, "")
    assert words in answer.error


def test_a_folder_and_a_device_are_no_matrix(lospmm_command: Command, tmp_path: Path) -> None:
    for path, words in ((tmp_path, "is a directory"), ("/dev/zero", "is a device or pipe")):
        answer = lospmm_command("space", path, "--n", 4, *H200)
        assert (answer.status, answer.out) == (2, "")
        assert words in answer.error


def test_out_is_not_somebody_elses(lospmm_command: Command, tmp_path: Path, matrix: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").touch()
    for name, words in (
        ("file", "is a file"),
        ("folder", "holds something other"),
        ("file/kernel", "is a file; name a folder"),
    ):
        answer = lospmm_command("tune", matrix, "--n", 4, *H200, "--out", tmp_path / name)
        assert (answer.status, answer.out) == (2, "")
        assert words in answer.error
    assert (tmp_path / "file").read_text() == "mine"


def test_a_setting_that_is_wrong(
    lospmm_command: Command, set_environment: Callable[[str, object], None], tmp_path: Path, matrix: Path
) -> None:
    for name, value, why in (
        ("WORKERS", "many", "Input should be a valid integer, unable to parse string as an integer"),
        ("WORKERS", "0", "Input should be greater than 0"),
        ("MEASURE_SECONDS", "soon", "Input should be a valid number, unable to parse string as a number"),
        ("DRIVER", "x" * 100, "Input should be 'auto', 'cuda-core' or 'pycuda'"),
    ):
        set_environment(f"LOSPMM_{name}", value)
        answer = lospmm_command("tune", matrix, "--n", 4, *H200, "--out", tmp_path / "out")
        assert (answer.status, answer.error) == (2, f"LOSPMM_{name}: {value!r:.80}: {why}")
        set_environment(f"LOSPMM_{name}", "")


def test_a_damaged_artifact_is_told_from_a_sound_one(lospmm_command: Command, tmp_path: Path, matrix: Path) -> None:
    out = tmp_path / "out"
    assert lospmm_command("tune", matrix, "--n", 50, *H200, "--out", out).status == 0
    sound = lospmm_command("inspect", out)
    assert (sound.status, sound.err) == (0, "")
    assert re.search(r"^verified +on the cpu, relative error \d", sound.out, re.MULTILINE)
    assert json.loads(lospmm_command("inspect", out, "--json").out) == artifact.read(out).manifest

    cubin, manifest = (out / "kernel.cubin").read_bytes(), (out / "manifest.json").read_text()
    (out / "kernel.cubin").write_bytes(cubin[:-1])
    assert "kernel.cubin is not the one that the manifest names" in lospmm_command("inspect", out).error
    (out / "kernel.cubin").write_bytes(cubin)
    weights = (out / "matrix.npz").read_bytes()
    for content, says in ((b"x", "matrix.npz"), (write_npz(from_dense(np.eye(3))), "holds another matrix")):
        (out / "matrix.npz").write_bytes(content)
        assert says in lospmm_command("inspect", out).error
    (out / "matrix.npz").write_bytes(weights)
    np.save(tmp_path / "bias.npy", np.ones(WEIGHTS.shape[0], np.float32))
    with_bias = tmp_path / "with bias"
    answer = lospmm_command(
        "tune", matrix, "--n", 50, *H200, "--out", with_bias, "--verify", "none", "--bias", tmp_path / "bias.npy"
    )
    assert answer.status == 0
    short, other = npy((3,), values=bytes(12)), npy((len(WEIGHTS),), values=bytes(4 * len(WEIGHTS)))
    for content in (b"x", short, other):
        (with_bias / "bias.npy").write_bytes(content)
        assert "bias.npy is not the one that the manifest names" in lospmm_command("inspect", with_bias).error
    of_before = re.sub(r'"bias_sha256": ".*"', '"bias_sha256": null', (with_bias / "manifest.json").read_text())
    (with_bias / "manifest.json").write_text(of_before)  # as versions wrote it that named none
    for content, says in ((b"x", "bias.npy: "), (short, "is of shape (3,); tune it again")):
        (with_bias / "bias.npy").write_bytes(content)
        assert says in lospmm_command("inspect", with_bias).error
    (out / "manifest.json").write_text(manifest.replace('"registers"', '"register"'))
    answer = lospmm_command("inspect", out)
    assert (answer.status, answer.error) == (2, f"{out}: manifest.json is damaged: registers: Field required")
    (out / "manifest.json").unlink()
    assert "holds no manifest.json of a kernel; of a model, name" in lospmm_command("inspect", out).error
    assert "is a file" in lospmm_command("inspect", out / "kernel.cubin").error
    assert "there is no such folder" in lospmm_command("inspect", tmp_path / "gone").error


def test_nothing_fits(lospmm_command: Command, tmp_path: Path, matrix: Path) -> None:
    device = tmp_path / "small.toml"
    device.write_text('base = "h200"\nregisters_per_thread = 20\n')
    answer = lospmm_command(
        "tune",
        matrix,
        "--n",
        4,
        "--device",
        device,
        "--out",
        tmp_path / "out",
        "--quiet",
        "--emitter",
        "ptx",
        "--families",
        "unrolled",
    )
    assert (answer.status, answer.out) == (3, "")
    assert answer.error == "no tile size fits small: of 4, 4 by thread_registers"
    counted = lospmm_command("space", matrix, "--n", 4, "--device", device, "--emitter", "ptx", "--json")
    assert counted.status == 0
    assert json.loads(counted.out)["survivors"] == []


@pytest.mark.parametrize("there_is_one", [False, True], ids=["new", "replacing"])
def test_a_compiler_that_fails(
    lospmm_command: Command,
    set_environment: Callable[[str, object], None],
    tmp_path: Path,
    matrix: Path,
    there_is_one: bool,
) -> None:
    if there_is_one:
        assert lospmm_command("tune", matrix, "--n", 9, *H200, "--out", tmp_path / "out").status == 0
    before = artifact.read(tmp_path / "out") if there_is_one else None
    set_environment("LOSPMM_CACHE_DIR", tmp_path / "cache")
    real = discover.find_toolkit()
    tools = tmp_path / "toolkit" / "bin"
    tools.mkdir(parents=True)
    for tool in (real.nvcc, real.nvlink):
        (tools / tool.name).write_text(f'#!/bin/sh\nexec {tool} "$@"\n')
    fail = "echo 'ptxas fatal   : Internal error: \x1b[2J' >&2; exit 255"
    (tools / "ptxas").write_text(f'#!/bin/sh\ncase "$1" in --version) exec {real.ptxas} "$@" ;; *) {fail} ;; esac\n')
    for path in tools.iterdir():
        path.chmod(0o755)
    set_environment("LOSPMM_TOOLKIT", tools.parent)
    answer = lospmm_command("tune", matrix, "--n", 10, *H200, "--out", tmp_path / "out", "--quiet")
    assert (answer.status, answer.out) == (4, "")
    found = re.fullmatch(r"ptxas [\d.]+, unit \d of \d+: exit status 255: ptxas fatal.* \(log: (.+)\)", answer.error)
    assert found, answer.error
    assert ".version" in Path(found[1]).read_text(), "the log shows what was compiled"
    assert (artifact.read(tmp_path / "out") if there_is_one else None) == before
    assert (tmp_path / "out").exists() == there_is_one


def test_a_toolkit_that_is_not_one(
    lospmm_command: Command, set_environment: Callable[[str, object], None], tmp_path: Path, matrix: Path
) -> None:
    set_environment("LOSPMM_TOOLKIT", tmp_path)
    answer = lospmm_command("tune", matrix, "--n", 4, *H200, "--out", tmp_path / "out")
    assert (answer.status, answer.error) == (2, f"LOSPMM_TOOLKIT: no nvcc in {tmp_path}/bin")


def test_places_that_cannot_be_written(
    lospmm_command: Command, set_environment: Callable[[str, object], None], tmp_path: Path, matrix: Path
) -> None:
    tune = ("tune", matrix, "--n", 51, *H200, "--quiet")
    (tmp_path / "file").touch()
    set_environment("LOSPMM_CACHE_DIR", tmp_path / "file")
    answer = lospmm_command(*tune, "--out", tmp_path / "out")
    assert (answer.status, answer.out) == (4, "")
    assert "LOSPMM_CACHE_DIR names another place" in answer.error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["tune", "tune-model", "train-ranker"])
def test_out_is_looked_at_before_the_work(lospmm_command: Command, tmp_path: Path, command: str) -> None:
    """Before a file is read, where one alone is: of what is not there a message would say so."""
    save_file({"w": WEIGHTS}, tmp_path / "w.safetensors")
    given = tmp_path / ("w.safetensors" if command == "tune-model" else "gone")
    ask = (command, given, *(() if command == "train-ranker" else ("--n", 4, *H200)))
    for out, status, words in (
        ("", 2, "--out is empty: name a folder"),
        ("/dev/null", 2, "/dev/null: is a file; name a folder"),
        ("/proc/x", 4, "/proc/x: cannot be written: /proc takes no new folder (No such file or directory); name a"),
    ):
        answer = lospmm_command(*ask, "--out", out)
        assert (answer.status, answer.out) == (status, "")
        assert answer.error.startswith(words), "and no line of progress"


def test_a_wrong_kernel_is_not_written(
    lospmm_command: Command, own_cache: Store, tmp_path: Path, matrix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune = ("tune", matrix, *H200, "--out", tmp_path / "out", "--quiet")
    assert lospmm_command(*tune, "--n", 9).status == 0
    before = artifact.read(tmp_path / "out")

    def wrong(problem: Problem, winner: UnrolledPlan) -> KernelProgram:
        return lower(replace(problem, matrix=from_dense(WEIGHTS * 2)), winner)

    monkeypatch.setattr(build, "lower", wrong)
    answer = lospmm_command(*tune, "--n", 10, "--json")
    assert answer.status == 5
    assert re.match(r"row \d+, column \d+: got ", answer.error)
    assert json.loads(answer.out)["error"]["type"] == "VerificationFailed"
    assert artifact.read(tmp_path / "out") == before
    assert [entry.kind for entry in own_cache.entries()].count(kept.KERNELS) == 1


def test_replay_of_what_was_tuned_for_a_device_file(lospmm_command: Command, tmp_path: Path, matrix: Path) -> None:
    device, out = tmp_path / "half.toml", tmp_path / "out"
    device.write_text('base = "h200"\nsms = 66\n')
    assert lospmm_command("tune", matrix, "--n", 8, "--device", device, "--out", out, "--quiet").status == 0
    answer = lospmm_command("replay", out)
    assert answer.status == 2 and "of a device file: name it by --device" in answer.error
    assert lospmm_command("replay", out, "--device", device).status == 0
