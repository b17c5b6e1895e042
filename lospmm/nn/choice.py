"""Choice of the layers that run on kernels: those that are faster, one by one, and then as a model.

A layer that becomes dense may cost its neighbours a transpose, so the rest is timed again until every layer left is
faster. The model then keeps the number of them with which it is fastest, called as it will be, largest gains first.
"""

import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from lospmm.errors import LospmmError
from lospmm.nn import timing, whole
from lospmm.nn.calling import Called, calling_of
from lospmm.nn.layer import call_parts, swap_in
from lospmm.nn.layout import Layout
from lospmm.nn.paired import Block, Turns, in_turn, uncollected
from lospmm.nn.report import ModelTimes
from lospmm.nn.site import Site
from lospmm.nn.sparse import ColumnBucket, Tuned, made_dense, misfit, unswap, unswap_all
from lospmm.nn.transpose import Shares
from lospmm.problem.problem import ceil_div
from lospmm.tuning.dense import left_to_cublas

#: Share by which a kernel must be faster than the dense layer; timings of the same work differ by as much.
MARGIN = 0.02

#: ``ColumnBucket.least`` is rounded to 1/8 of N, so that layers of the same shapes share a compiled graph.
_STEPS = 8

#: Shape of a site's input: (n,), or (batch, channels, height, width).
Shape = tuple[int, ...]

#: Rounds of paired timing, in a trial and for the choice.
TRIAL_ROUNDS, LAST_ROUNDS = 7, 15

#: Returns a block of calls of a model in its present state; raises Unsupported if it cannot be called so.
Ready = Callable[[], Block]


@dataclass(slots=True, eq=False)
class TimedSite:
    """Site with its kernels, and the latencies of each in microseconds."""

    site: Site
    buckets: dict[Shape, ColumnBucket] = field(default_factory=dict)
    dense: dict[Shape, float] = field(default_factory=dict)
    sparse: dict[Shape, float] = field(default_factory=dict)
    failed: dict[Shape, str] = field(default_factory=dict)
    given_back: bool = False  # faster alone, dense because the model is faster
    frees_weight: bool = False  # the kernels serve every call

    @property
    def gain(self) -> float:
        """Microseconds saved over all kernels."""
        return sum(self.dense[shape] - self.sparse[shape] for shape in self.buckets)

    @property
    def dense_beyond(self) -> bool:
        """Whether it has no kernel for the most columns that were asked for."""
        most = max((shape for shape in self.buckets if len(shape) == 1), default=None)
        others = [shape for shape in (*self.dense, *self.failed) if len(shape) == 1]
        return most is not None and not self.frees_weight and max(others, default=most) > most

    def take(self, shape: Shape, tuned: ColumnBucket | LospmmError, *, will_time: bool) -> None:
        """Keep a tuned kernel, or why there is none; one to be timed may be left to cuBLAS."""
        if isinstance(tuned, LospmmError):
            self.failed[shape] = str(tuned)
        elif will_time and (why := left_to_cublas(tuned.kernel.artifact.manifest)) is not None:
            self.failed[shape] = why
        else:
            self.buckets[shape] = tuned


def choose(works: Sequence[TimedSite], layout: Layout, *, compiled: bool) -> list[TimedSite]:
    """Swap and return the layers that are faster with their kernels.

    With ``compiled``, products are timed compiled. Convolutions are not: between two compiled operations a kernel would
    be charged two passes through memory that a network of kernels does not make, and a dense layer one. With TF32 that
    excluded layers that make a compiled ResNet-50 faster. ``settle`` measures what layouts cost in the whole model.
    """
    swapped = {work.site.name: work for work in works if work.buckets}
    known: dict[Hashable, float] = {}
    contexts: timing.Contexts | None = {} if compiled else None
    for name, work in list(swapped.items()):
        weight = work.site.tensors.weight
        reason = misfit(weight.dtype, weight.device, list(work.buckets.values()), emulate=False)
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
            unswap(swapped.pop(name).site.module)
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
    """Paired timing of a model, dense and with the first layers of ``order`` on kernels."""

    model: nn.Module
    order: Sequence[TimedSite]
    layout: Layout
    ready: Ready
    dense: Block = field(init=False)
    block: Block = field(init=False)
    now: int = 0
    dense_micros: list[float] = field(default_factory=list)
    found: dict[int, Turns] = field(default_factory=dict)  # latest times by number of layers

    def __post_init__(self) -> None:
        self.turn_to(0)
        self.dense = self.block = self.ready()

    def turn_to(self, keep: int) -> None:
        unswap_all(self.model)
        swap(self.order[:keep], self.layout)
        call_parts(self.model)
        self.now = keep

    def measure(self, keep: int, rounds: int = TRIAL_ROUNDS) -> Turns:
        if keep != self.now:
            self.turn_to(keep)
            self.block = self.ready()
        with uncollected():
            found = in_turn(self._dense_block, self.block, rounds)
        self.dense_micros.append(found.first_micros)
        self.found[keep] = found
        return found

    def _dense_block(self) -> float:
        with made_dense(self.model):
            return self.dense()


def settled(count: int, dense: float, measure: Callable[[int], float]) -> tuple[int, float]:
    """Return how many of ``count`` layers to run on kernels, and the model's time with them.

    ``measure`` returns the model's time with the 1 to ``count`` layers of the largest gains on kernels, ``dense`` is
    its time with none. The number is halved as long as that is faster, or nothing is; then the numbers midway to its
    neighbours are tried. A trial may compile the model, so there are at most two more than ``count`` has bits.
    """
    times = {0: dense}
    best = 0

    def is_best(keep: int) -> bool:
        nonlocal best
        times[keep] = measure(keep)
        is_better = times[keep] < times[best]
        best = keep if is_better else best
        return is_better

    keep = count
    while keep and (is_best(keep) or not best):
        keep //= 2
    middle = best
    below = max((one for one in times if one < middle), default=0)
    above = min((one for one in times if one > middle), default=middle)
    for between in ((middle + above) // 2, (below + middle) // 2):
        if between not in times:
            is_best(between)
    return best, times[best]


@dataclass(frozen=True, slots=True)
class Settled:
    """Paired times of dense and chosen model, and of their GPU work alone if that decided."""

    times: Turns
    on_gpu: Turns | None = None


def settle(
    model: nn.Module, chosen: Sequence[TimedSite], layout: Layout, ready: Ready, ready_on_gpu: Ready | None = None
) -> Settled:
    """Make ``chosen`` layers dense again as long as that makes the model faster; return the model's times.

    ``ready`` calls the model as it will be called. Every number of layers is timed in turn with the dense model, the
    best number once more for longer: the best of several timings was likely lucky. All layers are timed so too, and
    kept unless the model is faster without some by more than the error. If the choice is not faster than the dense
    model by more than the error, the model becomes dense.

    A model limited by Python is no faster with kernels, but leaves the GPU to others. If it is level with all layers,
    they are kept if ``ready_on_gpu`` shows its GPU work to be faster.
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
    """Return the times with all layers if the model is level and its GPU work is faster, or None."""
    every = len(trials.order)
    whole = trials.found[every]
    if whole.is_slower or ready_on_gpu is None:
        return None
    on_gpu = _Trials(trials.model, trials.order, trials.layout, ready_on_gpu)
    found = on_gpu.measure(every, LAST_ROUNDS)
    trials.now = on_gpu.now
    return Settled(whole, found) if found.is_faster else None


def choose_in_model(
    model: nn.Module, works: Sequence[TimedSite], layout: Layout, example: Any, called: Called
) -> ModelTimes | None:
    """Swap the chosen layers; return the model's times, with an example and if a layer is faster alone.

    Raises Unsupported if the model cannot be called as ``called`` says.
    """
    calling = calling_of(called)
    chosen = choose(works, layout, compiled=calling.compiled)
    if example is None or not chosen:
        return None
    with whole.timed_whole(model, calling):
        ready = partial(whole.block_of, model, example, calling)
        ready_on_gpu = None if calling.captured else partial(whole.gpu_block_of, model, example, calling)
        found = settle(model, chosen, layout, ready, ready_on_gpu)
    return ModelTimes(
        called=called,
        dense_micros=found.times.first_micros,
        chosen_micros=found.times.second_micros,
        ratio=found.times.ratio,
        noise=found.times.noise,
        given_back=sum(work.given_back for work in chosen),
        gpu_ratio=None if found.on_gpu is None else found.on_gpu.ratio,
    )


def swap(works: Iterable[TimedSite], layout: Layout) -> frozenset[str]:
    """Swap all of ``works``, emulated on a CPU; return the layers that leave their results features first."""
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
            frees_weight=work.frees_weight,
            dense_beyond=work.dense_beyond,
            versions=site.versions,
        )
        swap_in(site.module, {site.weight: tuned})
    return first


def _share(name: str, group: Sequence[str]) -> Shares:
    if len(group) == 1:
        return "no"
    return {group[0]: "first", group[-1]: "last"}.get(name, "next")  # type: ignore[return-value]


def _is_faster(work: TimedSite, shape: Shape) -> bool:
    return work.sparse[shape] <= (1.0 - MARGIN) * work.dense[shape]


def _least(work: TimedSite, shape: Shape, bucket: ColumnBucket) -> int:
    """Return the columns from which the kernel is faster, if dense latency is proportional to the columns."""
    share = ceil_div(int(1000 * work.sparse[shape] / work.dense[shape]) * _STEPS, 1000) / _STEPS
    n: int = bucket.kernel.artifact.manifest["n"]
    return max(1, int(share * n))
