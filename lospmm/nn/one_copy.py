"""Layers with one copy of their weights on the GPU: the kernels of all N in one cubin (``memory="low"``)."""

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from lospmm.errors import LospmmError
from lospmm.families.bitmap import MAX_WHOLE_COLS
from lospmm.kernel import join
from lospmm.nn.choice import Shape, TimedSite
from lospmm.nn.site import freeable
from lospmm.problem.problem import ceil_div


def rounded(shape: Shape) -> Shape:
    """Return the shape with the columns of a kernel that reads A as those of every N do."""
    return (ceil_div(shape[0], 8) * 8,) if len(shape) == 1 and shape[0] > MAX_WHOLE_COLS else shape


def join_kernels(model: nn.Module, works: Sequence[TimedSite]) -> None:
    """Put the kernels of each layer into one cubin, which then serves every call.

    A weight that is masked, or that another module has too, is not freed.
    """
    freed = freeable(model, [work.site for work in works])
    for work in works:
        if not work.buckets:
            continue
        try:
            kernels = join([bucket.kernel for bucket in work.buckets.values()])
        except LospmmError as error:
            work.failed |= dict.fromkeys(work.buckets, str(error))
            work.buckets = {}
            continue
        pairs = zip(work.buckets.items(), kernels, strict=True)
        work.buckets = {shape: replace(bucket, kernel=kernel, least=1) for (shape, bucket), kernel in pairs}
        work.frees_weight = work.site.name in freed
