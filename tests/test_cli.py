"""The command line as a user and a script meet it: streams, exit codes, one line for every mistake."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import scipy.sparse
from numpy.typing import NDArray
from safetensors.numpy import save_file

import lospmm
from lospmm import artifact, cli, jobs
from lospmm.ir import KernelProgram
from lospmm.lower import lower
from lospmm.matrix import from_dense
from lospmm.model import Candidate, Problem
from lospmm.settings import settings
from lospmm.store import Store
from lospmm.toolchain import discover
from tests.core.files import csr, npy, npz, safetensors, saved, smtx, tensor

COMMAND = (sys.executable, "-m", "lospmm.cli")
H200 = ("--device", "h200")


def draw(m: int, k: int, *, density: float = 0.2, seed: int = 0) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    return np.where(rng.random((m, k)) < density, rng.standard_normal((m, k)), 0).astype(np.float32)


WEIGHTS = draw(16, 24)


@dataclass(frozen=True)
class Answer:
    status: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that a refusal is."""
        assert re.fullmatch(r"error: [^\n]+\n", self.err), self.err
        assert self.err[:-1].isprintable()
        return self.err[len("error: ") : -1]


Command = Callable[..., Answer]


@pytest.fixture
def lospmm_command(capsys: pytest.CaptureFixture[str]) -> Command:
    """A command in this process: what differs from a process of its own has tests of its own."""

    def run(*arguments: object) -> Answer:
        status = cli.run([str(argument) for argument in arguments])
        return Answer(status, *capsys.readouterr())

    return run


def process(*arguments: object, **options: Any) -> Answer:
    run = subprocess.run(
        [*COMMAND, *map(str, arguments)], **{"capture_output": True, "text": True, "timeout": 60, **options}
    )
    return Answer(run.returncode, run.stdout, run.stderr)


@pytest.fixture
def set_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, object], None]]:
    """Set a variable and have it read again."""

    def forget() -> None:
        settings.cache_clear()
        discover.find_toolkit.cache_clear()

    def change(name: str, value: object) -> None:
        monkeypatch.setenv(name, str(value))
        forget()

    yield change
    monkeypatch.undo()
    forget()


@pytest.fixture
def own_cache(tmp_path: Path, set_environment: Callable[[str, object], None]) -> Store:
    set_environment("LOSPMM_CACHE_DIR", tmp_path / "cache")
    return Store(tmp_path / "cache")


@pytest.fixture
def matrix(tmp_path: Path) -> Path:
    np.save(tmp_path / "w.npy", WEIGHTS)
    return tmp_path / "w.npy"


# Streams


@pytest.mark.usefixtures("own_cache")
def test_results_go_to_stdout_and_progress_to_stderr(tmp_path: Path, matrix: Path) -> None:
    """What is found in the store has no stages."""
    made = process("tune", matrix, "--n", 50, *H200, "--out", tmp_path / "a", "--json")
    assert made.status == 0, made.err
    assert json.loads(made.out) == artifact.read(tmp_path / "a").manifest
    stages = ["reorder", "constraints", "rank", "emit", "compile", "verify"]
    assert re.findall(r"^(\w+): done at \d+\.\d s$", made.err, re.MULTILINE) == stages
    assert len(made.err.splitlines()) == len(stages)
    quiet = process("tune", matrix, "--n", 49, *H200, "--out", tmp_path / "b", "--quiet")
    assert (quiet.status, quiet.err) == (0, "")
    assert "\nkernel     lospmm_16x24_n49_" in quiet.out


def test_an_error_of_a_process(tmp_path: Path) -> None:
    """A name that would clear the terminal and forge a line of ours."""
    name = "w\x1b[2J\nerror: forged\u202e.npy"
    (tmp_path / name).write_bytes(b"no matrix")
    for path, words in ((tmp_path / name, "its first bytes are"), (tmp_path / f"no{name}", "there is no such file")):
        answer = process("tune", path, "--n", 4, *H200, "--out", tmp_path / "out", "--json")
        assert answer.status == 2
        assert words in answer.error
        assert "forged" in answer.error
        assert json.loads(answer.out) == {"error": {"type": "BadMatrix", "message": answer.error}}
    assert not (tmp_path / "out").exists()


def test_an_encoding_without_the_name(tmp_path: Path, matrix: Path) -> None:
    out = tmp_path / "größe"
    answer = process("tune", matrix, "--n", 50, *H200, "--out", out, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert answer.status == 0, answer.err
    assert r"gr\xf6\xdfe" in answer.out
    assert artifact.read(out)


def test_a_reader_that_leaves_and_a_full_disk_behind_stdout(matrix: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe, Path("/dev/full").open("wb") as full:
        space = ("space", matrix, "--n", 4, *H200, "--quiet")
        streams = {"capture_output": False, "stderr": subprocess.PIPE}
        left = process(*space, **streams, stdout=pipe)
        assert (left.status, left.err) == (cli.BROKEN_PIPE, "")
        failed = process(*space, **streams, stdout=full)
        assert (failed.status, failed.error) == (4, "output: No space left on device")


def test_the_version_and_the_help(lospmm_command: Command) -> None:
    assert lospmm_command("--version") == Answer(0, f"lospmm {lospmm.__version__}\n", "")
    helped = lospmm_command("tune", "--help")
    assert (helped.status, helped.err) == (0, "")
    assert "--emitter" in helped.out


# Exit code 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name a command"),
        (["fly"], "No such command 'fly'"),
        (["cache"], "Missing command"),
        (["cache", "fly"], "No such command 'fly'"),
        (["tune"], "Missing argument 'MATRIX'"),
        (["tune", "{w}", "--out", "{o}"], "Missing option '--n'"),
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
        (["--emitter", "llvm"], "emitter 'llvm': choose one of ptx, cuda"),
        (["--emitter", "sass"], "emitter sass: this version has no machine code emitter; use 'ptx' or 'cuda'"),
        (["--ranker", "lambdamart"], "ranker lambdamart: no model has been trained yet; 'none' orders by"),
        (["--ranker", "oracle"], "ranker 'oracle': choose one of none"),
        (["--measure", "gpu"], "measure gpu: this version runs nothing on a GPU"),
        (["--measure", "often"], "measure 'often': choose one of auto, none"),
        (["--verify", "gpu"], "verify gpu: this version runs nothing on a GPU"),
        (["--verify", "yes"], "verify 'yes': choose one of cpu, none"),
        (["--dtype", "float16"], "dtype 'float16': choose one of float32"),
        (["--shortlist", "0"], "shortlist 0: at least 1"),
        (["--trials", "some"], "trials 'some': choose one of proxy, full"),
        (["--budget", "-1"], "budget -1.0: a positive number of seconds"),
        (["--budget", "nan"], "budget nan: a positive number of seconds"),
        (["--tensor", "fc"], "w.npy: --tensor chooses from a .safetensors file"),
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
        ("folder", "holds something else"),
        ("file/kernel", "is a file; name a folder"),
    ):
        answer = lospmm_command("tune", matrix, "--n", 4, *H200, "--out", tmp_path / name)
        assert (answer.status, answer.out) == (2, "")
        assert words in answer.error
    assert (tmp_path / "file").read_text() == "mine"


def test_a_setting_that_is_wrong(
    lospmm_command: Command, set_environment: Callable[[str, object], None], tmp_path: Path, matrix: Path
) -> None:
    set_environment("LOSPMM_WORKERS", "many")
    answer = lospmm_command("tune", matrix, "--n", 4, *H200, "--out", tmp_path / "out")
    assert answer.status == 2
    assert answer.error.startswith("LOSPMM_WORKERS: ")


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
    (out / "manifest.json").write_text(manifest.replace('"registers"', '"register"'))
    answer = lospmm_command("inspect", out)
    assert (answer.status, answer.error) == (2, f"{out}: manifest.json is damaged: registers: Field required")
    (out / "manifest.json").unlink()
    assert "holds no manifest.json" in lospmm_command("inspect", out).error
    assert "is a file" in lospmm_command("inspect", out / "kernel.cubin").error
    assert "there is no such folder" in lospmm_command("inspect", tmp_path / "gone").error


# Exit codes 3 to 5


def test_nothing_fits(lospmm_command: Command, tmp_path: Path, matrix: Path) -> None:
    device = tmp_path / "small.toml"
    device.write_text('base = "h200"\nregisters_per_thread = 20\n')
    answer = lospmm_command("tune", matrix, "--n", 4, "--device", device, "--out", tmp_path / "out", "--quiet")
    assert (answer.status, answer.out) == (3, "")
    assert answer.error == "no tile size fits small: of 16, 16 by thread_registers"
    counted = lospmm_command("space", matrix, "--n", 4, "--device", device, "--json")
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
    answer = lospmm_command(*tune, "--out", "/proc/kernel")
    assert (answer.status, answer.out) == (4, "")
    assert answer.error.startswith("/proc/kernel: cannot be written: ")
    (tmp_path / "file").touch()
    set_environment("LOSPMM_CACHE_DIR", tmp_path / "file")
    answer = lospmm_command(*tune, "--out", tmp_path / "out")
    assert (answer.status, answer.out) == (4, "")
    assert "LOSPMM_CACHE_DIR names another place" in answer.error
    assert not (tmp_path / "out").exists()


def test_a_wrong_kernel_is_not_written(
    lospmm_command: Command, own_cache: Store, tmp_path: Path, matrix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune = ("tune", matrix, *H200, "--out", tmp_path / "out", "--quiet")
    assert lospmm_command(*tune, "--n", 9).status == 0
    before = artifact.read(tmp_path / "out")

    def wrong(problem: Problem, winner: Candidate) -> KernelProgram:
        return lower(replace(problem, matrix=from_dense(WEIGHTS * 2)), winner)

    monkeypatch.setattr(jobs, "lower", wrong)
    answer = lospmm_command(*tune, "--n", 10, "--json")
    assert answer.status == 5
    assert re.match(r"row \d+, column \d+: got ", answer.error)
    assert json.loads(answer.out)["error"]["type"] == "VerificationFailed"
    assert artifact.read(tmp_path / "out") == before
    assert [entry.kind for entry in own_cache.entries()].count(jobs.KERNELS) == 1


# Matrices


def write_matrix(directory: Path, suffix: str) -> Path:
    path = directory / f"w{suffix}"
    sparse = scipy.sparse.csr_array(WEIGHTS)
    match suffix:
        case ".npy":
            np.save(path, WEIGHTS)
        case ".npz":
            scipy.sparse.save_npz(path, sparse)
        case ".mtx":
            scipy.io.mmwrite(path, sparse, precision=9)
        case ".smtx":
            path.write_bytes(smtx(WEIGHTS))
        case ".safetensors":
            save_file({"fc.weight": WEIGHTS, "conv.weight": WEIGHTS.reshape(16, 6, 2, 2) * 2}, path)
    return path


def test_every_format_gives_the_same_kernel(lospmm_command: Command, tmp_path: Path) -> None:
    manifests = []
    for suffix in (".npy", ".npz", ".mtx", ".safetensors"):
        tensors = ("--tensor", "fc.weight") if suffix == ".safetensors" else ()
        answer = lospmm_command(
            "tune", write_matrix(tmp_path, suffix), "--n", 50, *H200, "--out", tmp_path / "out", "--json", *tensors
        )
        assert answer.status == 0, answer.err
        manifests.append(json.loads(answer.out))
    assert manifests[0]["values"] == "stored"
    assert manifests == manifests[:1] * len(manifests)


def test_a_pattern_gets_values_of_a_seed(lospmm_command: Command, tmp_path: Path) -> None:
    path = write_matrix(tmp_path, ".smtx")
    manifests = [
        json.loads(lospmm_command("tune", path, "--n", 5, *H200, "--out", tmp_path / "out", "--json", *seed).out)
        for seed in ((), ("--seed", "0"), ("--seed", "1"))
    ]
    assert [(manifest["values"], manifest["seed"]) for manifest in manifests] == [
        ("drawn", 0),
        ("drawn", 0),
        ("drawn", 1),
    ]
    assert manifests[0] == manifests[1]
    assert manifests[0]["fingerprint"] != manifests[2]["fingerprint"]


def test_a_tensor_has_to_be_chosen(lospmm_command: Command, tmp_path: Path) -> None:
    answer = lospmm_command("space", write_matrix(tmp_path, ".safetensors"), "--n", 5, *H200)
    assert answer.status == 2
    assert "holds 2 weights; choose one with --tensor: conv.weight, fc.weight" in answer.error


def mostly_empty() -> NDArray[np.float32]:
    """1,879 of 2,048 rows hold nothing."""
    weights = draw(2048, 64)
    weights[:, 0] = 1
    weights[np.random.default_rng(1).permutation(2048)[:1879]] = 0
    return weights


@pytest.mark.parametrize(
    ("weights", "n"),
    [
        pytest.param(np.zeros((100, 24), np.float32), 40, id="all zero"),
        pytest.param(np.ones((1, 1), np.float32), 1, id="1x1"),
        pytest.param(draw(24, 147), 129, id="K=147"),
        pytest.param(mostly_empty(), 31, id="rows empty"),
        pytest.param(draw(40, 24), 1, id="N=1"),
        pytest.param(draw(33, 70), 1000, id="N ragged"),
        pytest.param(np.ones((1, 3), np.float32), 65, id="one row"),
    ],
)
@pytest.mark.parametrize("emitter", ["ptx", "cuda"])
def test_matrices_at_the_edge(
    lospmm_command: Command, tmp_path: Path, weights: NDArray[np.float32], n: int, emitter: str
) -> None:
    np.save(tmp_path / "w.npy", weights)
    arguments = ("--n", n, *H200, "--out", tmp_path / "out", "--emitter", emitter, "--json")
    answer = lospmm_command("tune", tmp_path / "w.npy", *arguments)
    assert answer.status == 0, answer.err
    manifest = json.loads(answer.out)
    assert manifest["nnz"] == np.count_nonzero(weights)
    assert manifest["verified"]["on"] == "cpu"
    empty = np.count_nonzero(~weights.any(axis=1))
    assert manifest["tile"]["zero_blocks"] == -(-empty // 64)
    b = np.random.default_rng(2).standard_normal((weights.shape[1], n)).astype(np.float32)
    c = lospmm.load(tmp_path / "out").run_on_cpu(b)
    np.testing.assert_allclose(c, weights @ b, rtol=1e-4, atol=1e-4)


def test_a_very_wide_b(lospmm_command: Command, tmp_path: Path) -> None:
    np.save(tmp_path / "w.npy", draw(4, 6, density=0.9))
    tune = ("tune", tmp_path / "w.npy", *H200, "--out", tmp_path / "out", "--quiet")
    answer = lospmm_command(*tune, "--n", 50_000_000, "--json")
    assert answer.status == 0, answer.err
    manifest = json.loads(answer.out)
    assert max(manifest["launch"]["grid"][1:]) < 2**16
    assert manifest["launch"]["grid"][1] * manifest["tile"]["cols"] >= 50_000_000
    widest = lospmm_command(*tune, "--n", 2**30 - 1, "--json")
    assert (widest.status, json.loads(widest.out)["tile"]["order"]) == (0, "column")


# The space


@pytest.mark.parametrize("n", [1, 50, 1000])
def test_the_space_adds_up(lospmm_command: Command, matrix: Path, n: int) -> None:
    answer = lospmm_command("space", matrix, "--n", n, *H200, "--json")
    assert answer.status == 0, answer.err
    found = json.loads(answer.out)
    assert found["space"] == sum(found["removed"].values()) + len(found["survivors"])
    assert found["space"] >= found["after_registers"] >= found["after_utilization"] >= found["after_balance"]
    assert found["after_balance"] == len(found["survivors"]) > 0
    text = lospmm_command("space", matrix, "--n", n, *H200, "--quiet")
    assert text.err == ""
    counts, _, survivors = text.out.partition("\n\n")
    lefts = [int(line.split()[-1].replace(",", "")) for line in counts.splitlines()[1:]]
    assert (lefts[0], lefts[-1]) == (found["space"], len(found["survivors"]))
    listed = {
        (rows, int(line.split()[0]))
        for line in survivors.splitlines()[1:]
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", line.split(maxsplit=1)[1])
        for rows in range(int(first), int(last or first) + 1)
    }
    assert listed == {tuple(tile) for tile in found["survivors"]}


@pytest.mark.parametrize(("suffix", "beginning"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("PDF", b"%PDF")])
def test_the_space_is_drawn(
    lospmm_command: Command, tmp_path: Path, matrix: Path, suffix: str, beginning: bytes
) -> None:
    plot = tmp_path / f"space.{suffix}"
    answer = lospmm_command("space", matrix, "--n", 300, *H200, "--plot", plot)
    assert answer.status == 0, answer.err
    assert plot.read_bytes().startswith(beginning)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("space.bmp", "the suffix must be one of .png, .svg, .pdf"),
        ("space", "the suffix must be one of"),
        ("gone/space.png", "there is no folder"),
    ],
)
def test_a_plot_that_cannot_be(lospmm_command: Command, tmp_path: Path, matrix: Path, name: str, words: str) -> None:
    answer = lospmm_command("space", matrix, "--n", 4, *H200, "--plot", tmp_path / name, "--quiet")
    assert (answer.status, answer.out) == (2, "")
    assert words in answer.error


# The store


def test_the_store_is_listed_checked_and_pruned(
    lospmm_command: Command, own_cache: Store, tmp_path: Path, matrix: Path
) -> None:
    def entries(command: str, *options: object, status: int = 0) -> list[dict[str, Any]]:
        answer = lospmm_command("cache", command, "--json", *options)
        assert (answer.status, answer.err) == (status, "")
        listed: list[dict[str, Any]] = json.loads(answer.out)["entries"]
        return listed

    assert entries("ls") == []
    tune = ("tune", matrix, "--n", 50, *H200, "--out", tmp_path / "out", "--quiet")
    assert lospmm_command(*tune).status == 0
    made = entries("ls")
    assert {entry["kind"] for entry in made} == {"kernel", "unit"}
    assert "kernel" in lospmm_command("cache", "ls").out
    assert entries("verify") == []

    (kernel,) = (entry["key"] for entry in made if entry["kind"] == "kernel")
    (own_cache.directory("kernel", kernel) / "kernel.cubin").write_bytes(b"damaged")
    assert [entry["key"] for entry in entries("verify", status=4)] == [kernel]
    assert lospmm_command("cache", "verify").status == 4
    assert lospmm_command(*tune).status == 0
    assert entries("verify") == []

    assert entries("prune", "--max-mb", 1000, "--older-than-days", 1) == []
    assert len(entries("prune", "--max-mb", 0)) == len(made)
    assert entries("ls") == []


def test_a_store_in_disorder_is_reported(lospmm_command: Command, own_cache: Store) -> None:
    path = own_cache.directory("unit", "ab" * 32)
    path.parent.mkdir(parents=True)
    path.write_text("a file where a folder should be")
    answer = lospmm_command("cache", "ls")
    assert (answer.status, answer.out) == (4, "")
    assert answer.error == f"{path}: Not a directory"


def test_serve_refuses_in_one_line() -> None:
    answer = process("serve", "--port", "99999")
    assert (answer.status, answer.error) == (2, "port 99999: expected 0 to 65535")


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_one_line(ending: signal.Signals) -> None:
    code = f"import os, lospmm.cli as c; c.run = lambda _: os.kill(os.getpid(), {ending:d}); c.main()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (128 + ending, "")
    assert ended.stderr == f"error: stopped by {ending.name}\n"


def test_a_closed_stdout_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m lospmm.cli cache ls --json >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stderr) == (0, "")
