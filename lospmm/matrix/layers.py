"""The layers of a model: their names, their folders, and their matrices, one in memory at a time.

A model is a ``.safetensors``, ``.onnx`` or ``.pt``, each 2-D to 4-D weight of which is a layer, or a folder of matrix
files, each of which is a layer (of a model in it, each weight is one).
"""

import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lospmm.errors import BadMatrix, BadRequest, printable, system_errors
from lospmm.matrix import readers
from lospmm.matrix.readers import READERS, MatrixFile

#: A layer's matrix, or what is wrong with it.
Found = MatrixFile | BadMatrix

#: Layer names that are used as folder names unchanged: no leading dot, no slash, not too long.
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")

#: Files in a model's folder beside its layers.
REPORT_FILE = "report.json"
KERNELS_FILE = "kernels.tsv"

#: Of any other name: characters that are kept readable, and digits of its digest.
_READABLE_CHARACTERS, _DIGITS = 60, 16


@dataclass(frozen=True, slots=True)
class LayerSource:
    """The layers of a model; ``read`` yields those of the names that it is given, in the order of ``names``.

    ``others`` are the tensors of a model's file that are no layers, with the reasons; ``has_biases`` says whether
    a bias of any layer is among them. ``axes`` are how many each weight of a model's file has.
    """

    name: str
    names: tuple[str, ...]
    read: Callable[[Collection[str]], Iterator[tuple[str, Found]]]
    others: Mapping[str, str] = field(default_factory=dict)
    has_biases: bool = False
    axes: Mapping[str, int] = field(default_factory=dict)

    def check_biases(self) -> None:
        """Raise BadRequest if no layer has a bias that could be added."""
        if not self.has_biases:
            raise readers.no_biases(self.names)


def open_model(path: Path, *, seed: int = 0) -> LayerSource:
    """Open the model in a file or a folder; ``seed`` draws the values of matrices that are patterns only.

    Raises BadMatrix if it cannot be read or holds no layer, BadRequest if two layers share a name or a folder.
    """
    parts = [_part(file, seed) for file in _files(path)] if path.is_dir() else [_weights(path)]
    names = tuple(name for part in parts for name in part.names)

    def read(wanted: Collection[str]) -> Iterator[tuple[str, Found]]:
        for part in parts:
            if own := [name for name in part.names if name in wanted]:
                yield from part.read(own)

    check_names(names)
    resolved = path.resolve()
    return LayerSource(
        printable(resolved.name if path.is_dir() else resolved.stem) or "model",
        names,
        read,
        {name: reason for part in parts for name, reason in part.others.items()},
        any(part.has_biases for part in parts),
        {name: axes for part in parts for name, axes in part.axes.items()},
    )


def check_names(names: Sequence[str]) -> None:
    """Raise BadRequest if two layers have the same name or would share a folder."""
    owners: dict[str, str] = {}
    for name in names:
        folder = folder_of(name).lower()  # some file systems make no difference
        if (other := owners.get(folder)) == name:
            raise BadRequest(f"two layers are called {name[:80]!r}: a layer is named by its weight or file; rename one")
        if other is not None:
            raise BadRequest(f"layers {other[:80]!r} and {name[:80]!r} would have the same folder; rename one")
        owners[folder] = name


def kernel_name(layer: str, n: int | None) -> str:
    """Return the name of a layer's kernel: the layer's; with ``n``, of a layer that has kernels for several N, both."""
    return layer if n is None else f"{layer}@{n}"


def folder_of(name: str, n: int | None = None) -> str:
    """Return the folder of a layer within the model's: its name, or a safe form of it with a digest.

    A name always gives the same folder: one part of a path, not hidden. ``check_names`` finds collisions. With ``n``
    it is that of one of a layer's kernels, as in ``kernel_name``; no layer's folder has an @.
    """
    if n is not None:
        return kernel_name(folder_of(name), n)
    if _PLAIN.fullmatch(name) and name.lower() not in (REPORT_FILE, KERNELS_FILE):
        return name
    readable = re.sub(r"[^A-Za-z0-9._-]+", "_", name[:_READABLE_CHARACTERS]).lstrip(".-")
    return f"{readable or 'layer'}-{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()[:_DIGITS]}"


def _files(path: Path) -> list[Path]:
    with system_errors(BadMatrix, f"{path}: cannot be read"):
        found = [file for file in path.iterdir() if _is_matrix(file)]
    if not found:
        kinds = ", ".join(f".{kind}" for kind in READERS)
        raise BadMatrix(f"{path}: no matrix file lies in this folder: {kinds}; name a .bin, .pth or .ckpt itself")
    return sorted(found, key=lambda file: (readers.natural(file.stem), file.name))


def _text(name: str) -> str:
    """Return a file's name, with bytes that are not text escaped."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return printable(name)
    return name


def _is_matrix(file: Path) -> bool:
    return file.suffix.lower().removeprefix(".") in READERS and not file.name.startswith(".") and not file.is_dir()


def _part(file: Path, seed: int) -> LayerSource:
    """Return the layers of one file. A file that is a single layer is read only when its turn comes."""
    if file.suffix.lower().removeprefix(".") not in readers.MODELS:
        name = _text(file.stem)
        return LayerSource(file.name, (name,), lambda _: iter([(name, _matrix(file, seed))]))
    try:
        return _weights(file)
    except BadMatrix as error:
        wrong = error
    return LayerSource(file.name, (file.stem,), lambda _: iter([(file.stem, wrong)]))


def _weights(file: Path) -> LayerSource:
    """Return the layers of a model's file. Raises BadMatrix."""
    held = readers.tensors_of_model(readers.content_of_path(file), file.name)
    return LayerSource(
        file.name,
        tuple(held.weights),
        lambda wanted: readers.read_model(readers.content_of_path(file), file.name, wanted),
        held.others,
        any(held.weights.values()),
        held.axes,
    )


def _matrix(file: Path, seed: int) -> Found:
    try:
        return readers.read(file, seed=seed)
    except BadMatrix as error:
        return error
