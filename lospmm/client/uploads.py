"""Matrices as they are posted to the REST service: canonical, so that equal ones are the same bytes."""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lospmm.errors import BadMatrix, BadRequest
from lospmm.matrix.csr import SparseMatrix
from lospmm.matrix.layers import Found, LayerSource, check_names, folder_of, open_model
from lospmm.matrix.npz import write_npz
from lospmm.matrix.readers import Values
from lospmm.model.layer_table import LayerTable, none_asked
from lospmm.problem.epilogue import epilogue_of
from lospmm.problem.weights import Weights, file_of, flattened

#: A model: the path of a ``.safetensors``, ``.onnx`` or ``.pt``, or of a folder of matrix files, one that is open, or
#: weights by their names.
ModelWeights: TypeAlias = str | os.PathLike[str] | LayerSource | Mapping[str, Weights]

#: A bias, (m,).
Numbers: TypeAlias = Sequence[float] | NDArray[np.floating]

#: Biases of layers by name; True: those that lie beside the weights of a model's file.
Biases: TypeAlias = bool | Mapping[str, Numbers]

BINARY = "application/octet-stream"


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
    skipped: Mapping[str, str]  # layers that are not posted, with the reasons


def upload_of(layer: str, matrix: SparseMatrix, values: Values, bias: Numbers | None = None) -> Upload:
    """Return the upload of a matrix, and of a bias as a ``.npy``.

    A pattern is posted as a pattern: the service draws the values, and its manifest says so. Raises BadRequest for a
    bias that is no row of finite numbers.
    """
    suffix, content = ("smtx", _write_smtx(matrix)) if values == "drawn" else ("npz", write_npz(matrix))
    name = folder_of(layer)  # from which the service takes the layer's
    numbers = epilogue_of(bias, relu=False, residual=False).bias_file
    added = None if numbers is None else (f"{name}.npy", numbers, BINARY)
    return Upload(layer, (f"{name}.{suffix}", content, BINARY), matrix.fingerprint, added)


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
    opened = _opened(model, seed, table)
    if any(row.bias for row in table.rows.values()):
        if isinstance(model, Mapping):
            raise BadRequest("biases: True takes those of a model's file; of weights by name, give biases by name too")
        opened.check_biases()
    table.check_used([*opened.names, *opened.others])
    skipped = table.skipped(opened.names, opened.axes)
    read = opened.read([name for name in opened.names if name not in skipped])
    found = {name: _upload_of(name, file, table, named.get(name)) for name, file in read}
    layers = {name: one for name, one in found.items() if not isinstance(one, str)}
    reasons = {name: one for name, one in found.items() if isinstance(one, str)} | skipped | dict(opened.others)
    if others := named.keys() - layers.keys():
        raise BadRequest(f"biases: the model has no layer {min(map(str, others))!r:.80}")
    if not layers:
        raise none_asked(*next(iter(reasons.items())))
    return Uploads(opened.name, layers, reasons)


def _opened(model: ModelWeights, seed: int, table: LayerTable) -> LayerSource:
    """Open a model, or weights by name, of which those of a convolution may have its axes."""
    if isinstance(model, LayerSource):
        return model
    if not isinstance(model, Mapping):
        return open_model(Path(model), seed=seed)
    if not model:
        raise BadRequest("the model has no layers")
    if wrong := [name for name in model if not isinstance(name, str)]:
        raise BadRequest(f"{wrong[0]!r:.80} is not the name of a layer: give texts")
    check_names(list(model))

    def read(wanted: Collection[str]) -> Iterator[tuple[str, Found]]:
        for name in wanted:
            row = table.row_of(name)
            try:
                yield name, file_of(flattened(model[name], row.convolution, row.groups), name=name)
            except BadMatrix as error:
                yield name, error

    return LayerSource("model", tuple(model), read)


def _upload_of(name: str, file: Found, table: LayerTable, bias: Numbers | None) -> Upload | BadRequest | str:
    """Return the upload of a layer with this bias or that of its file, what is wrong with it, or why it is skipped."""
    if (reason := table.why_unpruned(name, file)) is not None:
        return reason
    if isinstance(file, BadMatrix):
        return file
    try:
        own = table.row_of(name).file(file)
        return upload_of(name, own.matrix, own.values, table.bias_of(name, file) if bias is None else bias)
    except BadRequest as error:
        return error


def _write_smtx(matrix: SparseMatrix) -> bytes:
    lines = (
        f"{matrix.m}, {matrix.k}, {matrix.nnz}",
        " ".join(map(str, matrix.indptr.tolist())),
        " ".join(map(str, matrix.indices.tolist())),
    )
    return "".join(f"{line}\n" for line in lines).encode()
