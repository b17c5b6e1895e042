"""Models as jobs of the queue: one ``.safetensors``, ``.onnx`` or ``.pt`` with its weights, or one matrix file a layer.

A layer that cannot be read fails alone, with its name and a reason; equal layers are one kernel.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from starlette.datastructures import UploadFile

from lospmm.errors import BadMatrix, BadRequest, printable
from lospmm.matrix import readers
from lospmm.matrix.mapped import Content, content_of
from lospmm.matrix.readers import MatrixFile, ModelTensors
from lospmm.model.layer_table import (
    ANY,
    LayerKernel,
    LayerSpec,
    LayerTable,
    columns_in,
    keys_given,
    none_asked,
    parse_table,
)
from lospmm.problem.device import DeviceSpec
from lospmm.problem.epilogue import check_rows, epilogue_of
from lospmm.settings import settings
from lospmm.tuning.options import Options
from lospmm.tuning.request import Request
from lospmm_server.problems import describe
from lospmm_server.queue import KernelOrder, Layer, ModelOrder
from lospmm_server.schemas import ModelQuery
from lospmm_server.uploads import (
    BIAS_FIELD,
    FIELD,
    MAX_LAYERS,
    NAME_CHARACTERS,
    TABLE_FIELD,
    Received,
    bias_of,
    check_n,
    device_of,
    options_of,
    row_keys,
    stem_of,
)

#: The most characters of a weight's name in the tables.
WEIGHT_CHARACTERS = 1000

#: The most characters of the reason for which a layer is skipped.
REASON_CHARACTERS = 1000

#: A layer's name, and its matrix, what is wrong with it, or why it is skipped.
Read = tuple[str, MatrixFile | BadMatrix | str]


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A request for kernels of a model, without its matrices."""

    table: LayerTable
    device: DeviceSpec
    options: Options
    seed: int


def read_model(files: Received, query: ModelQuery, order: Callable[[Request], KernelOrder], *, team: str) -> ModelOrder:
    """Return the model of a team with an ``order`` for each readable layer; one matrix is in memory at a time.

    Raises BadMatrix if no layer can be read; BadRequest and Unsupported for the rest of the request, such as biases
    when no layer has one.
    """
    table = replace(_table(files.table, query), min_sparsity=query.min_sparsity)
    wanted = _Wanted(table, device_of(query), options_of(query), query.seed)
    biases = _by_layer(files)
    layers: list[Layer] = []
    first: BadRequest | None = None
    lacks_biases = query.biases and not biases
    for name, found in _read(files.matrices, query.seed, wanted.table):
        if len(name) > WEIGHT_CHARACTERS:
            raise BadRequest(
                f"the name of a weight, {name[:80]!r}..., has {len(name)} characters; at most {WEIGHT_CHARACTERS}"
            )
        lacks_biases &= not isinstance(found, MatrixFile) or found.beside is None
        for asked in _asked(name, found, wanted, biases.get(name)):
            if len(layers) == MAX_LAYERS:
                raise BadRequest(f"more than {MAX_LAYERS} layers, or their kernels; post the model in parts")
            if isinstance(asked, str):
                layers.append(Layer(name, None, skipped=asked[:REASON_CHARACTERS]))
            elif isinstance(asked, BadRequest):
                first = first or asked
                layers.append(Layer(name, None, describe(asked)))
            else:
                layers.append(Layer(name, order(asked)))
    wanted.table.check_used([layer.name for layer in layers])
    if all(layer.order is None for layer in layers):
        raise first or none_asked(layers[0].name, str(layers[0].skipped))
    if lacks_biases:
        raise readers.no_biases([layer.name for layer in layers if layer.skipped is None])
    name = query.name or stem_of(files.matrices[0].filename or "model")
    n = wanted.table.n or 0
    return ModelOrder(_id(name, layers, team), printable(name)[:NAME_CHARACTERS], n, wanted.device.name, layers)


def _by_layer(files: Received) -> dict[str, UploadFile]:
    """Return the bias of each layer that has one. Raises BadRequest for one without its matrix file."""
    biases = {stem_of(upload.filename or BIAS_FIELD): upload for upload in files.biases}
    first = files.matrices[0]
    is_one_file = len(files.matrices) == 1 and files.biases and readers.is_model(content_of(first.file))
    names = set() if is_one_file else {stem_of(upload.filename or FIELD) for upload in files.matrices}
    if len(biases) < len(files.biases):
        raise BadRequest("two biases are of one layer: a bias is called as its matrix file is, fc1.npy of fc1.npz")
    if others := biases.keys() - names:
        raise BadRequest(
            f"bias {min(others)!r}: no matrix file is called so; a bias is called as its matrix file is, fc1.npy of "
            "fc1.npz, and those of a model's file are taken with biases=true"
        )
    return biases


def _table(upload: UploadFile | None, query: ModelQuery) -> LayerTable:
    """Return the layer table that was posted, or that of a query for all layers. Raises BadRequest."""
    own = row_keys(query) | {"bias": query.biases}
    if upload is None and query.n is None and query.conv is None:
        raise BadRequest("n is missing: give n, conv or a layer table")
    if query.n is not None:
        own["n"] = columns_in(query.n)
    if upload is None:
        table = LayerTable({ANY: LayerSpec(**own)})
    elif given := keys_given(own):
        raise BadRequest(f"{TABLE_FIELD} says these of each layer: leave out {', '.join(given)}")
    else:
        table = parse_table(bytes(content_of(upload.file)), printable(upload.filename or TABLE_FIELD)[:80])
    for row in table.rows.values():
        if row.skip is None:
            check_n(row.columns)
    return table


def _asked(
    name: str, found: MatrixFile | BadMatrix | str, wanted: _Wanted, bias: UploadFile | None
) -> Iterator[Request | BadRequest | str]:
    """Yield the request for each kernel of a layer, what is wrong with it, or why the layer is skipped."""
    if isinstance(found, str):
        yield found
        return
    if (reason := wanted.table.why_unpruned(name, found)) is not None:
        yield reason
        return
    for kernel in wanted.table.kernels_of(name):
        yield found if isinstance(found, BadMatrix) else _request(kernel, found, wanted, bias)


def _request(kernel: LayerKernel, found: MatrixFile, wanted: _Wanted, bias: UploadFile | None) -> Request | BadRequest:
    """Return a kernel's request, or why it cannot be tuned, as with a wrong convolution, type or bias.

    ``bias`` was posted beside it. Raises BadRequest for parameters that no layer can have.
    """
    name, row = kernel.layer, kernel.row
    try:
        own = wanted.table.bias_of(name, found) if bias is None else bias_of(bias)
        shape = row.file(found).matrix
        check_rows(epilogue_of(own, relu=row.relu, residual=row.residual), shape.m, shape.k)
    except BadRequest as error:
        return error
    try:
        request = row.request(found, own, wanted.device, wanted.options, wanted.seed)
        return request.settled(settings().worker_gpu)
    except BadMatrix as error:
        return error
    except BadRequest as error:
        if name in wanted.table.rows or (row.convolution is not None and row.convolution.k != found.matrix.k):
            return error
        raise


def _read(uploads: Sequence[UploadFile], seed: int, table: LayerTable) -> Iterator[Read]:
    """Yield the layers' matrices, and last what is no weight.

    Raises BadMatrix for an unreadable model that is alone, BadRequest for equal names.
    """
    parts = [(upload, _held(upload, is_alone=len(uploads) == 1)) for upload in uploads]
    names = Counter(name for upload, held in parts for name in _layers(upload, held))
    if twice := [name for name, times in names.items() if times > 1]:
        raise BadRequest(f"two layers are called {min(twice)!r}: a layer is named by its weight or file")
    for upload, held in parts:
        content, file = content_of(upload.file), upload.filename or FIELD
        skipped = table.skipped(_layers(upload, held), held.axes if held else {})
        read = iter(()) if held is None else readers.read_model(content, file, held.weights.keys() - skipped)
        for name in _layers(upload, held):
            if name in skipped:
                yield name, skipped[name]
            else:
                yield next(read, None) or (name, _matrix(content, file, seed))
    for _, held in parts:
        yield from held.others.items() if held else ()


def _held(upload: UploadFile, *, is_alone: bool) -> ModelTensors | None:
    """Return the tensors of a model's file, None of one that is a single layer. Raises as ``_read``."""
    content, file = content_of(upload.file), upload.filename or FIELD
    try:
        return readers.tensors_of_model(content, file) if readers.is_model(content) else None
    except BadMatrix:
        if is_alone:
            raise
        return None  # reading it as a layer says why


def _layers(upload: UploadFile, held: ModelTensors | None) -> list[str]:
    return [stem_of(upload.filename or FIELD)] if held is None else list(held.weights)


def _matrix(content: Content, name: str, seed: int) -> MatrixFile | BadMatrix:
    try:
        return readers.read_bytes(content, name, seed=seed)
    except BadMatrix as error:
        return error


def _id(name: str, layers: Sequence[Layer], team: str) -> str:
    """Return a model's id: the same model posted again by its team is the same job."""
    content = [[layer.name, layer.order.digest if layer.order else None] for layer in layers]
    return hashlib.sha256(json.dumps(["lospmm-model-1", name, content, *([team] if team else ())]).encode()).hexdigest()
