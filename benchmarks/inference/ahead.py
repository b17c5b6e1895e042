"""``lospmm.nn.sparsify_`` for benchmarks: where nothing is timed, the layers are tuned before it, many at a time.

Tuning is then the work of one core, and ``sparsify_`` finds the kernels ready in the store. They are not verified: what
each computes in the network is compared with float64 by ``benchmarks.inference.variants``.
"""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

from torch import nn

from lospmm.artifact import kept
from lospmm.errors import LospmmError, NothingFits
from lospmm.gpu.detect import own_gpu_id
from lospmm.gpu.exclusive import exclusive
from lospmm.kernel import Kernel
from lospmm.nn.calling import Called
from lospmm.nn.report import Report
from lospmm.nn.site import find_sites, learn_shapes
from lospmm.nn.sources import options_for
from lospmm.nn.sparsify import sparsify_
from lospmm.nn.tuning import Tuner
from lospmm.problem.device import DeviceSpec
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.stages import Progress
from lospmm.tuning import jobs
from lospmm.tuning.options import Options
from lospmm.tuning.request import Request

#: As of ``sparsify_``.
MIN_SPARSITY = 0.6


def options_of(measure: str, budget_seconds: float | None) -> Options:
    verify = "none" if measure == "none" else "auto"
    return Options(measure=measure, verify=verify, budget_seconds=budget_seconds)


@dataclass(frozen=True, slots=True)
class Way:
    """How models are tuned. ``alone`` is entered to have the GPU for oneself; None where there is none."""

    device: DeviceSpec
    options: Options
    alone: Callable[[], AbstractContextManager[None]] | None


def gpu_alone() -> Callable[[], AbstractContextManager[None]]:
    """What keeps other tunings and benchmarks off this machine's GPU."""
    return partial(exclusive, settings().cache_dir, gpu=own_gpu_id())


def sparsify(model: nn.Module, example: Any, called: Called, *, way: Way, **asked: Any) -> Report:
    """In place, with what else is ``asked`` of it. On a CPU every layer has kernels: there is no time to choose by."""
    device, options = way.device, way.options
    given = {name: getattr(options, name) for name in ("measure", "verify", "budget_seconds")} | asked
    if way.alone is None:
        return sparsify_(model, example, device=device.name, choice="sparse", **given)
    if options.measure != "none":  # each tuning has the GPU for itself
        return sparsify_(model, example, device=device.name, called=called, **given)
    print(tune_ahead(model, example, device, options), flush=True)
    with way.alone():
        return sparsify_(model, example, device=device.name, called=called, **given)


def tune_ahead(model: nn.Module, example: Any, device: DeviceSpec, options: Options) -> str:
    """Return the seconds, and how many problems were tuned now and failed; ``sparsify_`` then says why."""
    started, failed, store = time.monotonic(), 0, kept.open_store()
    asked = [Request(problem, options_for(problem, options)) for problem in problems(model, example, device)]
    missing = [request for request in asked if kept.find(request.digest, store) is None]
    workers = max(1, min(len(missing), len(os.sched_getaffinity(0))))
    if missing:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:  # a fork would share the context
            failed = sum(not future.result() for future in as_completed(pool.submit(_tune, one) for one in missing))
    return f"{len(missing)} tuned ahead, {failed} failed, {workers} workers: {time.monotonic() - started:.1f} s"


def problems(model: nn.Module, example: Any, device: DeviceSpec) -> Iterator[Problem]:
    """What ``sparsify_`` will ask for."""
    asked: list[Problem] = []

    def note(problem: Problem, _progress: Progress) -> Callable[[], Kernel]:
        asked.append(problem)
        raise NothingFits("only asked")

    tuner = Tuner(device, note, lambda *_: None)
    sites, _ = find_sites(model, MIN_SPARSITY)
    shapes = learn_shapes(model, sites, example)
    for site in sites:
        for shape in shapes[site.name]:
            try:
                tuner.bucket(site, shape)
            except NothingFits:
                yield asked.pop()
            except LospmmError:  # which has no kernel, as its row will say
                asked.clear()


def _tune(request: Request) -> bool:
    try:
        jobs.tune(request, store=kept.open_store())
    except LospmmError:
        return False
    return True
