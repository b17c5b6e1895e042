"""Models as jobs of the queue: one ``.safetensors`` with its weights, or one matrix file a layer.

A layer that cannot be read fails alone, with its name and a reason; equal layers are one kernel.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePosixPath

from starlette.datastructures import UploadFile

from lospmm.errors import BadMatrix, BadRequest, printable
from lospmm.matrix import readers
from lospmm.matrix.mapped import Content, content_of
from lospmm.matrix.readers import MatrixFile
from lospmm.problem.epilogue import check_rows
from lospmm.tuning.request import Request
from lospmm_server.problems import describe
from lospmm_server.queue import KernelOrder, Layer, ModelOrder
from lospmm_server.schemas import ModelQuery
from lospmm_server.uploads import BIAS_FIELD, FIELD, MAX_LAYERS, Received, WantedKernel, bias_of, wanted_of

#: The most characters of a model's name and of a weight's in the tables.
NAME_CHARACTERS, WEIGHT_CHARACTERS = 200, 1000

#: A layer's name, and its matrix or what is wrong with it.
Read = tuple[str, MatrixFile | BadMatrix]


def read_model(files: Received, query: ModelQuery, order: Callable[[Request], KernelOrder]) -> ModelOrder:
    """Return the model with an ``order`` for each readable layer; one matrix is in memory at a time.

    Raises BadMatrix if no layer can be read; BadRequest and Unsupported for the rest of the request, such as biases
    when no layer has one.
    """
    wanted, biases = wanted_of(query), _by_layer(files)
    layers: list[Layer] = []
    first: BadRequest | None = None
    lacks_biases = query.biases and not biases
    for name, found in _read(files.matrices, query.seed):
        if len(layers) == MAX_LAYERS:
            raise BadRequest(f"more than {MAX_LAYERS} layers; post the model in parts")
        if len(name) > WEIGHT_CHARACTERS:
            raise BadRequest(
                f"the name of a weight, {name[:80]!r}..., has {len(name)} characters; at most {WEIGHT_CHARACTERS}"
            )
        if isinstance(found, BadMatrix):
            first = first or found
            layers.append(Layer(name, None, describe(found)))
        else:
            lacks_biases &= found.beside is None
            request = _request(found, wanted, biases.get(name), has_own=query.biases)
            if isinstance(request, BadRequest):
                first = first or request
                layers.append(Layer(name, None, describe(request)))
            else:
                layers.append(Layer(name, order(request)))
    if first is not None and all(layer.order is None for layer in layers):
        raise first
    if lacks_biases:
        raise readers.no_biases([layer.name for layer in layers])
    name = query.name or _stem(files.matrices[0].filename or "model")
    return ModelOrder(_id(name, layers), printable(name)[:NAME_CHARACTERS], wanted.n, wanted.device.name, layers)


def _by_layer(files: Received) -> dict[str, UploadFile]:
    """Return the bias of each layer that has one. Raises BadRequest for one without its matrix file."""
    biases = {_stem(upload.filename or BIAS_FIELD): upload for upload in files.biases}
    first = files.matrices[0]
    is_one_file = len(files.matrices) == 1 and files.biases and readers.is_model(content_of(first.file))
    names = set() if is_one_file else {_stem(upload.filename or FIELD) for upload in files.matrices}
    if len(biases) < len(files.biases):
        raise BadRequest("two biases are of one layer: a bias is called as its matrix file is, fc1.npy of fc1.npz")
    if others := biases.keys() - names:
        raise BadRequest(
            f"bias {min(others)!r}: no matrix file is called so; a bias is called as its matrix file is, fc1.npy of "
            "fc1.npz, and those of a .safetensors are taken with biases=true"
        )
    return biases


def _request(
    found: MatrixFile, wanted: WantedKernel, bias: UploadFile | None, *, has_own: bool
) -> Request | BadRequest:
    """Return a layer's request, or why it cannot be tuned, as with a wrong convolution, type or bias.

    ``bias`` is the layer's, or if it ``has_own`` that of its file. Raises BadRequest for parameters that no layer can
    have.
    """
    try:
        if bias is not None:
            wanted = wanted.with_bias(bias_of(bias))
        elif has_own and (own := found.bias) is not None:
            wanted = wanted.with_bias(own)
        check_rows(wanted.epilogue, found.matrix.m)
    except BadRequest as error:
        return error
    try:
        return wanted.request(found)
    except BadMatrix as error:
        return error
    except BadRequest as error:
        if wanted.convolution is None or wanted.convolution.k == found.matrix.k:
            raise
        return error


def _read(uploads: Sequence[UploadFile], seed: int) -> Iterator[Read]:
    """Yield the layers' matrices. Raises BadMatrix for an unreadable model, BadRequest for equal names."""
    content = content_of(uploads[0].file)
    if len(uploads) == 1 and readers.is_model(content):
        yield from readers.read_model(content, uploads[0].filename or FIELD)
        return
    names = [_stem(upload.filename or FIELD) for upload in uploads]
    if twice := {name for name in names if names.count(name) > 1}:
        raise BadRequest(f"two files are called {min(twice)!r}: a layer is named by its file")
    for position, (name, upload) in enumerate(zip(names, uploads, strict=True)):
        yield name, _matrix(content_of(upload.file) if position else content, upload.filename or FIELD, seed)


def _matrix(content: Content, name: str, seed: int) -> MatrixFile | BadMatrix:
    try:
        return readers.read_bytes(content, name, seed=seed)
    except BadMatrix as error:
        return error


def _stem(file: str) -> str:
    """Return a file's name without its folder and suffix, on one line."""
    name = PurePosixPath(file.replace("\\", "/")).stem or "layer"
    return "".join(char if char.isprintable() else "?" for char in name)[-NAME_CHARACTERS:]


def _id(name: str, layers: Sequence[Layer]) -> str:
    """Return a model's id: the same model posted again is the same job."""
    content = [[layer.name, layer.order.digest if layer.order else None] for layer in layers]
    return hashlib.sha256(json.dumps(["lospmm-model-1", name, content]).encode()).hexdigest()
