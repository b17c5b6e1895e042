"""lospmm verify: the same bytes anew, and what differs where they are others."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.cli.command import H200, WEIGHTS, Answer, Command, draw

pytestmark = pytest.mark.usefixtures("own_cache")

Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def kernel(lospmm_command: Command, matrix: Path, tmp_path: Path) -> Path:
    arguments = (matrix, "--n", 32, *H200, "--families", "unrolled", "--quiet", "--out", tmp_path / "k")
    assert lospmm_command("tune", *arguments).status == 0
    return tmp_path / "k"


def changed(kernel: Path, change: Change) -> None:
    manifest = json.loads((kernel / "manifest.json").read_text())
    change(manifest)
    (kernel / "manifest.json").write_text(json.dumps(manifest))


def differences(answer: Answer) -> Mapping[str, Mapping[str, Any]]:
    (found,) = json.loads(answer.out)["kernels"]
    return found["differences"]


@pytest.mark.parametrize(
    "options",
    [
        ("--n", 48, "--emitter", "sass"),
        ("--n", 48, "--emitter", "ptx", "--families", "unrolled", "--relu"),
        ("--n", 48, "--emitter", "cuda", "--families", "unrolled", "--residual"),
        ("--conv", "2x6x8x8,2x2", "--emitter", "ptx"),
        ("--n", 64, "--dtype", "float16", "--sums", "float16", "--families", "unrolled"),
        ("--n", 1, "--families", "spmv", "--dtype", "float16", "--values", "int8"),
        ("--n", 64, "--families", "bitmap", "--dtype", "float16", "--memory", "low"),
        ("--n", 64, "--dtype", "bfloat16", "--families", "unrolled"),
    ],
    ids=lambda options: " ".join(map(str, options)),
)
def test_kernels_of_all_kinds_come_out_the_same(
    lospmm_command: Command, tmp_path: Path, options: tuple[object, ...]
) -> None:
    np.save(tmp_path / "w.npy", draw(48, 24, seed=3))
    np.save(tmp_path / "b.npy", np.arange(48, dtype=np.float32))
    out = tmp_path / "k"
    arguments = (tmp_path / "w.npy", *H200, "--bias", tmp_path / "b.npy", *options, "--quiet", "--out", out)
    assert lospmm_command("tune", *arguments, "--verify", "none").status == 0
    answer = lospmm_command("verify", out)
    assert (answer.status, answer.out, answer.err) == (0, f"{out}: the same bytes\n", "")


def test_a_model(lospmm_command: Command, tmp_path: Path) -> None:
    save_file({"fc.0": WEIGHTS, "fc.1": draw(4, 24, seed=1)}, tmp_path / "net.safetensors")
    out = tmp_path / "net"
    arguments = (tmp_path / "net.safetensors", "--n", 32, *H200, "--quiet", "--out", out)
    assert lospmm_command("tune-model", *arguments).status == 0
    answer = lospmm_command("verify", out, "--json")
    assert answer.status == 0
    expected = [{"folder": name, "agrees": True, "differences": {}} for name in ("fc.0", "fc.1")]
    assert json.loads(answer.out) == {"agrees": True, "kernels": expected}
    changed(out / "fc.1", lambda manifest: manifest["launch"].update(block=64))
    answer = lospmm_command("verify", out)
    assert answer.status == 5
    assert answer.out.splitlines()[:2] == ["fc.0: the same bytes", "fc.1: ANOTHER kernel"]
    (out / "fc.0").rename(tmp_path / "fc.0")
    (out / "fc.1").rename(out / "fc.0")
    answer = lospmm_command("verify", out)
    assert answer.status == 2
    assert answer.error == f"{out / 'fc.0'}: is not the kernel that report.json names; tune it again"


def test_other_bytes(lospmm_command: Command, kernel: Path) -> None:
    """Whole, and as its manifest says: ``inspect`` finds nothing."""
    cubin = kernel / "kernel.cubin"
    cubin.write_bytes(cubin.read_bytes() + b"\0")
    digest = hashlib.sha256(cubin.read_bytes()).hexdigest()
    changed(kernel, lambda manifest: manifest.update(cubin_sha256=digest))
    assert lospmm_command("inspect", kernel).status == 0
    answer = lospmm_command("verify", kernel, "--json")
    assert answer.status == 5
    assert {field: found["recorded"] for field, found in differences(answer).items()} == {"cubin_sha256": digest}


def test_another_launch(lospmm_command: Command, kernel: Path) -> None:
    changed(kernel, lambda manifest: manifest["launch"].update(shared_bytes=1024))
    answer = lospmm_command("verify", kernel, "--json")
    assert (answer.status, [*differences(answer)]) == (5, ["launch"])


def test_who_made_the_same_bytes_is_told(lospmm_command: Command, kernel: Path) -> None:
    changed(kernel, lambda manifest: manifest.update(version="9.9", toolchain="ptxas 99.1 (elsewhere)"))
    answer = lospmm_command("verify", kernel, "--json")
    assert answer.status == 0
    recorded = {field: found["recorded"] for field, found in differences(answer).items()}
    assert recorded == {"version": "9.9", "toolchain": "ptxas 99.1"}
    lines = lospmm_command("verify", kernel).out.splitlines()
    assert lines[0] == f"{kernel}: the same bytes" and lines[1].startswith("  version: recorded 9.9, here ")


def test_another_place_of_the_same_compiler_is_nothing(lospmm_command: Command, kernel: Path) -> None:
    changed(kernel, lambda found: found.update(toolchain=found["toolchain"].partition(" (")[0] + " (elsewhere)"))
    assert lospmm_command("verify", kernel).out == f"{kernel}: the same bytes\n"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda found: found.update(device="mine"), "tuned for 'mine', of a device file: name it by --device"),
        (lambda found: found["tile"].update(prefetch=0), "this version makes no such kernel of the family 'unrolled'"),
        (lambda found: found.update(cubin_family="csr"), "this version makes no such kernel of the family 'csr'"),
        (lambda found: found.update(fingerprint="0" * 64), "matrix.npz holds another matrix (its fingerprint differs)"),
    ],
)
def test_what_cannot_be_compared(lospmm_command: Command, kernel: Path, change: Change, words: str) -> None:
    changed(kernel, change)
    answer = lospmm_command("verify", kernel)
    assert (answer.status, answer.error.endswith(words)) == (2, True), answer.err


def test_a_plan_that_there_is_not(lospmm_command: Command, matrix: Path, tmp_path: Path) -> None:
    out = tmp_path / "k"
    arguments = (matrix, "--n", 64, *H200, "--families", "csr", "--verify", "none", "--quiet", "--out", out)
    assert lospmm_command("tune", *arguments).status == 0
    changed(out, lambda manifest: manifest["plan"]["axes"].update(warps=77))
    answer = lospmm_command("verify", out)
    assert answer.status == 2
    assert answer.error.endswith("this version makes no such kernel of the family 'csr'")
