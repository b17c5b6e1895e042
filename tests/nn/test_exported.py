"""Packages of kernels, and what torch.export leaves of a layer: an operator that needs no Python."""

import math
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'lospmm[torch]'")

import lospmm.nn  # noqa: E402
from lospmm.nn import package  # noqa: E402
from lospmm.nn.bound import ReadyKernel  # noqa: E402
from lospmm.nn.layer import SparseLinear  # noqa: E402
from lospmm.nn.sparse import ColumnBucket  # noqa: E402
from tests.docs.pages import DOCS, blocks  # noqa: E402
from tests.nn.models import EMULATED, drawn, perceptron  # noqa: E402

CPU = torch.device("cpu")

NATIVE = pytest.mark.skipif(not package.IS_NATIVE, reason="lospmm-torch is not installed: make wheels")


def packed(bucket: ColumnBucket, ready: ReadyKernel) -> package.Package:
    elements = {"b_elements": math.prod(ready.call[0]), "c_elements": math.prod(ready.out_shape)}
    return package.package_of(bucket.kernel, **elements, element_bytes=4, alignment_bytes=8, device=CPU)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    found = perceptron()
    assert lospmm.nn.sparsify_(found, drawn(10, 24), **EMULATED).sparse == ("0", "2")
    return found


def of(layer: SparseLinear) -> tuple[ColumnBucket, ReadyKernel]:
    (bucket,), (ready,) = layer.lospmm_state.tuned["weight"].buckets, layer.lospmm_state.bound["weight"].ready.values()
    return bucket, ready


def test_a_package_holds_a_launch_and_its_code(model: torch.nn.Module) -> None:
    bucket, ready = of(model[0])
    found = packed(bucket, ready)
    content = found.data.numpy().tobytes()
    magic, high, low, *numbers = struct.unpack_from("<8sqq8I3Q", content)
    launch, cubin = bucket.kernel.launch(), bucket.kernel.cubin
    name = bucket.kernel.manifest["name"].encode()
    assert (magic, high, low) == (b"LOSPMMP1", found.high, found.low)
    assert numbers == [
        *launch.grid, launch.block, launch.shared_bytes, 8, 4, len(name), 24 * 10, 40 * 10, len(cubin)
    ]  # fmt: skip
    assert content[80:] == name + cubin
    other = packed(bucket, replace(ready, out_shape=(40, 11)))
    assert (other.high, other.low) != (found.high, found.low)


def packed_on_cpu(model: torch.nn.Module) -> None:
    """As layers are on a GPU, whose packages only the operator there can run."""
    for one in (model[0], model[2]):
        bucket, ready = of(one)
        one.lospmm_state.bound["weight"].ready[ready.call] = replace(ready, package=packed(bucket, ready))


@NATIVE
@torch.no_grad()
def test_an_exported_layer_calls_the_operator(model: torch.nn.Module) -> None:
    packed_on_cpu(model)
    program = torch.export.export(model, (drawn(10, 24),), strict=False)
    code = program.graph_module.code
    assert code.count("lospmm.apply") == 2 and "lospmm.spmm" not in code and "transposed" not in code
    (found,) = program.graph_module.graph.output_node().args[0]
    assert found.meta["val"].shape == (10, 16) and found.meta["val"].is_contiguous()
    with torch.enable_grad():
        assert "lospmm.apply" not in torch.export.export(perceptron(), (drawn(10, 24),), strict=False).graph_module.code


@pytest.mark.slow
@NATIVE
def test_the_page_exports_a_model_and_loads_it(
    model: torch.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lospmm_torch

    written, read = (block.text for block in blocks((DOCS / "embedding.md").read_text()) if block.language == "python")
    packed_on_cpu(model)
    monkeypatch.chdir(tmp_path)
    compiled = []
    monkeypatch.setattr(
        torch._inductor, "aoti_compile_and_package", lambda program, **to: compiled.append((program, to))
    )
    exec(written, {"torch": torch, "model": model, "x": drawn(10, 24)})
    assert compiled[0][1] == {"package_path": "model.pt2"}
    script = read.replace("liblospmm_torch.so", str(lospmm_torch.LIBRARY)) + "print(model.code)"
    found = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.count("torch.ops.lospmm.apply") == 2


@NATIVE
def test_the_operator_says_what_it_returns() -> None:
    x, data = torch.empty(3, 5, 8, device="meta"), torch.empty(9, dtype=torch.uint8, device="meta")
    assert package.apply(x, data, 1, 2, [7, 15]).shape == (7, 15)
