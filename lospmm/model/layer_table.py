"""A layer table: what each layer of a model is multiplied by, and its options, by the name of its weight.

A file in TOML (or the same in JSON)::

    [layers."conv1.weight"]
    conv = "32x3x224x224,7x7,stride=2,padding=3"
    bias = true

    [layers."encoder.*.weight"]
    n = 4096
    dtype = "float16"

    [layers."embedding.weight"]
    skip = "looked up, not multiplied"

A name may be a pattern (``*``, ``?``, ``[abc]``). A layer's own row comes first, then the first pattern that fits.
With several numbers of columns, ``n = [1, 8, 512]``, a layer has a kernel for each.
"""

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, TypeAdapter, ValidationError

from lospmm.errors import BadMatrix, BadRequest, printable, system_errors
from lospmm.matrix.csr import block_diagonal
from lospmm.matrix.layers import folder_of, kernel_name
from lospmm.matrix.limit import MIN_SPARSITY, check_limit, is_few, too_few
from lospmm.matrix.readers import MatrixFile
from lospmm.problem.convolution import Convolution, parse_convolution
from lospmm.problem.device import DeviceSpec
from lospmm.problem.epilogue import check_rows, epilogue_of
from lospmm.problem.problem import Problem, check_columns, columns_of
from lospmm.tuning.options import Options
from lospmm.tuning.request import Request

#: A bias, (m,), if there is one.
Bias: TypeAlias = NDArray[np.floating] | None

#: The row of all layers, of a request without a table.
ANY = "*"

#: Why a weight with three axes is skipped.
NO_WINDOW = (
    'it has 3 axes: as of nn.Conv1d it needs a row like conv = "8x64x1x1000,1x3" in a layer table '
    "(batch x channels x 1 x length, 1 x width of the window)"
)

#: The largest file of a table, in bytes.
MAX_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """A row: ``n`` columns of B, one or several, or a convolution (as of ``--conv``), or why the layer is skipped.

    ``groups`` are a convolution's; ``transpose`` takes weights that are held in x out; ``bias`` adds the one beside the
    weight; ``dtype``, ``sums`` and ``families`` are those of the request unless given. Raises BadRequest.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    n: int | tuple[int, ...] | None = None
    conv: str | None = None
    groups: int = 1
    transpose: bool = False
    bias: bool = False
    relu: bool = False
    residual: bool = False
    dtype: str | None = None
    sums: str | None = None
    families: str | None = None
    skip: str | None = None

    def __post_init__(self) -> None:
        if self.skip is not None:
            return
        for row in self.each:
            check_columns(row.columns)
        if isinstance(self.n, tuple):
            if not self.n:
                raise BadRequest("n is empty: give the number of columns of B, or several")
            if self.conv is not None:
                raise BadRequest("n has several values; a convolution's follows from its window")
            one, *more = sorted(set(self.n))
            object.__setattr__(self, "n", (one, *more) if more else one)
        if self.groups < 1 or (self.groups > 1 and self.conv is None):
            raise BadRequest(f"groups is {self.groups}: at least 1, and more only with conv")
        if self.transpose and self.conv is not None:
            raise BadRequest("transpose goes with n alone: a convolution's weights are out x in x height x width")
        self.options(Options())

    @property
    def given(self) -> dict[str, Any]:
        """What is not as by default, by its key."""
        values = ((field, getattr(self, field.name)) for field in fields(self))
        return {field.name: value for field, value in values if value != field.default}

    @property
    def convolution(self) -> Convolution | None:
        """The convolution, if it is one."""
        return None if self.conv is None else parse_convolution(self.conv)

    @property
    def columns(self) -> int:
        """Columns of B; the most of several."""
        return max(self.n) if isinstance(self.n, tuple) else columns_of(self.n, self.convolution)

    @property
    def each(self) -> tuple["LayerSpec", ...]:
        """The row of each kernel, with one number of columns, ascending."""
        return tuple(replace(self, n=n) for n in self.n) if isinstance(self.n, tuple) else (self,)

    def options(self, options: Options) -> Options:
        """Return ``options`` with those of the row. Raises BadRequest."""
        own = {name: getattr(self, name) for name in ("dtype", "sums", "families")}
        return replace(options, **{name: value for name, value in own.items() if value is not None})

    def request(self, file: MatrixFile, bias: Bias, gpu: DeviceSpec, options: Options, seed: int) -> Request:
        """Return the request for the kernel of a layer on ``gpu``. Raises BadRequest, BadMatrix, Unsupported."""
        epilogue = epilogue_of(bias, relu=self.relu, residual=self.residual)
        problem = Problem(self.file(file).matrix, self.columns, gpu, self.convolution, epilogue)
        return Request(problem, self.options(options), file.values, seed)

    def file(self, file: MatrixFile) -> MatrixFile:
        """Return the file with A: transposed, or with each group beside the one before. Raises BadRequest."""
        if file.matrix.m % self.groups:
            raise BadMatrix(f"{file.matrix.m} rows are no multiple of groups = {self.groups}")
        if self.transpose:
            return file.transposed()
        matrix, beside = file.matrix, file.beside
        if self.conv is None and isinstance(beside, np.ndarray) and len(beside) == matrix.k != matrix.m:
            check_rows(epilogue_of(beside, relu=False, residual=False), matrix.m, matrix.k)  # added or not
        return replace(file, matrix=block_diagonal(matrix, self.groups))


@dataclass(frozen=True, slots=True)
class LayerKernel:
    """A kernel that is asked for: ``row`` has its columns, ``several`` says whether its layer has other kernels."""

    layer: str
    row: LayerSpec
    several: bool

    @property
    def name(self) -> str:
        """The layer's name, with the columns if it has several kernels."""
        return kernel_name(self.layer, self._n)

    @property
    def folder(self) -> str:
        """Its folder within the model's."""
        return folder_of(self.layer, self._n)

    @property
    def _n(self) -> int | None:
        return self.row.columns if self.several else None


@dataclass(frozen=True, slots=True)
class LayerTable:
    """Rows by name or pattern, in order; layers without a row of their own need ``min_sparsity``.

    ``few`` has the shares of zeros of layers that were skipped when the table was made. Raises BadRequest.
    """

    rows: Mapping[str, LayerSpec]
    few: Sequence[float] = field(default=(), compare=False)
    min_sparsity: float = field(default=MIN_SPARSITY, compare=False)

    def __post_init__(self) -> None:
        check_limit(self.min_sparsity)

    @property
    def n(self) -> int | None:
        """The columns of B that all layers have; None if they differ."""
        found = {one.columns for row in self.rows.values() if row.skip is None for one in row.each}
        return found.pop() if len(found) == 1 else None

    def row_of(self, name: str) -> LayerSpec:
        """Return the row of a layer; a skipped one if there is none."""
        if (own := self.rows.get(name)) is not None:
            return own
        found = (row for pattern, row in self.rows.items() if fnmatchcase(name, pattern))
        return next(found, LayerSpec(skip="the layer table has no row for it"))

    def kernels_of(self, name: str) -> list[LayerKernel]:
        """Return the kernels of a layer that is not skipped, ascending by columns."""
        rows = self.row_of(name).each
        return [LayerKernel(name, row, several=len(rows) > 1) for row in rows]

    def bias_of(self, name: str, file: MatrixFile) -> Bias:
        """Return the bias that the kernel of a layer adds: of a layer's own row it has to be there.

        Raises BadMatrix, BadRequest.
        """
        if not self.row_of(name).bias:
            return None
        if (bias := file.bias) is None and name in self.rows:
            raise BadRequest(f"layer table: {printable(name)[:80]!r}: bias is true, but the file has no bias for it")
        return bias

    def skipped(self, names: Sequence[str], axes: Mapping[str, int] = MappingProxyType({})) -> dict[str, str]:
        """Return the layers of ``names`` that are skipped, with the reasons.

        Weights of three ``axes`` are multiplied as convolutions of height 1 alone.
        """

        def reason(name: str) -> str | None:
            row = self.row_of(name)
            return NO_WINDOW if row.skip is None and row.conv is None and axes.get(name) == 3 else row.skip

        return {name: why for name in names if (why := reason(name)) is not None}

    def why_unpruned(self, name: str, found: MatrixFile | BadMatrix) -> str | None:
        """Return why a layer is skipped for its zeros, or None. An embedding may have more nonzeros than are read."""
        share = found.matrix.sparsity if isinstance(found, MatrixFile) else found.sparsity
        return None if name in self.rows or share is None else too_few(share, self.min_sparsity)

    def check_used(self, names: Sequence[str]) -> None:
        """Raise BadRequest for a row that is for none of the layers ``names``: it is likely misspelt."""
        for pattern in self.rows:
            if not any(name == pattern or fnmatchcase(name, pattern) for name in names):
                shown = ", ".join(printable(name)[:80] for name in names[:20])
                raise BadRequest(f"layer table: {printable(pattern)[:80]!r} is not a layer of the model: {shown}")

    def to_toml(self) -> str:
        """Return the text of a file."""
        return "\n".join(_section(name, row) for name, row in self.rows.items())

    def to_json(self) -> str:
        """Return the same as JSON."""
        return json.dumps({"layers": {name: row.given for name, row in self.rows.items()}})


def none_asked(layer: str, reason: str) -> BadRequest:
    """Return the error for a model all of whose layers are skipped, ``layer`` the first."""
    hint = "; is the model pruned, and saved with its masks? Else lower min_sparsity" if is_few(reason) else ""
    return BadRequest(f"no layer is asked for: {layer}: {reason}{hint}")


def columns_in(text: str) -> int | tuple[int, ...]:
    """Return the numbers of columns in a text, one or several, as 8 or 1,8,512. Raises BadRequest."""
    parts = text.split(",")
    if not all(re.fullmatch("[0-9]{1,9}", part.strip()) for part in parts):
        raise BadRequest(f"n is {text!r:.80}: give a number of columns, or several, as 1,8,512")
    found = tuple(map(int, parts))
    return found if len(found) > 1 else found[0]


def keys_given(own: Mapping[str, Any]) -> list[str]:
    """Return the keys of a row, ``own``, that are not as by default."""
    return [key for key in LayerSpec(**own, skip="").given if key != "skip"]


def read_table(path: Path) -> LayerTable:
    """Read a layer table from a ``.toml`` or ``.json``. Raises BadRequest."""
    with system_errors(BadRequest, f"layer table {path}: cannot be read"), path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    return parse_table(content, str(path))


def parse_table(content: bytes, where: str) -> LayerTable:
    """Parse a layer table, in TOML or JSON; ``where`` is for messages. Raises BadRequest."""
    if len(content) > MAX_BYTES:
        raise BadRequest(f"layer table {where}: is larger than {MAX_BYTES} bytes")
    try:
        text = content.decode()
        found: Any = json.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"layer table {where}: is neither TOML nor JSON: {printable(str(error))[:160]}") from None
    if not isinstance(found, dict) or set(found) != {"layers"} or not isinstance(found["layers"], dict):
        raise BadRequest(f'layer table {where}: give one section a layer, [layers."fc1.weight"], and nothing else')
    if not found["layers"]:
        raise BadRequest(f"layer table {where}: has no rows")
    return LayerTable({name: _row(name, row, where) for name, row in found["layers"].items()})


_ROW = TypeAdapter(LayerSpec)


def _row(name: str, row: object, where: str) -> LayerSpec:
    place = f"layer table {where}: {printable(name)[:80]!r}"
    try:
        return _ROW.validate_json(json.dumps(row, default=str))  # TOML has dates too
    except ValidationError as error:
        first = error.errors()[0]
        key = str(next(iter(first["loc"]), ""))
        known = ", ".join(field.name for field in fields(LayerSpec))
        why = f"no such key; there are {known}" if first["type"] == "unexpected_keyword_argument" else first["msg"]
        raise BadRequest(f"{place}: {printable(key)[:80]}: {why}") from None
    except BadRequest as error:
        raise type(error)(f"{place}: {error}") from None


def _section(name: str, row: LayerSpec) -> str:
    # Of these types TOML writes the same as JSON.
    keys = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in row.given.items()]
    return "\n".join([f"[layers.{json.dumps(name, ensure_ascii=False)}]", *keys]) + "\n"
