"""Sources of a model's kernels: tuned on this machine, or by a service."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace

import torch

from lospmm import client
from lospmm.artifact import kept
from lospmm.client.progress import LayerProgress
from lospmm.errors import BadRequest
from lospmm.gpu.detect import device_of
from lospmm.kernel import Kernel
from lospmm.nn.tuning import Tuner
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.stages import Progress
from lospmm.tuning import jobs
from lospmm.tuning.options import Options, check_served
from lospmm.tuning.request import Request
from lospmm.tuning.session import Session


def options_for(problem: Problem, options: Options) -> Options:
    """Return the options of a layer, with the type of its weights; float32 weights may run as tf32.

    Raises BadRequest if the options name a 16-bit type and the layer has another.
    """
    asked, own = options.dtype, problem.dtype.name
    if asked == own or (own == "float32" and asked == "tf32") or (asked == "float32" and problem.dtype.is_16_bit):
        return replace(options, dtype=asked if own == "float32" else own)
    raise BadRequest(f"dtype {asked}: its weights are {own}; convert the model first, or leave the option out")


def tuner_here(stack: ExitStack, device: str, options: Options, progress: LayerProgress | None) -> Tuner:
    """Tune on this machine, in processes that all layers share, until ``stack`` ends.

    Raises BadRequest for an unknown device.
    """
    gpu = device_of(device)
    store, session = kept.open_store(), stack.enter_context(Session(settings().workers))

    def request_of(problem: Problem) -> Request:
        return Request(problem, options_for(problem, options))

    def tune(problem: Problem, progress: Progress) -> Callable[[], Kernel]:
        # Tuning runs in another process, which needs the memory that PyTorch caches.
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        finish = jobs.chosen(request_of(problem), store=store, progress=progress, session=session)
        return lambda: Kernel(finish())

    def ahead(problem: Problem) -> None:
        jobs.search_ahead(request_of(problem), store=store, session=session)

    return Tuner(gpu, tune, progress, ahead, session)


def tuner_there(
    stack: ExitStack,
    service: tuple[str, str | None],
    device: str,
    options: Options,
    progress: LayerProgress | None,
) -> Tuner:
    """Tune by the service with this address and API key, connected until ``stack`` ends.

    The service needs the name of a device; auto takes the GPU of this machine. Raises BadRequest and Unsupported.
    """
    served_by = stack.enter_context(client.Client(*service))  # HTTP is imported here, which takes a while
    gpu = device_of(device)
    check_served(asdict(options))

    def tune(problem: Problem, progress: Progress) -> Callable[[], Kernel]:
        epilogue = problem.epilogue
        kernel = served_by.tune(
            problem.matrix,
            problem.n,
            device=gpu.name,
            convolution=problem.convolution,
            bias=epilogue.bias,
            relu=epilogue.relu,
            residual=epilogue.residual,
            progress=progress,
            **asdict(options_for(problem, options)),
        )
        return lambda: kernel

    return Tuner(gpu, tune, progress)
