"""``sparsify_``: runs the pruned layers of a model on tuned kernels if that is faster."""

from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import numpy as np
from torch import nn

from lospmm.client.progress import LayerProgress
from lospmm.errors import BadRequest
from lospmm.matrix.limit import MIN_SPARSITY, check_limit
from lospmm.nn.calling import Called, calling_of
from lospmm.nn.choice import MARGIN, Shape, TimedSite, choose_in_model, swap
from lospmm.nn.layer import call_parts
from lospmm.nn.layout import UNKNOWN, watch_layout
from lospmm.nn.one_copy import join_kernels, rounded
from lospmm.nn.report import ModelTimes, Report, Row
from lospmm.nn.site import Site, column_shapes, find_sites, forget_masks, freeable, learn_shapes
from lospmm.nn.sources import tuner_here, tuner_there
from lospmm.nn.sparse import check_model, misplaced, restore_
from lospmm.nn.tuning import Tuner
from lospmm.tuning.options import options_of

Choice = Literal["measured", "sparse"]


def sparsify_(
    model: nn.Module,
    example: Any = None,
    *,
    n: int | Iterable[int] = (),
    device: str = "auto",
    choice: Choice = "measured",
    called: Called = "eager",
    min_sparsity: float = MIN_SPARSITY,
    server: str | None = None,
    key: str | None = None,
    progress: LayerProgress | None = None,
    **options: Any,
) -> Report:
    """Tune the pruned layers of ``model`` and run them on their kernels, in place; return a row for each.

    ``example`` is an input of the model (a tensor, a tuple of arguments or a mapping of named ones), which gives the
    input shapes of every layer. ``n`` adds numbers of columns (tokens) for the kernels of products; without
    convolutions it suffices alone. ``device`` names the GPU to tune for; auto is this machine's. Layers with a share of
    zeros below ``min_sparsity`` stay as they are.

    With ``choice`` measured, layers are swapped that were timed to be faster, transposes included, on this GPU; others
    stay dense. ``called`` says how the model will be called: eager from Python, as a CUDA graph of that, compiled by
    ``torch.compile``, or as a compiled_graph. Layers are timed so, and with an example the whole model is too: layers
    become dense again until it is not slower than the dense model. With compiled, PyTorch forgets earlier compiled
    code. With ``choice`` sparse all layers are swapped; on a CPU the kernels' text is emulated, slowly.

    With ``memory="low"`` a 16-bit linear layer's kernels for all N are one cubin with A once, and serve every call; on
    a GPU its dense weight is moved to host memory, unless it is masked or shared. All such layers are swapped.

    ``server`` is the address of a service that tunes, ``key`` its API key. ``progress`` is called with (layer, stage,
    done, total); without it a terminal shows bars. ``options`` are those of ``lospmm.tune``; ``cache`` defaults to
    network.

    A layer that fails stays dense, with the reason in its row. A model that was swapped before is restored first.
    Raises BadRequest and Unsupported for a request that fits no layer; the model is then unchanged.
    """
    columns = _checked(model, n, example, min_sparsity, choice, called)
    with ExitStack() as stack:
        own = options_of({"cache": "network", **options})
        if server is None:
            tuner = tuner_here(stack, device, own, progress)
        else:
            tuner = tuner_there(stack, (server, key), device, own, progress)
        restore_(model)
        sites, rows = find_sites(model, min_sparsity)
        works = [TimedSite(site) for site in sites]
        is_low = own.memory == "low"
        choice = "sparse" if is_low else choice
        try:
            times = _swapped(model, works, tuner, example, columns, choice, called, is_low=is_low)
        except BaseException:
            restore_(model)
            forget_masks(sites)
            raise
    forget_masks(sites)
    call_parts(model)
    order = {name: at for at, (name, _) in enumerate(model.named_modules())}
    rows += [row for work in works for row in _rows(work, choice)]
    return Report(tuple(sorted(rows, key=lambda row: order.get(_module_of(row.layer, order), 0))), times)


def _checked(
    model: object, n: int | Iterable[int], example: object, min_sparsity: object, choice: object, called: Called
) -> Sequence[Shape]:
    """Check the arguments; return the columns in ``n``. Raises BadRequest."""
    check_model(model)
    check_limit(min_sparsity)
    if choice not in ("measured", "sparse"):
        raise BadRequest(f"choice {choice!r:.80}: choose measured or sparse")
    calling_of(called)
    columns = column_shapes(n)
    if isinstance(example, np.ndarray | str | bytes | int | float):
        raise BadRequest(
            f"the example is of type {type(example).__name__}: give a tensor, a tuple or a mapping of them"
        )
    if example is None and not columns:
        raise BadRequest("give an example of the model's input, or n, the columns that its products have")
    return columns


def _check_timed(sites: Sequence[Site], arch: str) -> None:
    """Raise BadRequest if no layer is where its kernels, for ``arch``, could be timed."""
    reasons = [misplaced(site.tensors.weight.device, arch, emulate=False) for site in sites]
    if all(reasons) and reasons:
        raise BadRequest(f"choice measured: the model cannot be timed: {reasons[0]}")


def _swapped(
    model: nn.Module,
    works: Sequence[TimedSite],
    tuner: Tuner,
    example: Any,
    columns: Sequence[Shape],
    choice: Choice,
    called: Called,
    *,
    is_low: bool,
) -> ModelTimes | None:
    """Tune the layers and swap the chosen ones; return the times of the whole model if these decided."""
    sites = [work.site for work in works]
    if choice == "measured":
        _check_timed(sites, tuner.device.arch)
    shapes = _shapes(model, sites, example, columns)
    if is_low:
        shapes = {name: list(dict.fromkeys(map(rounded, own))) for name, own in shapes.items()}
    layout = UNKNOWN if example is None else watch_layout(model, sites, example)
    freed = freeable(model, sites) if is_low else ()
    asked = [(work.site, shape) for work in works for shape in shapes[work.site.name]]
    buckets = tuner.buckets(asked, by_site=is_low)
    for work in works:
        for shape in shapes[work.site.name]:
            work.take(shape, next(buckets), will_time=choice == "measured")
        if is_low and work.buckets:  # while A is in memory, and on the GPU
            join_kernels(work, tuner.session)
            work.frees_weight = bool(work.buckets) and work.site.name in freed
        work.site.forget()
    if tuner.session is not None:
        tuner.session.close()
    if choice == "sparse":
        swap([work for work in works if work.buckets], layout)
        return None
    return choose_in_model(model, works, layout, example, called)


def _module_of(row: str, order: Collection[str]) -> str:
    return row if row in order else row.rpartition(".")[0]


def _shapes(model: nn.Module, sites: Sequence[Site], example: Any, columns: Sequence[Shape]) -> dict[str, list[Shape]]:
    """Return the input shapes of each weight, by site."""
    learned = {site.name: [] for site in sites} if example is None else learn_shapes(model, sites, example)
    for site in sites:
        if not site.is_convolution:
            learned[site.name] += [one for one in columns if one not in learned[site.name]]
    return learned


def _rows(work: TimedSite, choice: Choice) -> list[Row]:
    site, rows = work.site, []
    for shape in sorted({*work.buckets, *work.dense, *work.failed}):
        times = {"dense_micros": work.dense.get(shape), "sparse_micros": work.sparse.get(shape)}
        n = shape[0] if len(shape) == 1 else None
        if shape in work.failed:
            rows.append(site.row(work.failed[shape], n=n, **times))
            continue
        if shape not in work.buckets or not site.is_swapped:
            slower = f"not {100 * MARGIN:.0f}% faster with its kernel"
            rows.append(site.row("the model is faster with it dense" if work.given_back else slower, n=n, **times))
            continue
        kernel = work.buckets[shape].kernel.artifact.manifest
        measured = kernel["measured"] or {}
        reason = "asked for" if choice == "sparse" else "faster with its kernel"
        rows.append(site.row(reason, n=kernel["n"], advice="sparse", kernel_micros=measured.get("micros"), **times))
    return rows or [site.row("its input shape is unknown: no example reached it")]
