"""Kernels of a model in a folder: ``save`` and ``load_``, which reads those of ``lospmm tune-model`` too.

``model.json`` names the layers and, for each of their kernels, a folder beside it, which is named after the hash of its
code. It is written last and replaced in one step, and no kernel's folder is overwritten with other code: an interrupted
``save`` leaves the earlier model.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
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

#: Threads that read kernels and compare weights, each of which takes the memory of a layer.
_THREADS = 8

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
        entries: tuple[_KernelEntry, ...] = ()
        for bucket in one.buckets:
            entries += (_written(bucket, folder, like=folder / entries[0].folder if entries else None),)
        how = one.frees_weight, one.dense_beyond
        layers.append(_LayerEntry(one.name, one.features_first, one.shares, entries, *how))
    artifact.write_file(folder / MODEL_FILE, json.dumps(asdict(_ModelEntry(SCHEMA, tuple(layers))), indent=2) + "\n")


def _written(bucket: ColumnBucket, folder: Path, *, like: Path | None) -> _KernelEntry:
    """Write a kernel; files that are those of the kernel ``like`` take no more room."""
    digest = bucket.kernel.artifact.manifest["cubin_sha256"][:_DIGITS]
    name = f"{bucket.kernel.artifact.manifest['name']}-{digest}"
    if not _holds(folder / name, bucket.kernel):
        artifact.write(bucket.kernel.artifact, folder / name, like=like)
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

    with ThreadPoolExecutor(_THREADS) as threads:
        found = list(threads.map(partial(_fitted, by_name, freed, kernels, emulate), layers))
    loaded: list[Row] = []
    for one, tuned in zip(layers, found, strict=True):
        if isinstance(tuned, Tuned):
            site = by_name[one.name]
            swap_in(site.module, {site.weight: tuned})
            every = sorted(bucket.kernel.artifact.manifest["n"] for bucket in tuned.buckets)
            loaded += [site.row("loaded", n=n, advice="sparse") for n in every]
        elif one.name in by_name:
            loaded.append(by_name[one.name].row(tuned))
        else:
            empty: dict[str, Any] = {"kind": "", "shape": (0, 0), "sparsity": None, "n": None, "advice": "dense"}
            loaded.append(Row(layer=one.name, reason=unfit.get(one.name, tuned), **empty))
    forget_masks(sites)
    call_parts(model)
    return Report((*loaded, *(by_name[name].row(LEFT_DENSE, n=n) for name, n in dense if name in by_name)))


#: Layers with kernels, the kernels by their folders, and layers that are left to cuBLAS, with the columns.
_Content: TypeAlias = tuple[Sequence[_LayerEntry], Mapping[str, Kernel], Sequence[tuple[str, int | None]]]


def _of_save(folder: Path) -> _Content:
    """Return what ``save`` wrote. Raises BadRequest."""
    layers = _read(folder).layers
    names = dict.fromkeys(entry.folder for one in layers for entry in one.kernels)
    for name in names:
        if Path(name).name != name:
            raise BadRequest(f"{folder / MODEL_FILE}: is damaged: {name[:80]!r} is not the name of a folder")
    return layers, _kernels(folder, names), ()


def _of_batch(model: nn.Module, folder: Path) -> _Content:
    """Return what ``tune-model`` wrote, where a layer is named by its tensor. Raises BadRequest."""
    layers: dict[str, list[LayerReport]] = {}
    for row in read_report(folder).layers:
        layers.setdefault(row.name, []).append(row)
    entries, dense = [], []
    chosen = {
        layer: [row.folder for row in rows if row.launch is not None and not row.is_dense]
        for layer, rows in layers.items()
    }
    kernels = _kernels(folder, [one for own in chosen.values() for one in own])
    for layer, rows in layers.items():
        name = type(model).__name__ if layer == "weight" else layer.removesuffix(".weight")
        dense += [(name, row.n) for row in rows if row.is_dense]
        if own := {one: kernels[one] for one in chosen[layer]}:
            entries.append(_entry(name, own, dense_beyond=chosen[layer][-1] != rows[-1].folder))
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


def _fitted(
    sites: Mapping[str, Site], freed: Set[str], kernels: Mapping[str, Kernel], emulate: bool, entry: _LayerEntry
) -> Tuned | str:
    """Return the kernels of a layer, or why they do not fit it."""
    if (site := sites.get(entry.name)) is None:
        return "the model has no such layer"
    try:
        buckets = tuple(_bucket(site, kernels[one.folder], one.least) for one in entry.kernels)
    except Unsupported as error:
        return str(error)
    if (reason := unlike(site.tensors, buckets, emulate=emulate)) is not None:
        return reason
    how = emulate, entry.features_first, entry.shares
    frees, beyond = entry.frees_weight and entry.name in freed, entry.dense_beyond
    return Tuned(site.name, site.place, buckets, *how, frees_weight=frees, dense_beyond=beyond, versions=site.versions)


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


def _kernels(folder: Path, names: Iterable[str]) -> dict[str, Kernel]:
    """Read kernels by their folders' names; those of a layer may have one cubin. Raises BadRequest."""
    cubins: dict[str, bytes] = {}

    def read(name: str) -> tuple[str, Kernel]:
        found = artifact.read(folder / name, cubins)
        found.epilogue()  # raises BadRequest, while the model is unchanged
        return name, Kernel(found)

    with ThreadPoolExecutor(_THREADS) as threads:
        return dict(threads.map(read, names))
