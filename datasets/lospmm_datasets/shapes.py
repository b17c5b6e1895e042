"""The GEMM shapes of section 7.1 with their derivation, from a file such as ``datasets/shapes.toml``.

The file lies beside this package, not in it: nothing in a wheel reads it.
"""

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from lospmm.errors import BadRequest
from lospmm.problem.device import read_toml

_Count = Annotated[int, Field(ge=1, strict=True)]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """C (m x n) = A (m x k) x B (k x n) of one layer by implicit im2col (section 6.2).

    ``count`` layers of the network have this shape, ``layer`` is the first of them; a linear layer is a convolution
    with a kernel of 1 over ``out_size`` = (tokens,).
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    layer: str
    count: _Count
    out_channels: _Count
    in_channels: _Count
    kernel: _Count
    out_size: Annotated[tuple[_Count, ...], Field(min_length=1, max_length=2)]
    batch: _Count
    m: _Count
    k: _Count
    n: _Count

    @property
    def gemm(self) -> tuple[int, int, int]:
        """(m, k, n) of the file."""
        return self.m, self.k, self.n

    @property
    def derived(self) -> tuple[int, int, int]:
        """(m, k, n) computed from the layer."""
        return self.out_channels, self.in_channels * self.kernel**2, self.batch * math.prod(self.out_size)


@dataclass(frozen=True, slots=True)
class Network:
    """A network and the shapes of its layers."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    source: str  # where its layers are published
    shapes: tuple[LayerShape, ...]


@dataclass(frozen=True, slots=True)
class ShapeTable:
    """Networks, every shape of which is pruned to every one of ``sparsities`` (fractions of zeros)."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    sparsities: tuple[Annotated[float, Field(ge=0, lt=1)], ...]
    networks: tuple[Network, ...]


_TABLE = TypeAdapter(ShapeTable)


def read_shapes(path: Path) -> ShapeTable:
    """Return the table of a TOML file.

    Raises BadRequest if it cannot be read, a key is missing, unknown or wrong, m, k and n do not follow from the
    layer, or a shape is there twice.
    """
    table = _checked(path, read_toml(path))
    shapes = [(network.name, shape) for network in table.networks for shape in network.shapes]
    for network, shape in shapes:
        if shape.gemm != shape.derived:
            raise BadRequest(
                f"{path}: {network} {shape.layer}: m, k, n are {shape.gemm}, its layer gives {shape.derived}"
            )
    twice = [gemm for gemm, times in Counter(shape.gemm for _, shape in shapes).items() if times > 1]
    if twice:
        raise BadRequest(f"{path}: m, k, n {twice[0]} are there more than once; give their layers one line")
    return table


def _checked(path: Path, given: dict[str, Any]) -> ShapeTable:
    try:
        return _TABLE.validate_python(given)
    except ValidationError as error:
        first = error.errors()[0]
        raise BadRequest(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
