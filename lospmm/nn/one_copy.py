"""Layers with one copy of their weights on the GPU: the kernels of all N in one cubin (``memory="low"``)."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from lospmm.errors import LospmmError
from lospmm.families.bitmap import MAX_WHOLE_COLS
from lospmm.kernel import Kernel
from lospmm.nn.choice import Shape, TimedSite
from lospmm.problem.problem import ceil_div


def rounded(shape: Shape) -> Shape:
    """Return the shape with the columns of a kernel that reads A as those of every N do."""
    return (ceil_div(shape[0], 8) * 8,) if len(shape) == 1 and shape[0] > MAX_WHOLE_COLS else shape


def join_kernels(work: TimedSite, join: Callable[[Sequence[Kernel]], Sequence[Kernel]]) -> None:
    """Put the kernels of a layer into one cubin, which then serves every call."""
    try:
        kernels = join([bucket.kernel for bucket in work.buckets.values()])
    except LospmmError as error:
        work.failed |= dict.fromkeys(work.buckets, str(error))
        work.buckets = {}
        return
    pairs = zip(work.buckets.items(), kernels, strict=True)
    work.buckets = {shape: replace(bucket, kernel=kernel, least=1) for (shape, bucket), kernel in pairs}
