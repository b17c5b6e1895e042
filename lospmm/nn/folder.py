"""The kernels of a model in a folder: ``save`` and ``load_``.

``model.json`` names the layers and, for each of their kernels, a folder beside it, which is called after its code. It
is written last and replaced in one step, and no folder is ever written over by other code: a ``save`` that is stopped
leaves what was there before.
"""

import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PositiveInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from torch import nn

from lospmm.artifact import artifact
from lospmm.errors import BadRequest, ToolchainFault, Unsupported
from lospmm.kernel import Kernel, path_of
from lospmm.nn import layer
from lospmm.nn.bound import ColumnBucket, bias_in, difference, misfit
from lospmm.nn.choice import call_parts
from lospmm.nn.layer import Shares, Sparse, Tuned
from lospmm.nn.place import forget_mask
from lospmm.nn.report import Report, Row
from lospmm.nn.site import Site, convolution_of, find_sites
from lospmm.nn.sparsify import check_model, restore_

SCHEMA = 1
MODEL_FILE = "model.json"

#: Digits of the sha256 of a kernel's code that its folder is called after.
_DIGITS = 20


@dataclass(frozen=True)
class _KernelEntry:
    """A kernel in ``folder``, for calls of ``least`` columns or more: all else of a ``ColumnBucket`` is the
    kernel's."""

    folder: str
    least: PositiveInt


@dataclass(frozen=True)
class _LayerEntry:
    name: str
    features_first: bool
    shares: Shares
    kernels: Annotated[tuple[_KernelEntry, ...], Field(min_length=1)]


@dataclass(frozen=True)
class _ModelEntry:
    schema: int
    layers: tuple[_LayerEntry, ...]


_MODEL = TypeAdapter(_ModelEntry)


def save(model: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Write the kernels of a model that was tuned; its weights are its state_dict's.

    Raises BadRequest for a model without kernels or a folder that holds something else, ToolchainFault for the disk.
    """
    check_model(model)
    folder = path_of(directory)
    tuned = [
        one for module in model.modules() if isinstance(module, Sparse) for one in module.lospmm_state.tuned.values()
    ]
    if not tuned:
        raise BadRequest("no layer of the model has kernels: sparsify_ it first, and see its report")
    if folder.is_dir() and any(folder.iterdir()) and not _is_model(folder / MODEL_FILE):
        raise BadRequest(f"{folder}: holds something else than a tuned model; name an empty or a new folder")
    layers = []
    for one in tuned:
        entries = tuple(_written(bucket, folder) for bucket in one.buckets)
        layers.append(_LayerEntry(one.name, one.features_first, one.shares, entries))
    _replace(folder / MODEL_FILE, json.dumps(asdict(_ModelEntry(SCHEMA, tuple(layers))), indent=2) + "\n")


def _written(bucket: ColumnBucket, folder: Path) -> _KernelEntry:
    digest = bucket.kernel.artifact.manifest["cubin_sha256"][:_DIGITS]
    name = f"{bucket.kernel.artifact.manifest['name']}-{digest}"
    if not _holds(folder / name, bucket.kernel):
        bucket.kernel.save(folder / name)
    return _KernelEntry(name, bucket.least)


def _holds(folder: Path, kernel: Kernel) -> bool:
    """Whether a kernel's files are all there, and are its own."""
    try:
        return artifact.read(folder).files == kernel.artifact.files
    except BadRequest:
        return False


def _is_model(file: Path) -> bool:
    """Whether ``save`` wrote it, of this version or another one."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and {"schema", "layers"} <= content.keys()


def _replace(file: Path, text: str) -> None:
    scratch = file.with_name(f".{file.name}-{secrets.token_hex(8)}")
    try:
        scratch.write_text(text)
        scratch.replace(file)
    except OSError as error:
        raise ToolchainFault(f"{file}: cannot be written: {error.strerror}") from error
    finally:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)


def load_(model: nn.Module, directory: str | os.PathLike[str], *, emulate: bool = False) -> Report:
    """Have the layers of ``model`` run on the kernels that ``save`` wrote, in place and without tuning; a row for each.

    A layer whose weights, device or type do not fit stays dense, with the reason in its row. ``emulate`` runs the
    kernels' text where the weights are on a CPU. A kernel is code: load only folders that you trust.

    Raises BadRequest for a folder that is not one of ``save``, or is damaged; the model is then as it was.
    """
    check_model(model)
    folder = path_of(directory)
    content = _read(folder)
    kernels = {entry.folder: _kernel(folder, entry) for one in content.layers for entry in one.kernels}
    restore_(model)
    sites, rows = find_sites(model, 0.0)
    by_name = {site.name: site for site in sites}
    unfit = {row.layer: row.reason for row in rows}
    loaded: list[Row] = []
    for one in content.layers:
        site = by_name.get(one.name)
        if site is None:
            reason = unfit.get(one.name, "the model has no such layer")
            empty: dict[str, Any] = {"kind": "", "shape": (0, 0), "sparsity": None, "n": None, "advice": "dense"}
            loaded.append(Row(layer=one.name, reason=reason, **empty))
            continue
        loaded += _swapped(site, one, kernels, emulate=emulate)
    for site in sites:
        if not isinstance(site.module, Sparse):
            forget_mask(site.module, site.weight)
    call_parts(model)
    return Report(tuple(loaded))


def _swapped(site: Site, entry: _LayerEntry, kernels: Mapping[str, Kernel], *, emulate: bool) -> list[Row]:
    try:
        buckets = tuple(_bucket(site, kernels[one.folder], one.least) for one in entry.kernels)
    except Unsupported as error:
        return [site.row(str(error))]
    manifest = buckets[0].kernel.artifact.manifest
    reason = difference(site.tensors, manifest["fingerprint"], bias_in(buckets)) or misfit(
        site.tensors.weight, buckets, emulate=emulate
    )
    if reason is not None:
        return [site.row(reason)]
    tuned = Tuned(site.name, site.place, buckets, emulate, entry.features_first, entry.shares)
    layer.swap(site.module, {site.weight: tuned}, site.sparse)
    return [site.row("loaded", n=bucket.kernel.artifact.manifest["n"], advice="sparse") for bucket in buckets]


def _bucket(site: Site, kernel: Kernel, least: int) -> ColumnBucket:
    """Raises Unsupported where the kernel is not of such a layer, whatever its weights."""
    window = kernel.artifact.convolution
    if site.is_convolution != (window is not None):
        raise Unsupported(f"its kernels are those of a {'product' if window is None else 'convolution'}")
    if window is not None:
        shape = window.batch, window.channels, window.height, window.width
        if convolution_of(site, shape) != window:
            raise Unsupported("its kernels are those of another window, stride, padding or dilation")
    return site.bucket(kernel, least)


def _read(folder: Path) -> _ModelEntry:
    file = folder / MODEL_FILE
    try:
        text = file.read_bytes()
    except OSError as error:
        raise BadRequest(f"{file}: cannot be read: {error.strerror}; name a folder that save wrote") from None
    try:
        content = _MODEL.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise BadRequest(f"{file}: is damaged, or not that of a tuned model: {field}: {first['msg']}") from None
    if content.schema != SCHEMA:
        raise BadRequest(f"{file}: schema {content.schema}; this version reads {SCHEMA}; save the model again")
    return content


def _kernel(folder: Path, entry: _KernelEntry) -> Kernel:
    """Raises BadRequest for a folder elsewhere, or one that is damaged."""
    if Path(entry.folder).name != entry.folder:
        raise BadRequest(f"{folder / MODEL_FILE}: is damaged: {entry.folder[:80]!r} is not the name of a folder")
    kernel = Kernel(artifact.read(folder / entry.folder))
    kernel.artifact.epilogue()  # before the model is touched
    return kernel
