"""Sparsity patterns of pruned networks: real ones for shapes that have one, similar random ones else.

A pattern is a mask (m, k), true where a weight is kept, in PyTorch's order of weights: m output channels, k = input
channels x taps, taps being height x width of a convolution's kernel. Every function is deterministic.

Sources: Gale, Zaharia, Young and Elsen, Sparse GPU Kernels for Deep Learning (SC'20), whose collection of pruned
layers is DLMC; Wang, SparseRT (PACT'20); Sanh, Wolf and Rush, Movement Pruning (NeurIPS 2020).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lospmm.errors import BadRequest
from lospmm.matrix import readers

Mask = NDArray[np.bool_]

#: The largest difference in sparsity at which a real pattern is used.
NEAR: Final = 0.015

#: Encoder layers of a movement-pruned BERT: the density of the first, of that of the last. That the lower layers keep
#: more is what Sanh et al. found; they have no table, and the ratio is a choice.
FIRST_OF_LAST: Final = 2.0

#: Suffix of DLMC's convolutions. As in TensorFlow, their taps come before the channels.
_TAPS_FIRST: Final = ".smtx"


@dataclass(frozen=True, slots=True)
class Spread:
    """Standard deviations of the logarithms of the scales of rows and of input channels."""

    rows: float
    channels: float
    like: str


#: Spread of drawn patterns, as of DLMC's real ones at about 90 %, by pruning method.
SPREADS: Mapping[str, Spread] = MappingProxyType(
    {
        "magnitude": Spread(0.095, 0.12, "layers pruned by magnitude"),
        "learned": Spread(0.19, 0.085, "layers pruned by learned scores"),
    }
)


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """A mask (m, k), and its origin in words."""

    mask: Mask
    origin: str

    @property
    def sparsity(self) -> float:
        """Fraction of zeros."""
        return 1 - float(self.mask.mean())


@dataclass(frozen=True, slots=True)
class RealPattern:
    """A file with a pattern of this shape; ``taps_first``: its columns are ordered by tap, then channel."""

    path: Path
    name: str
    m: int
    k: int
    sparsity: float
    taps_first: bool


@dataclass(frozen=True, slots=True)
class WantedPattern:
    """A pattern to find or draw: of (m, k), with ``taps`` columns for each input channel."""

    m: int
    k: int
    sparsity: float
    taps: int = 1


def depth_sparsities(sparsity: float, depth: int, ratio: float = FIRST_OF_LAST) -> tuple[float, ...]:
    """Return the sparsities of ``depth`` layers, with mean ``sparsity``; the density falls in equal steps.

    ``ratio`` is the density of the first layer over that of the last. Raises BadRequest for a density above 1.
    """
    density = 1 - sparsity
    steps = np.linspace(2 * ratio / (1 + ratio), 2 / (1 + ratio), depth) if depth > 1 else np.ones(1)
    if not 0 <= sparsity <= 1 or density * steps.max() > 1:
        raise BadRequest(
            f"sparsity {sparsity} over {depth} layers, the first {ratio} times as dense as the last: no such"
        )
    return tuple(float(1 - density * step) for step in steps)


def drawn(wanted: WantedPattern, spread: Spread, seed: int) -> Pattern:
    """Draw a pattern: magnitude pruning of normal numbers, with random scales of rows and input channels.

    Raises BadRequest for a sparsity outside 0 to 1 or columns that are no whole channels.
    """
    if not 0 <= wanted.sparsity <= 1 or wanted.k % wanted.taps:
        raise BadRequest(f"sparsity {wanted.sparsity}, {wanted.k} columns of {wanted.taps} taps: no such pattern")
    random = np.random.default_rng(seed)
    row = random.lognormal(0, spread.rows, wanted.m)
    channel = random.lognormal(0, spread.channels, wanted.k // wanted.taps)
    size = np.abs(random.standard_normal((wanted.m, wanted.k))) * row[:, None] * np.repeat(channel, wanted.taps)
    kept = round((1 - wanted.sparsity) * size.size)
    mask = np.zeros(size.size, dtype=np.bool_)
    if kept:
        mask[np.argpartition(size.ravel(), size.size - kept)[size.size - kept :]] = True
    return Pattern(mask.reshape(size.shape), f"drawn like {spread.like}, seed {seed}")


def real_patterns(folder: Path) -> tuple[RealPattern, ...]:
    """Return the patterns of DLMC's and SparseRT's files below a folder; none if it does not exist.

    Random pruning is left out. Raises BadMatrix for a file that is damaged.
    """
    found = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.suffix not in (".smtx", ".npz") or "random_pruning" in name:
            continue
        matrix = readers.read(path).matrix
        sparsity = 1 - matrix.nnz / (matrix.m * matrix.k)
        found.append(RealPattern(path, name, matrix.m, matrix.k, sparsity, path.suffix == _TAPS_FIRST))
    return tuple(found)


def real(found: Iterable[RealPattern], wanted: WantedPattern, use: int = 0) -> Pattern | None:
    """Return the real pattern nearest to the wanted one, or None.

    The first layer that uses one (``use`` 0) has it unchanged, the next ones with rows and input channels shuffled:
    equally many of each kind, yet no two equal layers.
    """
    near = [
        one for one in found if (one.m, one.k) == (wanted.m, wanted.k) and abs(one.sparsity - wanted.sparsity) <= NEAR
    ]
    if not near:
        return None
    one = min(near, key=lambda one: (abs(one.sparsity - wanted.sparsity), one.name))
    matrix = readers.read(one.path).matrix
    mask = np.zeros((one.m, one.k), dtype=np.bool_)
    mask[np.repeat(np.arange(one.m), matrix.row_nnz), matrix.indices] = True
    if one.taps_first:
        mask = channels_first(mask, wanted.taps)
    if use == 0:
        return Pattern(mask, one.name)
    return Pattern(shuffled(mask, wanted.taps, use), f"{one.name}, rows and channels in another order")


def channels_first(mask: Mask, taps: int) -> Mask:
    """Return a mask (m, taps x channels) as (m, channels x taps), PyTorch's order."""
    m, k = mask.shape
    return np.ascontiguousarray(mask.reshape(m, taps, k // taps).transpose(0, 2, 1)).reshape(m, k)


def shuffled(mask: Mask, taps: int, seed: int) -> Mask:
    """Return a mask with shuffled rows, and shuffled input channels with all their taps."""
    random = np.random.default_rng(seed)
    m, k = mask.shape
    channels = random.permutation(k // taps)
    return np.ascontiguousarray(mask[random.permutation(m)].reshape(m, -1, taps)[:, channels]).reshape(m, k)
