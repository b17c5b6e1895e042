"""Limit ``min_sparsity``: layers with a smaller share of zeros stay dense."""

import math
from collections.abc import Sequence

from lospmm.errors import BadRequest

#: The default: kernels were measured to gain from half zeros on, and layers of a model pruned to half may lack some.
MIN_SPARSITY = 0.4

_FEW = "fewer zeros than the "


def check_limit(min_sparsity: object) -> None:
    """Raise BadRequest for anything but a share of zeros."""
    if not isinstance(min_sparsity, int | float) or not 0 <= min_sparsity <= 1:
        raise BadRequest(f"min_sparsity is {min_sparsity!r:.80}: give a share of zeros, from 0 to 1")


def too_few(sparsity: float, min_sparsity: float) -> str | None:
    """Return the reason of a layer below the limit, or None. One pruned to the limit may lack a few zeros to it."""
    if max(sparsity, round(sparsity, 3)) >= min_sparsity:
        return None
    return f"{_FEW}{100 * min_sparsity:.0f}% of min_sparsity"


def is_few(reason: str) -> bool:
    """Return whether a layer's reason is that of ``too_few``."""
    return reason.startswith(_FEW)


def limit_hint(shares: Sequence[float], option: str) -> str:
    """Return what to add where all layers, with these shares of zeros, are below the limit; empty without layers.

    ``option`` sets the limit, up to its value.
    """
    if not shares:
        return ""
    name, most = option.rstrip("= "), max(shares)
    limit = math.floor(100 * most) / 100
    admitted = sum(share >= limit for share in shares)
    admits = f"{option}{limit:g} admits {admitted}" if limit else "are they pruned?"
    return f"; {len(shares)} below {name}, at most {100 * most:.1f}% zeros: {admits}"
