"""Matrices as they are posted to the REST service: canonical, so that equal ones are the same bytes."""

import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from lospmm.errors import BadMatrix, BadRequest
from lospmm.matrix.csr import SparseMatrix
from lospmm.matrix.layers import LayerSource, check_names, folder_of, open_model
from lospmm.matrix.npz import write_npz
from lospmm.matrix.readers import MatrixFile, Values
from lospmm.model.layer_table import LayerTable, none_asked
from lospmm.problem.epilogue import epilogue_of
from lospmm.problem.weights import Weights, flattened, matrix_and_values

#: A model: the path of a ``.safetensors``, ``.onnx`` or ``.pt``, or of a folder of matrix files, one that is open, or
#: weights by their names.
ModelWeights: TypeAlias = str | os.PathLike[str] | LayerSource | Mapping[str, Weights]

#: Biases of layers by name; True: those that lie beside the weights of a model's file.
Biases: TypeAlias = bool | Mapping[str, Sequence[float] | NDArray[np.floating]]

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Upload:
    """A layer's matrix and bias as files to post."""

    layer: str
    file: tuple[str, bytes, str]  # as httpx2 takes it: its name, content and type
    fingerprint: str  # of the matrix
    bias: tuple[str, bytes, str] | None = None


@dataclass(frozen=True, slots=True)
class Uploads:
    """The layers of a model by name, in its order, or what is wrong with one."""

    name: str
    layers: Mapping[str, Upload | BadRequest]
    skipped: Mapping[str, str] = field(default_factory=dict)  # layers that are not posted, with the reasons


def upload_of(layer: str, matrix: SparseMatrix, values: Values) -> Upload:
    """Return the upload of a matrix.

    A pattern is posted as a pattern: the service draws the values, and its manifest says so.
    """
    suffix, content = ("smtx", _write_smtx(matrix)) if values == "drawn" else ("npz", write_npz(matrix))
    # The service takes the layer's name from that of the file.
    return Upload(layer, (f"{folder_of(layer)}.{suffix}", content, "application/octet-stream"), matrix.fingerprint)


def with_bias(upload: Upload, bias: Sequence[float] | NDArray[np.floating]) -> Upload:
    """Add a bias to an upload, as a ``.npy``.

    Raises BadRequest for anything but a row of finite numbers.
    """
    file = io.BytesIO()
    np.save(file, np.array(epilogue_of(bias, relu=False, residual=False).bias, np.float32))
    # The service takes the layer from the name of the file.
    name = f"{folder_of(upload.layer)}.npy"
    return replace(upload, bias=(name, file.getvalue(), "application/octet-stream"))


def table_of(uploads: Sequence[Upload], table: LayerTable) -> tuple[str, bytes, str]:
    """Return the layer table of some uploads as a file to post, its rows by the names of their files.

    Groups and transposes are in the matrices, and biases beside them.
    """
    rows = {
        folder_of(one.layer): replace(table.row_of(one.layer), groups=1, transpose=False, bias=False) for one in uploads
    }
    return "layers.json", LayerTable(rows).to_json().encode(), "application/json"


def read_uploads(model: ModelWeights, seed: int, biases: Biases, table: LayerTable) -> Uploads:
    """Read the layers of a model as uploads; those that ``table`` skips are not read.

    Raises BadMatrix where no layer can be read at all, BadRequest for wrong names and if all layers are skipped.
    """
    named = biases if isinstance(biases, Mapping) else {}
    uploads = _read(model, seed, table)
    if others := named.keys() - uploads.layers.keys():
        raise BadRequest(f"biases: the model has no layer {min(map(str, others))!r:.80}")
    layers = dict(uploads.layers)
    for name, bias in named.items():
        found = layers[name]
        layers[name] = found if isinstance(found, BadRequest) else _or_error(partial(with_bias, found, bias))
    if not layers:
        raise none_asked(*next(iter(uploads.skipped.items())))
    return replace(uploads, layers=layers)


def _read(model: ModelWeights, seed: int, table: LayerTable) -> Uploads:
    has_own = any(row.bias for row in table.rows.values())
    if isinstance(model, Mapping):
        if not model:
            raise BadRequest("the model has no layers")
        if wrong := [name for name in model if not isinstance(name, str)]:
            raise BadRequest(f"{wrong[0]!r:.80} is not the name of a layer: give texts")
        check_names(list(model))
        table.check_used(list(model))
        if has_own:
            raise BadRequest("biases: True takes those of a model's file; of weights by name, give biases by name too")
        skipped = table.skipped(list(model))
        named = {name: weights for name, weights in model.items() if name not in skipped}
        made = {name: _or_error(partial(_upload, name, own, table)) for name, own in named.items()}
        return _parted("model", made, skipped)
    opened = model if isinstance(model, LayerSource) else open_model(Path(model), seed=seed)
    if has_own:
        opened.check_biases()
    table.check_used([*opened.names, *opened.others])
    skipped = table.skipped(opened.names, opened.axes)
    layers = {
        name: _or_error(partial(_of_file, name, found, table))
        for name, found in opened.read([name for name in opened.names if name not in skipped])
    }
    return _parted(opened.name, layers, {**skipped, **opened.others})


def _parted(model: str, layers: Mapping[str, Upload | BadRequest | str], skipped: Mapping[str, str]) -> Uploads:
    """Return the uploads of a model, a part of whose ``layers`` may be reasons to skip them."""
    own = {name: one for name, one in layers.items() if not isinstance(one, str)}
    return Uploads(model, own, {name: one for name, one in layers.items() if isinstance(one, str)} | {**skipped})


def _or_error(make: Callable[[], Made]) -> Made | BadRequest:
    try:
        return make()
    except BadRequest as error:
        return error


def _of_file(name: str, file: MatrixFile | BadMatrix, table: LayerTable) -> Upload | str:
    """Return the upload of a layer, or why it is skipped. Raises BadRequest."""
    if (reason := table.why_unpruned(name, file)) is not None:
        return reason
    if isinstance(file, BadMatrix):
        raise file
    own = table.row_of(name).file(file)
    upload = upload_of(name, own.matrix, own.values)
    return upload if (bias := table.bias_of(name, file)) is None else with_bias(upload, bias)


def _upload(name: str, weights: Weights, table: LayerTable) -> Upload | str:
    row = table.row_of(name)
    file = MatrixFile(*matrix_and_values(flattened(weights, row.convolution, row.groups)), name)
    return _of_file(name, file, table)


def _write_smtx(matrix: SparseMatrix) -> bytes:
    lines = (
        f"{matrix.m}, {matrix.k}, {matrix.nnz}",
        " ".join(map(str, matrix.indptr.tolist())),
        " ".join(map(str, matrix.indices.tolist())),
    )
    return "".join(f"{line}\n" for line in lines).encode()
