"""Readers of matrix files, even hostile ones: used by the command line and for uploads alike.

The format is known by its first bytes (``_BEGINNINGS``), never by the name alone, and read by its row of ``READERS``.
A reader takes memory in proportion to the bytes it is given, never to what a header claims. To add a format, add a
row to both tables. Every failure is a ``BadMatrix`` of one line: the file, what is wrong, where, and what to do.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lospmm.errors import BadMatrix, BadRequest, printable, system_errors
from lospmm.matrix import npz as npy
from lospmm.matrix import onnx_file, safetensors_file, torch_file
from lospmm.matrix import text as matrix_text
from lospmm.matrix.csr import SparseMatrix, check_axes, check_shape, from_coo, transposed
from lospmm.matrix.mapped import Content, Decode, as_it_is, content_of, local_file, nonzeros
from lospmm.settings import settings

#: Whether a file holds its values or only a pattern, whose values are then drawn from a normal distribution.
Values = Literal["stored", "drawn"]


@dataclass(frozen=True, slots=True)
class MatrixFile:
    """A matrix, the file that it was read from, and the bias found in the same file, if any."""

    matrix: SparseMatrix
    values: Values
    name: str  # the file's base name
    #: The bias of the same file that belongs to the weight, or why it cannot be used.
    beside: NDArray[np.floating] | BadMatrix | None = None
    has_graph: bool = False  # which says that the matrix is out x in

    @property
    def bias(self) -> NDArray[np.floating] | None:
        """The bias that belongs to the weight, (m,), or None. Raises BadMatrix if it cannot be used."""
        if isinstance(self.beside, BadMatrix):
            raise self.beside
        return self.beside

    def transposed(self) -> "MatrixFile":
        """Return the file with its matrix transposed. Raises BadRequest for a pattern, whose values follow its rows."""
        if self.values == "drawn":
            raise BadRequest(f"transpose: {self.name} is a pattern without values; transpose the file")
        if self.has_graph:
            raise BadRequest(f"transpose: {self.name} has a graph, which tells it; leave transpose out")
        return replace(self, matrix=transposed(self.matrix))


def read(path: Path, *, tensor: str | None = None, seed: int = 0) -> MatrixFile:
    """Return the matrix in a regular file; ``tensor`` and ``seed`` as in ``read_bytes``. Raises BadMatrix."""
    content = content_of_path(path)
    try:
        return read_bytes(content, path.name, tensor=tensor, seed=seed)
    except BadMatrix as error:  # names the file by its base name, as for an upload
        folder = "" if path.parent == Path() else f"{_printable(str(path.parent)).rstrip('/')}/"
        raise BadMatrix(f"{folder}{error}") from None


def content_of_path(path: Path) -> Content:
    """Return the bytes of a regular file, as ``_content_in``. Raises BadMatrix."""
    name = _printable(str(path))
    with system_errors(BadMatrix, f"{name}: cannot be read"):
        if not path.is_file():
            kind = "is a directory" if path.is_dir() else "is a device or pipe"
            raise BadMatrix(f"{name}: {f'{kind}; name a file' if path.exists() else 'there is no such file'}")
        with path.open("rb") as stream:
            return _content_in(stream)


def _content_in(stream: IO[bytes]) -> Content:
    """Return the bytes of a local file, mapped if it is a model, which may have any size.

    Of other formats it returns at most one byte more than LOSPMM_MAX_UPLOAD_BYTES, so that the reader can refuse the
    file as too large.
    """
    beginning = stream.read(_BEGINNING_BYTES)
    if is_model(beginning):
        return local_file(stream) if _kind(beginning) == "onnx" else content_of(stream)
    return beginning + stream.read(settings().max_upload_bytes + 1 - len(beginning))


def read_bias(path: Path) -> NDArray[np.floating]:
    """Return the bias in a ``.npy`` file: one number for each row. Raises BadRequest."""
    with system_errors(BadRequest, f"bias {path}: cannot be read"), path.open("rb") as file:
        return bias_in(_content_in(file), str(path))


def bias_in(content: Content, name: str) -> NDArray[np.floating]:
    """Return the bias in the bytes of a ``.npy``; ``name`` is for messages. Raises BadRequest."""
    try:
        bias = np.array(npy.parse(content))
    except BadMatrix as error:
        raise BadRequest(f"bias {name}: {error}; give a .npy with a number for each row") from None
    if bias.ndim != 1 or bias.dtype.kind not in "fiu":
        raise BadRequest(f"bias {name}: of shape {bias.shape} and type {bias.dtype}; give a .npy with a number a row")
    return bias


def read_bytes(content: Content, name: str, *, tensor: str | None = None, seed: int = 0) -> MatrixFile:
    """Return the matrix in the bytes of a file called ``name``. Raises BadMatrix.

    ``tensor`` names the weight to take from a model that has several. ``seed`` draws the values of a
    pattern: the same pattern and seed give the same values in every format.
    """
    name = _printable(name.replace("\\", "/").rpartition("/")[2]) or "matrix"
    try:
        if seed < 0:
            raise BadMatrix(f"seed {seed} is negative")
        reader = _reader(content, name, tensor)
        matrix, values = reader(content)
    except BadMatrix as error:
        raise BadMatrix(f"{name}: {printable(str(error))}") from None  # it may quote the file
    matrix = _draw(matrix, seed) if values == "drawn" else matrix
    return MatrixFile(matrix, values, name, has_graph=_kind(content) == "onnx")


def read_model(
    content: Content, name: str, wanted: Collection[str] | None = None
) -> Iterator[tuple[str, MatrixFile | BadMatrix]]:
    """Yield each weight of a model by name, or what is wrong with it; layer 2 before layer 10.

    ``wanted`` are the names of those that are read, None: all.

    A weight comes with its bias: ``fc.bias`` of ``fc.weight``, ``in_proj_bias`` of ``in_proj_weight``; of an ONNX model
    the one that its graph adds. Raises BadMatrix if the file cannot be read or holds no weight.
    """
    name = _printable(name.replace("\\", "/").rpartition("/")[2]) or "model"
    tensors = _tensors_in(content, name)
    for tensor, weight in tensors.items():
        if not _is_weight(weight) or (wanted is not None and tensor not in wanted):
            continue
        try:
            bias, has_graph = _beside(tensor, tensors, name), "turned" in weight
            yield tensor, MatrixFile(_of_weight(weight, content), "stored", name, bias, has_graph)
        except BadMatrix as error:
            wrong = BadMatrix(f"{name}: {printable(str(error))}")
            wrong.sparsity = None if "mask" in weight else error.sparsity  # of what is masked nobody has counted
            yield tensor, wrong


class ModelTensors(NamedTuple):
    """The tensors of a model: weights, with whether each has a bias; others, with why they are none.

    ``axes`` are how many each weight has.
    """

    weights: dict[str, bool]
    others: dict[str, str]
    axes: dict[str, int]


def tensors_of_model(content: Content, name: str) -> ModelTensors:
    """Return all tensors; ``read_model`` yields the weights. Raises BadMatrix."""
    tensors = _tensors_in(content, _printable(name) or "model")
    has_bias = {one: _bias_name(one, tensors) in tensors for one, tensor in tensors.items() if _is_weight(tensor)}
    others = {one: _why_no_weight(tensor) for one, tensor in tensors.items() if one not in has_bias}
    return ModelTensors(has_bias, others, {one: len(tensors[one]["shape"]) for one in has_bias})


def no_biases(names: Sequence[str]) -> BadRequest:
    """Return the error for a model of which biases are wanted and no layer has one."""
    return BadRequest(
        f"biases: no layer has one beside its weight, as fc.bias beside fc.weight in a .safetensors; the layers are "
        f"{_listed([printable(name) for name in names])}; leave biases out, or tune each layer with a bias of its own"
    )


def _tensors_in(content: Content, name: str) -> dict[str, dict[str, Any]]:
    """Return the tensors of a model, layer 2 before layer 10. Raises BadMatrix if no weight is among them."""
    try:
        _reader(content, name, None)
        if not is_model(content):
            raise BadMatrix(
                "is no .safetensors, .onnx or .pt; name a folder of matrix files, one per layer, or tune it alone"
            )
        tensors = _tensors(content)
        if not any(map(_is_weight, tensors.values())):
            raise BadMatrix(_NO_WEIGHT)
    except BadMatrix as error:
        raise BadMatrix(f"{name}: {printable(str(error))}") from None
    return {tensor: tensors[tensor] for tensor in sorted(tensors, key=natural)}


def natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders numbers in names as numbers."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name)]


def is_model(content: Content) -> bool:
    """Return whether the bytes begin as a file that holds several matrices."""
    return _kind(content) in MODELS


def _read_npz(content: Content) -> tuple[SparseMatrix, Values]:
    """Read a sparse matrix, or the only array, dense; its zeros are pruned."""
    arrays = npy.archive(content)
    dense = npy.dense_of(arrays)
    return npy.sparse_of(arrays, content) if dense is None else _pruned(dense, content), "stored"


def _read_mtx(content: Content) -> tuple[SparseMatrix, Values]:
    matrix, is_pattern = matrix_text.read_mtx(content)
    return matrix, "drawn" if is_pattern else "stored"


def _read_weight(content: Content, tensor: str | None = None) -> tuple[SparseMatrix, Values]:
    """Read one weight: 2-D as it is; (out, in, width) or (out, in, height, width) with all but the first as one."""
    weights = _tensors(content)
    eligible = sorted(name for name, weight in weights.items() if _is_weight(weight))
    if tensor is None:
        if not eligible:
            raise BadMatrix(_NO_WEIGHT)
        if len(eligible) != 1:
            raise BadMatrix(f"holds {len(eligible)} weights; choose one by --tensor, or tensor=: {_listed(eligible)}")
        tensor = eligible[0]
    if tensor not in weights:
        raise BadMatrix(f"has no tensor {tensor[:80]!r}; its weights are: {_listed(eligible)}")
    weight = weights[tensor]
    if not _is_weight(weight):
        raise BadMatrix(
            f"tensor {tensor[:80]!r} is {weight['dtype']} of shape {str(weight['shape'])[:80]}; "
            f"a weight is {', '.join(_FLOATS)}, 2-D to 4-D: {_listed(eligible)}"
        )
    return _of_weight(weight, content), "stored"


def _of_weight(weight: dict[str, Any], content: Content) -> SparseMatrix:
    rows, *rest = weight["shape"]
    shape = check_shape((rows, math.prod(rest)))
    flat = np.frombuffer(weight["data"], _FLOATS[weight["dtype"]])
    matrix = _pruned(flat.reshape(shape), content, _from_bf16 if weight["dtype"] == "BF16" else as_it_is)
    if "mask" in weight:
        row = np.repeat(np.arange(matrix.m), matrix.row_nnz)
        values = matrix.data * _numbers(weight["mask"]).reshape(shape)[row, matrix.indices].astype(np.float32)
        (left,) = np.nonzero(values)
        matrix = from_coo(shape, row[left], matrix.indices[left], values[left])
    return transposed(matrix) if weight.get("turned") else matrix


def _bias_name(weight: str, tensors: dict[str, dict[str, Any]]) -> str | None:
    """Return the name of the bias that belongs to a weight: as the format says, or by the weight's name."""
    stem = weight.removesuffix("weight")
    bias: str | None = tensors[weight].get("bias", f"{stem}bias" if stem != weight else None)
    return bias


def _beside(weight: str, tensors: dict[str, dict[str, Any]], file: str) -> NDArray[np.floating] | BadMatrix | None:
    """Return the bias of a weight, of any length, or what is wrong with it, or None."""
    bias = _bias_name(weight, tensors)
    if bias is None or (found := tensors.get(bias)) is None:
        return None
    if found["dtype"] not in _FLOATS or len(found["shape"]) != 1:
        return BadMatrix(
            f"{file}: tensor {bias[:80]!r} is {found['dtype']} of shape {str(found['shape'])[:80]}; "
            f"a bias is {', '.join(_FLOATS)}, with a number for each row"
        )
    return _numbers(found) * _numbers(found["mask"]) if "mask" in found else _numbers(found)


def _numbers(tensor: dict[str, Any]) -> NDArray[Any]:
    numbers = np.frombuffer(tensor["data"], _MASKS[tensor["dtype"]])
    return _from_bf16(numbers) if tensor["dtype"] == "BF16" else numbers


def _from_bf16(halves: NDArray[Any]) -> NDArray[Any]:
    """Return float32 numbers of which ``halves`` are the upper 16 bits."""
    return (halves.astype(np.uint32) << 16).view(np.float32)


#: Format (a file's suffix without the dot) -> its bytes to the matrix and whether its values are to be drawn.
READERS: dict[str, Callable[[Content], tuple[SparseMatrix, Values]]] = {
    "npz": _read_npz,
    "npy": lambda content: (_pruned(npy.parse(content), content), "stored"),  # a dense array; its zeros are pruned
    "mtx": _read_mtx,
    "safetensors": _read_weight,
    "smtx": lambda content: (matrix_text.read_smtx(content), "drawn"),
    "onnx": _read_weight,
    "pt": _read_weight,
}

#: Formats that hold several matrices.
MODELS = ("safetensors", "onnx", "pt")

_NAME_CHARACTERS = 200

#: Enough bytes to recognise a model.
_BEGINNING_BYTES = torch_file.BEGINNING_BYTES

_BEGINNINGS = {
    "pt": torch_file.BEGINNING,
    "npz": re.compile(rb"PK\x03\x04|PK\x05\x06"),
    "npy": re.compile(re.escape(npy.MAGIC)),
    "mtx": re.compile(rb"%%MatrixMarket", re.IGNORECASE),
    "safetensors": safetensors_file.BEGINNING,
    "smtx": re.compile(rb"-?\d+[ \t]*[, \t][ \t]*-?\d+[ \t]*[, \t][ \t]*-?\d+\s"),
    "onnx": onnx_file.BEGINNING,
}

#: Files that are not read, and what to do.
_FOREIGN = {
    re.compile(rb"PK\x03\x04.{26}[^/]{1,200}/data/", re.DOTALL): (
        "is a program of torch.jit or torch.export; load it and torch.save its state_dict()"
    ),
    re.compile(rb"\x80\x02\x8a\nl\xfc"): "is of PyTorch before 1.6, which torch.load still reads; torch.save it again",
    re.compile(rb"\x89HDF"): "is HDF5, as of Keras; save its weights as a .safetensors, or each as a .npy",
}

#: Types of weight tensors, and of their masks, and the NumPy type that their bytes are read as.
_FLOATS = {"F16": "<f2", "BF16": "<u2", "F32": "<f4", "F64": "<f8"}
_MASKS = {**_FLOATS, "BOOL": "?", "U8": "u1", "I8": "i1", "I32": "<i4", "I64": "<i8"}
#: Why a bias, or whatever else has fewer than two axes, gets no kernel.
VECTOR = "a vector: no kernel of its own"

_NO_WEIGHT = f"holds no weight: a weight is {', '.join(_FLOATS)}, 2-D to 4-D"


def _reader(content: Content, name: str, tensor: str | None) -> Callable[[Content], tuple[SparseMatrix, Values]]:
    """Return the reader for the content. Raises BadMatrix if the name claims another format."""
    for foreign in (said for beginning, said in _FOREIGN.items() if beginning.match(content)):
        raise BadMatrix(foreign)
    limit = settings().max_upload_bytes
    if len(content) > limit and not is_model(content):
        raise BadMatrix(f"is larger than the {limit} bytes that LOSPMM_MAX_UPLOAD_BYTES allows")
    if not content:
        raise BadMatrix("is empty (0 bytes)")
    claimed = PurePosixPath(name).suffix.lower().removeprefix(".")
    found = _kind(content)
    if found is None:
        known = ", ".join(f".{kind}" for kind in READERS)
        fault = f"does not begin as a .{claimed} file does" if claimed in READERS else f"is none of {known}"
        if name.endswith(".index.json"):
            raise BadMatrix("lists the shards of a model; name their folder, or send the shards themselves")
        raise BadMatrix(f"{fault}: its first bytes are {content[:12]!r}; is it whole, and saved in that format?")
    if claimed in READERS and claimed != found:
        raise BadMatrix(f"the name says .{claimed} but the content is .{found}; rename the file")
    if tensor is None:
        return READERS[found]
    if found not in MODELS:
        raise BadMatrix(f"tensor chooses from a .safetensors, .onnx or .pt file, this is .{found}; leave it out")
    return partial(_read_weight, tensor=tensor)


def _kind(content: Content) -> str | None:
    """Return the format that the bytes begin as, or None."""
    return next((kind for kind, beginning in _BEGINNINGS.items() if beginning.match(content)), None)


def _tensors(content: Content) -> dict[str, dict[str, Any]]:
    """Return dtype, shape and data of each tensor of a model by name."""
    tensors = _TENSORS_OF[_kind(content) or "safetensors"](content)
    if (wrong := next((name for name in tensors if not name.isprintable()), None)) is not None:
        raise BadMatrix(f"tensor name {wrong[:80]!r} holds a character that cannot be printed; rename the tensor")
    return _masked(tensors)


#: Format -> the tensors of a model.
_TENSORS_OF: dict[str, Callable[[Content], dict[str, dict[str, Any]]]] = {
    "safetensors": safetensors_file.tensors_of,
    "onnx": onnx_file.tensors_of,
    "pt": torch_file.tensors_of,
}


def _masked(tensors: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the tensors, of which ``fc.weight_orig`` and ``fc.weight_mask`` are ``fc.weight`` with a ``mask``.

    So ``torch.nn.utils.prune`` keeps a pruned parameter: their product is what the model multiplies by.
    """
    found = dict(tensors)
    for name, tensor in tensors.items():
        stem = name.removesuffix("_orig")
        mask = tensors.get(f"{stem}_mask")
        if stem == name or stem in tensors or mask is None:
            continue
        if mask["shape"] == tensor["shape"] and mask["dtype"] in _MASKS and tensor["dtype"] in _FLOATS:
            del found[name], found[f"{stem}_mask"]
            found[stem] = tensor | {"mask": mask}
    return found


def _is_weight(tensor: dict[str, Any]) -> bool:
    return tensor["dtype"] in _FLOATS and 2 <= len(tensor["shape"]) <= 4


def _why_no_weight(tensor: dict[str, Any]) -> str:
    if len(tensor["shape"]) < 2:
        return VECTOR
    takes = f"weights are {', '.join(_FLOATS)}, with 2 to 4 axes"
    return f"{tensor['dtype']} with {len(tensor['shape'])} axes: {takes}"


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(name[:80] for name in names[:20]) or "none"
    return shown if len(names) <= 20 else f"{shown} and {len(names) - 20} more"


def _pruned(weights: NDArray[Any], content: Content, decode: Decode = as_it_is) -> SparseMatrix:
    check_axes(weights.ndim)
    shape = check_shape(weights.shape)
    (rows, cols), values = nonzeros(weights, content, decode)
    return from_coo(shape, rows, cols, values)


def _draw(pattern: SparseMatrix, seed: int) -> SparseMatrix:
    """Return the pattern with nonzero values of a normal distribution, in canonical order."""
    values = np.random.default_rng(seed).standard_normal(pattern.nnz).astype(np.float32)
    values[values == 0] = 1.0
    values.setflags(write=False)
    return SparseMatrix(pattern.m, pattern.k, pattern.indptr, pattern.indices, values)


def _printable(name: str) -> str:
    """Return a name fit for a one-line message, shortened to its end."""
    end = name[-_NAME_CHARACTERS:]
    return end if end.isprintable() else repr(end)
