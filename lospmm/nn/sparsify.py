"""``sparsify_``: the pruned layers of a model on tuned kernels, where that is faster.

Layers are chosen by their own times first, then all together by the model's: as many as it is fastest with, in the
order of what each gains.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

import numpy as np
from torch import nn

from lospmm.client.events import LayerProgress
from lospmm.errors import BadRequest, LospmmError
from lospmm.kernel import whole_number
from lospmm.nn import layer, whole
from lospmm.nn.attention import open_short_cuts
from lospmm.nn.calling import Called, calling_of
from lospmm.nn.choice import MARGIN, Shape, TimedSite, call_parts, choose, settle, swap
from lospmm.nn.layer import Sparse
from lospmm.nn.layout import UNKNOWN, Layout, watch_layout
from lospmm.nn.place import forget_mask
from lospmm.nn.report import ModelTimes, Report, Row
from lospmm.nn.site import Site, find_sites, learn_shapes
from lospmm.nn.tuning import Tuner, tuner_here, tuner_there
from lospmm.problem.problem import check_columns
from lospmm.tuning.dense import left_to_cublas
from lospmm.tuning.options import Options, options_of

Choice = Literal["measured", "sparse"]


def sparsify_(
    model: nn.Module,
    example: Any = None,
    *,
    n: int | Iterable[int] = (),
    device: str = "auto",
    choice: Choice = "measured",
    called: Called = "eager",
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
    cannot be timed here stays dense. ``called`` says how the model will be: eager from Python, as a CUDA graph of that,
    compiled by ``torch.compile``, or as a compiled_graph. Layers are timed so, and with an example the whole model is
    too: layers are given back until it is not slower than the dense one. With compiled, PyTorch forgets what it
    compiled before. With ``choice`` sparse all are swapped, and on a CPU the kernels' text is run, slowly.

    ``server`` is the address of a service that tunes, ``key`` its API key. ``progress`` is told (layer, stage, done,
    total); without it bars are shown on a terminal. ``options`` are those of ``lospmm.tune``;
    ``cache`` is network unless it is given.

    A layer that fails stays dense, with the reason in its row. Raises BadRequest and Unsupported for a request that no
    layer can have; the model is then as it was. A model that was swapped before is given its dense layers back first.
    """
    columns = _checked(model, n, example, min_sparsity, choice, called)
    with ExitStack() as stack:
        tuner = _tuner(stack, (server, key), device, options_of({"cache": "network", **options}), progress)
        restore_(model)
        sites, rows = find_sites(model, min_sparsity)
        works = [TimedSite(site) for site in sites]
        try:
            times = _swapped(model, works, tuner, example, columns, choice, called)
        except BaseException:
            restore_(model)
            for site in sites:
                forget_mask(site.module, site.weight)
            raise
    _finish(model, works)
    order = {name: at for at, (name, _) in enumerate(model.named_modules())}
    rows += [row for work in works for row in _rows(work, choice)]
    return Report(tuple(sorted(rows, key=lambda row: order.get(_module_of(row.layer, order), 0))), times)


def check_model(model: object) -> None:
    """Raises BadRequest for what is none."""
    if not isinstance(model, nn.Module):
        raise BadRequest(f"the model is of type {type(model).__name__}: give a torch.nn.Module")


def _checked(
    model: object, n: int | Iterable[int], example: object, min_sparsity: object, choice: object, called: Called
) -> Sequence[Shape]:
    """The columns that ``n`` names. Raises BadRequest for what is none of these arguments."""
    check_model(model)
    if not isinstance(min_sparsity, int | float) or not 0 <= min_sparsity <= 1:
        raise BadRequest(f"min_sparsity is {min_sparsity!r:.80}: give a share of zeros, from 0 to 1")
    if choice not in ("measured", "sparse"):
        raise BadRequest(f"choice {choice!r:.80}: choose measured or sparse")
    calling_of(called)
    columns = _columns(n)
    if isinstance(example, np.ndarray | str | bytes | int | float):
        raise BadRequest(
            f"the example is of type {type(example).__name__}: give a tensor, a tuple or a mapping of them"
        )
    if example is None and not columns:
        raise BadRequest("give an example of the model's input, or n, the columns that its products have")
    return columns


def _swapped(
    model: nn.Module,
    works: Sequence[TimedSite],
    tuner: Tuner,
    example: Any,
    columns: Sequence[Shape],
    choice: Choice,
    called: Called,
) -> ModelTimes | None:
    """Tune the layers, and swap those that are chosen; the times of the whole model, where they chose."""
    sites = [work.site for work in works]
    shapes = _shapes(model, sites, example, columns)
    layout = UNKNOWN if example is None else watch_layout(model, sites, example)
    _tune(works, shapes, tuner, choice)
    tuner.close()
    if choice == "sparse":
        swap([work for work in works if work.buckets], layout)
        return None
    return _choose(model, works, layout, example, called)


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
    """By the service of this address and key, or here. ``stack`` closes the connection, or ends what tunes."""
    address, key = service
    if address is None:
        return tuner_here(stack, device, options, progress)
    from lospmm.client.client import Client  # HTTP takes a while to import

    return tuner_there(stack.enter_context(Client(address, key)), device, options, progress)


def _columns(n: int | Iterable[int]) -> list[Shape]:
    """Raises BadRequest."""
    are_several = isinstance(n, Iterable) and not isinstance(n, str) and getattr(n, "ndim", 1) > 0
    columns = [whole_number("n", one) for one in (n if are_several else [n])]  # type: ignore[union-attr]
    for one in columns:
        check_columns(one)
    return [(one,) for one in columns]


def _shapes(model: nn.Module, sites: Sequence[Site], example: Any, columns: Sequence[Shape]) -> dict[str, list[Shape]]:
    """What each weight is multiplied with, by its site's name."""
    learned = {site.name: [] for site in sites} if example is None else learn_shapes(model, sites, example)
    for site in sites:
        if not site.is_convolution:
            learned[site.name] += [one for one in columns if one not in learned[site.name]]
    return learned


def _tune(works: Sequence[TimedSite], shapes: Mapping[str, Sequence[Shape]], tuner: Tuner, choice: Choice) -> None:
    asked = [(work, shape) for work in works for shape in shapes[work.site.name]]
    buckets = tuner.buckets([(work.site, shape) for work, shape in asked])
    for (work, shape), bucket in zip(asked, buckets, strict=True):
        if isinstance(bucket, LospmmError):
            work.failed[shape] = str(bucket)
        elif choice == "measured" and (why := left_to_cublas(bucket.kernel.artifact.manifest)) is not None:
            work.failed[shape] = why
        else:
            work.buckets[shape] = bucket


def _choose(
    model: nn.Module, works: Sequence[TimedSite], layout: Layout, example: Any, called: Called
) -> ModelTimes | None:
    """Swap the layers that are to be. The times of the whole model, where there is an example and a layer is faster.

    Raises Unsupported where the model cannot be called so.
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


def _finish(model: nn.Module, works: Sequence[TimedSite]) -> None:
    """Have everything around the swapped layers call them."""
    for work in works:
        if not isinstance(work.site.module, Sparse):
            forget_mask(work.site.module, work.site.weight)
    call_parts(model)


def _rows(work: TimedSite, choice: Choice) -> list[Row]:
    site, rows = work.site, []
    for shape in dict.fromkeys([*work.buckets, *work.dense, *work.failed]):
        times = {"dense_micros": work.dense.get(shape), "sparse_micros": work.sparse.get(shape)}
        n = shape[0] if len(shape) == 1 else None
        if shape in work.failed:
            rows.append(site.row(work.failed[shape], n=n, **times))
            continue
        if shape not in work.buckets or not isinstance(site.module, Sparse):
            slower = f"not {100 * MARGIN:.0f}% faster with its kernel"
            rows.append(site.row("the whole model is faster so" if work.given_back else slower, n=n, **times))
            continue
        kernel = work.buckets[shape].kernel.artifact.manifest
        measured = kernel["measured"] or {}
        reason = "asked for" if choice == "sparse" else "faster with its kernel"
        rows.append(site.row(reason, n=kernel["n"], advice="sparse", kernel_micros=measured.get("micros"), **times))
    return rows or [site.row("nothing is known of what it is multiplied with: no example reached it")]
