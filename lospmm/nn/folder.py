"""Kernels of a model in a folder: ``save`` and ``load_``, which reads those of ``lospmm tune-model`` too.

``model.json`` names the layers and, for each of their kernels, a folder beside it, which is named after the hash of its
code. It is written last and replaced in one step, and no kernel's folder is overwritten with other code: an interrupted
``save`` leaves the earlier model.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import Field, PositiveInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from torch import nn

from lospmm.artifact import artifact
from lospmm.errors import BadRequest, Unsupported
from lospmm.kernel import Kernel, path_of
from lospmm.matrix.layers import REPORT_FILE
from lospmm.model.report import LayerReport, read_report
from lospmm.nn.layer import call_parts, swap_in
from lospmm.nn.report import Report, Row
from lospmm.nn.site import Site, convolution_of, find_sites, forget_masks, freeable
from lospmm.nn.sparse import (
    ColumnBucket,
    Sparse,
    Tuned,
    bucket_of,
    check_model,
    least_columns,
    restore_,
    unlike,
)
from lospmm.nn.transpose import Shares

SCHEMA = 1
MODEL_FILE = "model.json"

#: Why a layer of ``tune-model`` stays dense.
LEFT_DENSE = "cuBLAS is faster than its kernel"

#: Digits of the code's sha256 in the name of a kernel's folder.
_DIGITS = 20


@dataclass(frozen=True)
class _KernelEntry:
    """Kernel in ``folder``, for calls of ``least`` columns or more."""

    folder: str
    least: PositiveInt


@dataclass(frozen=True)
class _LayerEntry:
    name: str
    features_first: bool
    shares: Shares
    kernels: Annotated[tuple[_KernelEntry, ...], Field(min_length=1)]
    frees_weight: bool = False
    dense_beyond: bool = False


@dataclass(frozen=True)
class _ModelEntry:
    schema: int
    layers: tuple[_LayerEntry, ...]


_MODEL = TypeAdapter(_ModelEntry)


def save(model: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Write the kernels of a tuned model to a folder, without its weights, which are in its state_dict.

    Raises BadRequest for a model without kernels or a folder with other content, ToolchainFault if writing fails.
    """
    check_model(model)
    folder = path_of(directory)
    tuned = [
        one for module in model.modules() if isinstance(module, Sparse) for one in module.lospmm_state.tuned.values()
    ]
    if not tuned:
        raise BadRequest("no layer of the model has kernels: sparsify_ it first, and see its report")
    if folder.is_dir() and any(folder.iterdir()) and not _is_model(folder / MODEL_FILE):
        raise BadRequest(f"{folder}: holds something other than a tuned model; name an empty or new folder")
    layers = []
    for one in tuned:
        entries = tuple(_written(bucket, folder) for bucket in one.buckets)
        how = one.frees_weight, one.dense_beyond
        layers.append(_LayerEntry(one.name, one.features_first, one.shares, entries, *how))
    artifact.write_file(folder / MODEL_FILE, json.dumps(asdict(_ModelEntry(SCHEMA, tuple(layers))), indent=2) + "\n")


def _written(bucket: ColumnBucket, folder: Path) -> _KernelEntry:
    digest = bucket.kernel.artifact.manifest["cubin_sha256"][:_DIGITS]
    name = f"{bucket.kernel.artifact.manifest['name']}-{digest}"
    if not _holds(folder / name, bucket.kernel):
        bucket.kernel.save(folder / name)
    return _KernelEntry(name, bucket.least)


def _holds(folder: Path, kernel: Kernel) -> bool:
    """Return whether the folder has all files of this kernel, unchanged."""
    try:
        return artifact.read(folder).files == kernel.artifact.files
    except BadRequest:
        return False


def _is_model(file: Path) -> bool:
    """Return whether ``save`` of any version wrote the file."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and {"schema", "layers"} <= content.keys()


def load_(model: nn.Module, directory: str | os.PathLike[str], *, emulate: bool = False) -> Report:
    """Run the layers of ``model`` on kernels that ``save`` or ``lospmm tune-model`` wrote; return a row for each.

    A layer whose weights, device or type do not fit its kernels stays dense, with the reason in its row, and so does
    one for which ``tune-model`` found cuBLAS faster, at the columns where it did. Kernels that share a cubin serve
    every call of their layer, whose weight leaves the GPU unless it is masked or shared. ``emulate`` runs the kernels'
    text for weights on a CPU. A kernel runs as native code: load only folders you trust.

    Raises BadRequest for a folder that neither wrote or that is damaged; the model is then unchanged.
    """
    check_model(model)
    folder = path_of(directory)
    is_batch = (folder / REPORT_FILE).exists() and not (folder / MODEL_FILE).exists()
    layers, kernels, dense = _of_batch(model, folder) if is_batch else _of_save(folder)
    restore_(model)
    sites, rows = find_sites(model, 0.0)
    by_name, freed = {site.name: site for site in sites}, freeable(model, sites)
    unfit = {row.layer: row.reason for row in rows}
    loaded: list[Row] = []
    for one in layers:
        site = by_name.get(one.name)
        if site is None:
            reason = unfit.get(one.name, "the model has no such layer")
            empty: dict[str, Any] = {"kind": "", "shape": (0, 0), "sparsity": None, "n": None, "advice": "dense"}
            loaded.append(Row(layer=one.name, reason=reason, **empty))
            continue
        own = replace(one, frees_weight=one.frees_weight and one.name in freed)
        loaded += _swapped(site, own, kernels, emulate=emulate)
    forget_masks(sites)
    call_parts(model)
    return Report((*loaded, *(by_name[name].row(LEFT_DENSE, n=n) for name, n in dense if name in by_name)))


#: Layers with kernels, the kernels by their folders, and layers that are left to cuBLAS, with the columns.
_Content: TypeAlias = tuple[Sequence[_LayerEntry], Mapping[str, Kernel], Sequence[tuple[str, int | None]]]


def _of_save(folder: Path) -> _Content:
    """Return what ``save`` wrote. Raises BadRequest."""
    layers = _read(folder).layers
    known: dict[bytes, bytes] = {}
    return layers, {entry.folder: _kernel(folder, entry, known) for one in layers for entry in one.kernels}, ()


def _of_batch(model: nn.Module, folder: Path) -> _Content:
    """Return what ``tune-model`` wrote, where a layer is named by its tensor. Raises BadRequest."""
    layers: dict[str, list[LayerReport]] = {}
    for row in read_report(folder).layers:
        layers.setdefault(row.name, []).append(row)
    known: dict[bytes, bytes] = {}
    entries, kernels, dense = [], {}, []
    for layer, rows in layers.items():
        name = type(model).__name__ if layer == "weight" else layer.removesuffix(".weight")
        dense += [(name, row.n) for row in rows if row.is_dense]
        chosen = [row.folder for row in rows if row.launch is not None and not row.is_dense]
        if own := {one: _read_kernel(folder / one, known) for one in chosen}:
            entries.append(_entry(name, own, dense_beyond=chosen[-1] != rows[-1].folder))
            kernels.update(own)
    return entries, kernels, dense


def _entry(name: str, kernels: Mapping[str, Kernel], *, dense_beyond: bool) -> _LayerEntry:
    """Return the entry of the kernels of a layer; those in one cubin (memory low) serve every call."""
    artifacts = {folder: kernel.artifact for folder, kernel in kernels.items()}
    is_joined = len(artifacts) > 1 == len({one.manifest["cubin_sha256"] for one in artifacts.values()})
    least = {
        folder: 1 if is_joined else least_columns(one.manifest["n"], one.convolution)
        for folder, one in artifacts.items()
    }
    found = tuple(_KernelEntry(folder, columns) for folder, columns in least.items())
    return _LayerEntry(name, False, "no", found, frees_weight=is_joined, dense_beyond=dense_beyond and not is_joined)


def _swapped(site: Site, entry: _LayerEntry, kernels: Mapping[str, Kernel], *, emulate: bool) -> list[Row]:
    try:
        buckets = tuple(_bucket(site, kernels[one.folder], one.least) for one in entry.kernels)
    except Unsupported as error:
        return [site.row(str(error))]
    reason = unlike(site.tensors, buckets, emulate=emulate)
    if reason is not None:
        return [site.row(reason)]
    how = emulate, entry.features_first, entry.shares
    tuned = Tuned(
        site.name, site.place, buckets, *how, frees_weight=entry.frees_weight, dense_beyond=entry.dense_beyond
    )
    swap_in(site.module, {site.weight: tuned})
    return [site.row("loaded", n=bucket.kernel.artifact.manifest["n"], advice="sparse") for bucket in buckets]


def _bucket(site: Site, kernel: Kernel, least: int) -> ColumnBucket:
    """Return the bucket of a kernel; raises Unsupported for a kernel of another kind of layer."""
    window = kernel.artifact.convolution
    if site.is_convolution != (window is not None):
        other = "convolution" if window else "product, not a convolution: tune with the table of `lospmm layers`"
        raise Unsupported(f"its kernels are for a {other}")
    if window is not None:
        shape = window.batch, window.channels, window.height, window.width
        if convolution_of(site, shape) != window:
            raise Unsupported("its kernels are for another window, stride, padding or dilation")
    has_bias = site.tensors.bias is not None
    return bucket_of(kernel, least, has_bias=has_bias, relu=site.relu, adds=site.adds)


def _read(folder: Path) -> _ModelEntry:
    file = folder / MODEL_FILE
    try:
        text = file.read_bytes()
    except OSError as error:
        raise BadRequest(
            f"{file}: cannot be read: {error.strerror}; name a folder that save or tune-model wrote"
        ) from None
    try:
        content = _MODEL.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise BadRequest(f"{file}: is damaged, or not that of a tuned model: {field}: {first['msg']}") from None
    if content.schema != SCHEMA:
        raise BadRequest(f"{file}: schema {content.schema}; this version reads {SCHEMA}; save the model again")
    return content


def _kernel(folder: Path, entry: _KernelEntry, known: dict[bytes, bytes]) -> Kernel:
    """Read a kernel; raises BadRequest for a folder elsewhere or a damaged one."""
    if Path(entry.folder).name != entry.folder:
        raise BadRequest(f"{folder / MODEL_FILE}: is damaged: {entry.folder[:80]!r} is not the name of a folder")
    return _read_kernel(folder / entry.folder, known)


def _read_kernel(folder: Path, known: dict[bytes, bytes]) -> Kernel:
    """Read a kernel whose files are in memory once with those of others, as A is of several N. Raises BadRequest."""
    found = artifact.read(folder)
    found.epilogue()  # raises BadRequest, while the model is unchanged
    return Kernel(replace(found, files={name: known.setdefault(one, one) for name, one in found.files.items()}))
