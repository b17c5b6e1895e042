"""Layers with one copy of their weights on the GPU: the kernels of all N in one cubin (``memory="low"``)."""

from dataclasses import replace

from lospmm.artifact import kept
from lospmm.errors import LospmmError
from lospmm.families.bitmap import MAX_WHOLE_COLS
from lospmm.kernel import Kernel
from lospmm.nn.choice import Shape, TimedSite
from lospmm.problem.problem import ceil_div
from lospmm.tuning.one_copy import joined
from lospmm.tuning.session import Session


def rounded(shape: Shape) -> Shape:
    """Return the shape with the columns of a kernel that reads A as those of every N do."""
    return (ceil_div(shape[0], 8) * 8,) if len(shape) == 1 and shape[0] > MAX_WHOLE_COLS else shape


def join_kernels(work: TimedSite, session: Session | None) -> None:
    """Put the kernels of a layer into one cubin, which then serves every call."""
    artifacts = [bucket.kernel.artifact for bucket in work.buckets.values()]
    try:
        kernels = joined(artifacts, store=kept.open_store(), session=session, matrix=work.site.matrix)
    except LospmmError as error:
        work.failed |= dict.fromkeys(work.buckets, str(error))
        work.buckets = {}
        return
    pairs = zip(work.buckets.items(), kernels, strict=True)
    work.buckets = {shape: replace(bucket, kernel=Kernel(one), least=1) for (shape, bucket), one in pairs}
