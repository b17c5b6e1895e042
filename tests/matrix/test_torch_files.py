"""Files of torch.save: what PyTorch writes is read without it, and nothing else of a pickle is."""

import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lospmm.errors import BadMatrix
from lospmm.matrix import readers, torch_file
from lospmm.matrix.layers import open_model

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'lospmm[torch]'")


def saved(found: Any) -> bytes:
    file = io.BytesIO()
    torch.save(found, file)
    return file.getvalue()


def pruned(*shape: int, dtype: Any = torch.float32) -> Any:
    torch.manual_seed(sum(shape))
    return (torch.randn(shape) * (torch.rand(shape) < 0.3)).to(dtype)


def test_a_state_dict() -> None:
    """Types, views, transposes, parameters and masks; what is no tensor is passed by."""
    from torch.nn.utils import prune

    layer = torch.nn.Linear(6, 4)
    prune.l1_unstructured(layer, "weight", 0.5)
    large = pruned(8, 10)
    tensors = {
        "half": pruned(4, 6, dtype=torch.float16),
        "bf16": pruned(4, 6, dtype=torch.bfloat16),
        "double": pruned(4, 6, dtype=torch.float64),
        "turned": pruned(5, 3).t(),
        "part": large[2:5, 1:7],
        "window": torch.nn.Parameter(pruned(4, 2, 3, 3)),
    }
    model = layer.state_dict()
    content = saved({"model": model, **tensors, "step": 3, "lr": 0.1, "names": ["a"], "empty": torch.zeros(0, 4)})
    found = dict(readers.read_model(content, "m.pt"))
    for name, tensor in tensors.items():
        file = found[name]
        assert not isinstance(file, BadMatrix), file
        assert np.array_equal(file.matrix.to_scipy().toarray(), tensor.detach().float().flatten(1).numpy()), name
    masked = found["model.weight"]
    assert not isinstance(masked, BadMatrix)
    assert np.array_equal(masked.matrix.to_scipy().toarray(), layer.weight.detach().numpy())
    assert masked.bias is not None and masked.bias.tolist() == layer.bias.tolist()
    assert isinstance(found["empty"], BadMatrix)


def test_a_checkpoint_is_a_model(tmp_path: Path) -> None:
    """Also under another name, and one that is so large that it is mapped."""
    state = {"fc.weight": pruned(600, 700), "fc.bias": torch.ones(600), "steps": torch.ones(2, 2, dtype=torch.int64)}
    (tmp_path / "pytorch_model.bin").write_bytes(saved(state))
    source = open_model(tmp_path / "pytorch_model.bin")
    assert (source.names, source.has_biases) == (("fc.weight",), True)
    assert source.others == {
        "fc.bias": "a vector: no kernel of its own",
        "steps": "I64 with 2 axes: weights are F16, BF16, F32, F64, with 2 to 4 axes",
    }
    ((_, file),) = source.read(["fc.weight"])
    assert not isinstance(file, BadMatrix)
    assert file.matrix.nnz == np.count_nonzero(state["fc.weight"].numpy())
    assert readers.read(tmp_path / "pytorch_model.bin", tensor="fc.weight").matrix == file.matrix


@pytest.mark.parametrize(
    ("wrapped", "expected"),
    [
        (lambda state: {"state_dict": state, "epoch": 3, "optimizer_states": [{"state": {0: state}}]}, "fc.weight"),
        (lambda state: {"model": state, "optimizer": {"state": {0: state}}, "model_ema": state}, "fc.weight"),
        (lambda state: {"model": state, "model_state_dict": state}, "fc.weight"),
        (lambda state: {"model": state, "mean": state["fc.weight"]}, "mean model.fc.weight"),
        (lambda state: {"encoder": state, "decoder": state}, "decoder.fc.weight encoder.fc.weight"),
        (lambda state: {f"module.{name}": one for name, one in state.items()}, "fc.weight"),
        (lambda state: {"model": {f"module._orig_mod.{name}": one for name, one in state.items()}}, "fc.weight"),
        (lambda state: {f"_orig_mod.module.{name}": one for name, one in state.items()}, "fc.weight"),
        (lambda state: {"module.fc.weight": state["fc.weight"], "steps": torch.ones(1)}, "module.fc.weight"),
    ],
)
def test_the_model_of_a_training_checkpoint(wrapped: Callable[[Any], Any], expected: str) -> None:
    content = saved(wrapped({"fc.weight": pruned(8, 6), "fc.bias": torch.ones(8)}))
    assert list(readers.tensors_of_model(content, "m.pt").weights) == expected.split()


def archived(pickled: bytes, **others: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in {"data.pkl": pickled, **others}.items():
            archive.writestr(f"archive/{name}", content)
    return file.getvalue()


class Harmful:
    def __reduce__(self) -> Any:
        return print, ("called",)


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (Harmful(), "holds a __builtin__.print, which is not read; save a state_dict"),
        ({"a": Harmful()}, "holds a __builtin__.print"),
        ([1, 2], "holds no state dict"),
    ],
)
def test_nothing_of_a_pickle_is_called(found: Any, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BadMatrix, match=why):
        torch_file.tensors_of(archived(pickle.dumps(found, protocol=2)))
    assert capsys.readouterr().out == ""


def test_a_whole_module_is_refused() -> None:
    with pytest.raises(BadMatrix, match=r"holds a torch.nn.modules.linear.Linear, which is not read"):
        readers.tensors_of_model(saved(torch.nn.Linear(2, 2)), "m.pt")


def test_other_files_of_pytorch() -> None:
    old = io.BytesIO()
    torch.save({"w": torch.ones(2, 2)}, old, _use_new_zipfile_serialization=False)
    program = archived(b"").replace(b"archive/data.pkl", b"archive/data/0pk")
    for content, why in ((old.getvalue(), "before 1.6"), (program, "a program of torch.jit or torch.export")):
        with pytest.raises(BadMatrix, match=why):
            readers.tensors_of_model(content, "m.pt")


def test_files_that_are_not_whole() -> None:
    content = saved({"w": pruned(4, 6)})
    damaged = {
        "no end of an archive": content[:-40],
        "it has no data.pkl": content.replace(b"data.pkl", b"date.pkl"),
        "big-endian": archived(pickle.dumps({}), byteorder=b"big"),
        "memo is too large": archived(b"\x80\x02}r\xff\xff\xff\x7f."),
        "pickle exhausted": archived(b"\x80\x02}q\x00"),
        "shorter than its tensors": archived(_pickle_of(content), **{"data/0": b"1234"}),
        "KeyError": archived(_pickle_of(content)),
    }
    for why, bad in damaged.items():
        with pytest.raises(BadMatrix, match=why):
            torch_file.tensors_of(bad)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"0" * 100)
    with pytest.raises(BadMatrix, match="is compressed"):
        torch_file.tensors_of(packed.getvalue())
    rng = np.random.default_rng(0)
    for at in rng.integers(0, len(content), 300):  # whatever a byte becomes: tensors, or an error that says so
        bad = bytearray(content)
        bad[at] ^= 1 << rng.integers(8)
        try:
            dict(readers.read_model(bytes(bad), "m.pt"))
        except BadMatrix as error:
            assert "\n" not in str(error)


def _pickle_of(content: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return archive.read("archive/data.pkl")


def test_a_tensor_larger_than_its_storage() -> None:
    """As an expanded one is: a few bytes may not become gigabytes."""
    with pytest.raises(BadMatrix, match="in a storage of 3 elements"):
        torch_file.tensors_of(saved({"w": torch.as_strided(torch.ones(3), (2, 2), (0, 0))}))
