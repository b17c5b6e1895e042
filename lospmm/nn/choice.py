"""Which layers of a model run on their kernels: those that are faster, one by one, and then all together.

A layer that becomes dense may cost its neighbours a transpose, so these are timed again, until all that are left are
faster. Of these the model gets as many as it is fastest with, as it will be called, in the order of what each gains.
"""

import statistics
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from torch import nn

from lospmm.nn import layer, timing
from lospmm.nn.attention import SparseMultiheadAttention, close_short_cuts, open_short_cuts
from lospmm.nn.bound import ColumnBucket, misfit
from lospmm.nn.calling import settled
from lospmm.nn.layer import Sparse, Tuned
from lospmm.nn.layout import Layout
from lospmm.nn.paired import Block, Turns, in_turn, uncollected
from lospmm.nn.site import Site
from lospmm.problem.problem import ceil_div

#: By how much a kernel must be faster than the dense layer: times of the same work differ by as much.
MARGIN = 0.02

#: ``ColumnBucket.least`` is rounded to this share of the bucket, so that layers of like shapes share a compiled graph.
_STEPS = 8

#: The shape of what a site is given.
Shape = tuple[int, ...]

#: Rounds of dense model and choice, of a trial and of what was chosen.
TRIAL_ROUNDS, LAST_ROUNDS = 7, 15

#: Gives a block of calls of a model in its present state. Raises Unsupported where it cannot be called so.
Ready = Callable[[], Block]


@dataclass(slots=True, eq=False)
class TimedSite:
    """One site with its kernels, and the times of each in microseconds."""

    site: Site
    buckets: dict[Shape, ColumnBucket] = field(default_factory=dict)
    dense: dict[Shape, float] = field(default_factory=dict)
    sparse: dict[Shape, float] = field(default_factory=dict)
    failed: dict[Shape, str] = field(default_factory=dict)
    given_back: bool = False  # faster alone, and dense because the model is faster so

    @property
    def gain(self) -> float:
        return sum(self.dense[shape] - self.sparse[shape] for shape in self.buckets)


def choose(works: Sequence[TimedSite], layout: Layout, *, compiled: bool) -> list[TimedSite]:
    """Swap the layers that are faster with their kernels, and give them. ``compiled`` is how products are timed.

    Convolutions are timed as they are. Compiled between two operations, as products are, a kernel is charged two passes
    through memory that a network of kernels does not have, and a dense layer one: with TF32 that refused layers with
    which a compiled ResNet-50 is faster. What layouts cost in a network is for ``settle`` to find out.
    """
    swapped = {work.site.name: work for work in works if work.buckets}
    known: dict[Hashable, float] = {}
    contexts: timing.Contexts | None = {} if compiled else None
    for name, work in list(swapped.items()):
        reason = misfit(work.site.tensors.weight, list(work.buckets.values()), emulate=False)
        if reason is not None:
            work.failed |= dict.fromkeys(work.buckets, f"it cannot be timed here: {reason}")
            del swapped[name]
            continue
        for shape in work.buckets:
            key = timing.signature(work.site, shape)
            if key not in known:
                known[key] = timing.dense_micros(work.site, shape, _contexts_for(work.site, contexts))
            work.dense[shape] = known[key]
    while swapped:
        first = swap(swapped.values(), layout)
        for name, work in swapped.items():
            fed, sharing = layout.is_fed_first(name, first), len(layout.sharing(name, swapped))
            for shape in work.buckets:
                work.sparse[shape] = timing.sparse_micros(
                    work.site, shape, fed_first=fed, sharing=sharing, contexts=_contexts_for(work.site, contexts)
                )
        slower = [name for name, work in swapped.items() if not any(_is_faster(work, shape) for shape in work.buckets)]
        if not slower:
            break
        for name in slower:
            layer.unswap(swapped.pop(name).site.module)
    for work in swapped.values():
        work.buckets = {
            shape: replace(bucket, least=_least(work, shape, bucket))
            for shape, bucket in work.buckets.items()
            if _is_faster(work, shape)
        }
    swap(swapped.values(), layout)
    return list(swapped.values())


def _contexts_for(site: Site, contexts: timing.Contexts | None) -> timing.Contexts | None:
    return None if site.is_convolution else contexts


@dataclass(slots=True, eq=False)
class _Trials:
    """A model with the first so many layers of ``order`` on kernels, in turn with itself dense."""

    model: nn.Module
    order: Sequence[TimedSite]
    layout: Layout
    ready: Ready
    dense: Block = field(init=False)
    block: Block = field(init=False)
    now: int = 0
    dense_micros: list[float] = field(default_factory=list)
    found: dict[int, Turns] = field(default_factory=dict)  # the last times by the number of layers

    def __post_init__(self) -> None:
        self.turn_to(0)
        self.dense = self.block = self.ready()

    def turn_to(self, keep: int) -> None:
        unswap(self.model)
        swap(self.order[:keep], self.layout)
        call_parts(self.model)
        self.now = keep

    def measure(self, keep: int, rounds: int = TRIAL_ROUNDS) -> Turns:
        if keep != self.now:
            self.turn_to(keep)
            self.block = self.ready()
        with uncollected():
            found = in_turn(self._asleep, self.block, rounds)
        self.dense_micros.append(found.first_micros)
        self.found[keep] = found
        return found

    def _asleep(self) -> float:
        with asleep(self.model):
            return self.dense()


@dataclass(frozen=True, slots=True)
class Settled:
    """The dense model in turn with what was chosen; and the GPU's part of both, where that decided."""

    times: Turns
    on_gpu: Turns | None = None


def settle(
    model: nn.Module, chosen: Sequence[TimedSite], layout: Layout, ready: Ready, ready_on_gpu: Ready | None = None
) -> Settled:
    """Give back as many of the ``chosen`` layers as the model is faster without; the times of the dense model and this.

    ``ready`` is how the model will be called. Every number of layers is timed in turn with the dense model, and what is
    fastest once more, for longer: the best of several times was likely lucky. So are all the layers, which are kept
    unless the model is faster without some by more than these times differ. If what is left is not faster than the
    dense model by as much, the model is dense, and its time stands in both places.

    But a model that waits for Python is as fast with kernels as without, and leaves more of the GPU to others. So where
    it is level with all layers, they are kept if the GPU does its part faster with them, by ``ready_on_gpu``.
    """
    order = sorted(chosen, key=lambda work: -work.gain)
    trials = _Trials(model, order, layout, ready)
    every = len(order)
    best, _ = settled(every, 1.0, lambda keep: trials.measure(keep).ratio)
    found = trials.measure(best, LAST_ROUNDS) if best else None
    if found is not None and best < every:
        whole = trials.measure(every, LAST_ROUNDS)
        if whole.ratio - whole.error <= found.ratio + found.error:
            best, found = every, whole
    if found is not None and found.is_faster:
        times = Settled(found)
    elif (level := _level(trials, ready_on_gpu)) is not None:
        best, times = every, level
    else:
        micros = statistics.median(trials.dense_micros)
        best, times = 0, Settled(Turns(micros, micros, 1.0, 0.0, LAST_ROUNDS))
    if best != trials.now:
        trials.turn_to(best)
    for work in order[best:]:
        work.given_back = True
    return times


def _level(trials: _Trials, ready_on_gpu: Ready | None) -> Settled | None:
    """The times with all layers, if the model is level with them and the GPU's part of it is faster."""
    every = len(trials.order)
    whole = trials.found[every]
    if whole.is_slower or ready_on_gpu is None:
        return None
    on_gpu = _Trials(trials.model, trials.order, trials.layout, ready_on_gpu)
    found = on_gpu.measure(every, LAST_ROUNDS)
    trials.now = on_gpu.now
    return Settled(whole, found) if found.is_faster else None


def swap(works: Iterable[TimedSite], layout: Layout) -> frozenset[str]:
    """Swap all of these, and say which leave their results features first. On a CPU their text is emulated."""
    chosen = list(works)
    names = {work.site.name for work in chosen}
    first = layout.features_first(names)
    for work in chosen:
        site = work.site
        tuned = Tuned(
            site.name,
            site.place,
            tuple(work.buckets.values()),
            emulate=site.tensors.weight.device.type == "cpu",
            features_first=site.name in first,
            shares=_share(site.name, layout.sharing(site.name, names)),
        )
        layer.swap(site.module, {site.weight: tuned}, site.sparse)
    return first


def unswap(model: nn.Module) -> None:
    """Every layer dense again; the masks of parametrizations stay where they were put, for ``swap``."""
    for module in model.modules():
        if isinstance(module, Sparse):
            layer.unswap(module)
    open_short_cuts(model)


@contextmanager
def asleep(model: nn.Module) -> Iterator[None]:
    """The dense model for a while. Kernels stay bound, so that it takes no time to fall asleep and to wake."""
    sparse = [(module, type(module), module.lospmm_state) for module in model.modules() if isinstance(module, Sparse)]
    for module, _, state in sparse:
        module.__class__ = state.original
        module._forward_pre_hooks.update(state.hooks)
    open_short_cuts(model)
    try:
        yield
    finally:
        for module, kind, state in sparse:
            module.__class__ = kind
            for number in state.hooks:
                del module._forward_pre_hooks[number]
        close_short_cuts(model)


def call_parts(model: nn.Module) -> None:
    """Attention calls its ``out_proj``, and encoder layers their parts, where these have kernels."""
    for module in model.modules():
        if type(module) is nn.MultiheadAttention and isinstance(module.out_proj, Sparse):
            layer.swap(module, {}, SparseMultiheadAttention)
    close_short_cuts(model)


def _share(name: str, group: Sequence[str]) -> layer.Shares:
    if len(group) == 1:
        return "no"
    return {group[0]: "first", group[-1]: "last"}.get(name, "next")  # type: ignore[return-value]


def _is_faster(work: TimedSite, shape: Shape) -> bool:
    return work.sparse[shape] <= (1.0 - MARGIN) * work.dense[shape]


def _least(work: TimedSite, shape: Shape, bucket: ColumnBucket) -> int:
    """Columns below which the dense layer, taken to be as fast for each column, is faster than the kernel for all."""
    share = ceil_div(int(1000 * work.sparse[shape] / work.dense[shape]) * _STEPS, 1000) / _STEPS
    n: int = bucket.kernel.artifact.manifest["n"]
    return max(1, int(share * n))
