"""``sparsify_``: the pruned layers of a model on tuned kernels, where that is faster."""

from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import nn

from lospmm.errors import BadRequest, LospmmError
from lospmm.job_events import LayerProgress
from lospmm.kernel import whole_number
from lospmm.model import ceil_div
from lospmm.nn import layer, timing
from lospmm.nn.attention import SparseMultiheadAttention, close_short_cuts, open_short_cuts
from lospmm.nn.bound import Bucket, misfit
from lospmm.nn.layer import Sparse, Tuned
from lospmm.nn.layout import UNKNOWN, Layout, watch_layout
from lospmm.nn.place import forget_mask
from lospmm.nn.report import Report, Row
from lospmm.nn.site import Site, find_sites, learn_shapes
from lospmm.nn.tuning import Tuner, tuner_here, tuner_there
from lospmm.options import Options

#: By how much a kernel must be faster than the dense layer: times of the same work differ by as much.
MARGIN = 0.02

#: ``Bucket.least`` is rounded to this share of the bucket, so that layers of like shapes share a compiled graph.
_STEPS = 8

#: A site and the shape of what it is given.
_Shape = tuple[int, ...]

Choice = Literal["measured", "sparse"]


@dataclass(slots=True, eq=False)
class _Work:
    """One site with its kernels, and the times of each."""

    site: Site
    buckets: dict[_Shape, Bucket] = field(default_factory=dict)
    dense: dict[_Shape, float] = field(default_factory=dict)
    sparse: dict[_Shape, float] = field(default_factory=dict)
    failed: dict[_Shape, str] = field(default_factory=dict)


def sparsify_(
    model: nn.Module,
    example: Any = None,
    *,
    n: int | Iterable[int] = (),
    device: str = "auto",
    choice: Choice = "measured",
    min_sparsity: float = 0.6,
    server: str | None = None,
    key: str | None = None,
    progress: LayerProgress | None = None,
    **options: Any,
) -> Report:
    """Tune the pruned layers of ``model`` and have them run on their kernels, in place; a row for each.

    ``example`` is an input of the model (a tensor, a tuple of arguments or a mapping of named ones), from which the
    shapes of every layer are learned; ``n`` gives further numbers of columns (tokens) that products are to have
    kernels for, and is enough alone where there are no convolutions. ``device`` names the GPU to tune for; auto is this
    machine's. Layers with fewer zeros than ``min_sparsity`` stay as they are.

    With ``choice`` measured a layer is swapped where it was timed to be faster, whole and on this GPU; a layer that
    cannot be timed here stays dense. With sparse all are swapped, and on a CPU the kernels' text is run, slowly.

    ``server`` is the address of a service that tunes, ``key`` its API key. ``progress`` is told (layer, stage, done,
    total); without it bars are shown on a terminal. ``options`` are those of ``lospmm.tune``.

    A layer that fails stays dense, with the reason in its row. Raises BadRequest and Unsupported for a request that no
    layer can have; the model is then as it was. A model that was swapped before is given its dense layers back first.
    """
    if choice not in ("measured", "sparse"):
        raise BadRequest(f"choice {choice!r:.80}: choose measured or sparse")
    columns = _columns(n)
    if example is None and not columns:
        raise BadRequest("give an example of the model's input, or n, the columns that its products have")
    with ExitStack() as stack:
        tuner = _tuner(stack, (server, key), device, Options(**options), progress)
        restore_(model)
        sites, rows = find_sites(model, min_sparsity)
        works = [_Work(site) for site in sites]
        try:
            shapes = _shapes(model, sites, example, columns)
            layout = UNKNOWN if example is None else watch_layout(model, sites, example)
            for work in works:
                _tune(work, shapes[work.site.name], tuner)
            _choose(works, layout, choice)
        except BaseException:
            restore_(model)
            for site in sites:
                forget_mask(site.module, site.weight)
            raise
    _finish(model, works)
    order = {name: at for at, (name, _) in enumerate(model.named_modules())}
    rows += [row for work in works for row in _rows(work, choice)]
    return Report(tuple(sorted(rows, key=lambda row: order.get(_module_of(row.layer, order), 0))))


def restore_(model: nn.Module) -> None:
    """Give every layer of a model back what it was before ``sparsify_`` or ``load_``."""
    for module in model.modules():
        if isinstance(module, Sparse):
            layer.restore(module)
    open_short_cuts(model)


def status(model: nn.Module) -> dict[str, str]:
    """Of each layer with kernels why it is dense all the same; empty where it is not. Looks at all weights anew."""
    found = {}
    for module in model.modules():
        if isinstance(module, Sparse):
            layer.rebind(module)
            for name, bound in module.lospmm_state.bound.items():
                found[module.lospmm_state.tuned[name].name] = bound.refusal or ""
    return found


def _module_of(row: str, order: Collection[str]) -> str:
    return row if row in order else row.rpartition(".")[0]


def _tuner(
    stack: ExitStack,
    service: tuple[str | None, str | None],
    device: str,
    options: Options,
    progress: LayerProgress | None,
) -> Tuner:
    """By the service of this address and key, or here. ``stack`` closes the connection."""
    address, key = service
    if address is None:
        return tuner_here(device, options, progress)
    from lospmm.client import Client  # HTTP takes a while to import

    return tuner_there(stack.enter_context(Client(address, key)), device, options, progress)


def _columns(n: int | Iterable[int]) -> list[_Shape]:
    """Raises BadRequest."""
    return [(whole_number("n", one),) for one in (n if isinstance(n, Iterable) else [n])]


def _shapes(
    model: nn.Module, sites: Sequence[Site], example: Any, columns: Sequence[_Shape]
) -> dict[str, list[_Shape]]:
    """What each weight is multiplied with, by its site's name."""
    learned = {site.name: [] for site in sites} if example is None else learn_shapes(model, sites, example)
    for site in sites:
        if not site.is_convolution:
            learned[site.name] += [one for one in columns if one not in learned[site.name]]
    return learned


def _tune(work: _Work, shapes: Sequence[_Shape], tuner: Tuner) -> None:
    for shape in shapes:
        try:
            work.buckets[shape] = tuner.bucket(work.site, shape)
        except LospmmError as error:
            work.failed[shape] = str(error)


def _choose(works: Sequence[_Work], layout: Layout, choice: Choice) -> None:
    """Swap the layers that are to be, in the layout that all of them have together."""
    swapped = {work.site.name: work for work in works if work.buckets}
    if choice == "sparse":
        _swap(swapped.values(), layout)
        return
    for name, work in list(swapped.items()):
        weight = work.site.tensors.weight
        reason = misfit(weight, list(work.buckets.values()), emulate=False)
        if reason is not None:
            work.failed |= dict.fromkeys(work.buckets, f"it cannot be timed here: {reason}")
            del swapped[name]
            continue
        work.dense = {shape: timing.dense_micros(work.site, shape) for shape in work.buckets}
    while swapped:
        first = _swap(swapped.values(), layout)
        for name, work in swapped.items():
            fed, sharing = layout.is_fed_first(name, first), len(layout.sharing(name, swapped))
            work.sparse = {
                shape: timing.sparse_micros(work.site, shape, fed_first=fed, sharing=sharing) for shape in work.buckets
            }
        slower = [name for name, work in swapped.items() if not any(_is_faster(work, shape) for shape in work.buckets)]
        if not slower:
            break
        for name in slower:  # which may cost their neighbours a transpose, so that these are timed again
            layer.restore(swapped.pop(name).site.module)
    for work in swapped.values():
        work.buckets = {
            shape: replace(bucket, least=_least(work, shape, bucket))
            for shape, bucket in work.buckets.items()
            if _is_faster(work, shape)
        }
    _swap(swapped.values(), layout)


def _is_faster(work: _Work, shape: _Shape) -> bool:
    return work.sparse[shape] <= (1.0 - MARGIN) * work.dense[shape]


def _least(work: _Work, shape: _Shape, bucket: Bucket) -> int:
    """Columns below which the dense layer, taken to be as fast for each column, is faster than the kernel for all."""
    if work.site.is_convolution:
        return bucket.least
    share = ceil_div(int(1000 * work.sparse[shape] / work.dense[shape]) * _STEPS, 1000) / _STEPS
    return max(1, int(share * shape[0]))


def _swap(works: Iterable[_Work], layout: Layout) -> frozenset[str]:
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


def _share(name: str, group: Sequence[str]) -> layer.Shares:
    if len(group) == 1:
        return "no"
    return {group[0]: "first", group[-1]: "last"}.get(name, "next")  # type: ignore[return-value]


def _finish(model: nn.Module, works: Sequence[_Work]) -> None:
    """Have everything around the swapped layers call them."""
    for work in works:
        if not isinstance(work.site.module, Sparse):
            forget_mask(work.site.module, work.site.weight)
    call_parts(model)


def call_parts(model: nn.Module) -> None:
    """Attention calls its ``out_proj``, and encoder layers their parts, where these have kernels."""
    for module in model.modules():
        if type(module) is nn.MultiheadAttention and isinstance(module.out_proj, Sparse):
            layer.swap(module, {}, SparseMultiheadAttention)
    close_short_cuts(model)


def _rows(work: _Work, choice: Choice) -> list[Row]:
    site, rows = work.site, []
    for shape in dict.fromkeys([*work.buckets, *work.dense, *work.failed]):
        times = {"dense_micros": work.dense.get(shape), "sparse_micros": work.sparse.get(shape)}
        n = shape[0] if len(shape) == 1 else None
        if shape in work.failed:
            rows.append(site.row(work.failed[shape], n=n, **times))
            continue
        if shape not in work.buckets or not isinstance(site.module, Sparse):
            rows.append(site.row(f"not {100 * MARGIN:.0f}% faster with its kernel", n=n, **times))
            continue
        kernel = work.buckets[shape].kernel.artifact.manifest
        measured = kernel["measured"] or {}
        reason = "asked for" if choice == "sparse" else "faster with its kernel"
        rows.append(site.row(reason, n=kernel["n"], advice="sparse", kernel_micros=measured.get("micros"), **times))
    return rows or [site.row("nothing is known of what it is multiplied with: no example reached it")]
