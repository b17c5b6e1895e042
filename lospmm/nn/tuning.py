"""Kernels for the sites of a model: from the store, tuned here, or by a service."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from lospmm import jobs
from lospmm.device import DeviceSpec, find_device
from lospmm.epilogue import PLAIN, Epilogue, epilogue_of
from lospmm.errors import Unsupported
from lospmm.job_events import LayerProgress
from lospmm.kernel import Kernel
from lospmm.model import Problem, ceil_div
from lospmm.nn.bound import Bucket, bias_digest
from lospmm.nn.dtypes import dtype_of, options_for
from lospmm.nn.layer import way_of
from lospmm.nn.site import Site, convolution_of
from lospmm.options import SERVED_OPTIONS, Options, check_served
from lospmm.progress import reported
from lospmm.runtime.detect import detect_device
from lospmm.stages import Progress

if TYPE_CHECKING:
    from lospmm.client import Client

#: The kernel of a problem; told its progress.
Tune: TypeAlias = Callable[[Problem, Progress], Kernel]

#: Of a bucket's columns, the share that a call must fill where no time says better.
LEAST_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Tuner:
    """Makes the kernels of one ``sparsify_``. ``progress`` None shows bars on a terminal."""

    device: DeviceSpec
    tune: Tune
    progress: LayerProgress | None

    def bucket(self, site: Site, shape: tuple[int, ...]) -> Bucket:
        """The kernel of a site for B of (n,) columns, or for an input (batch, channels, height, width).

        Raises what ``jobs.tune`` raises, or ``Client.tune``.
        """
        epilogue = epilogue_of(site.tensors.bias_values(), relu=site.relu, residual=site.adds)
        with self._told(site.name) as progress:
            try:
                return self._bucket(site, shape, epilogue, progress)
            except Unsupported:
                if epilogue == PLAIN:
                    raise
            return self._bucket(site, shape, PLAIN, progress)

    def _bucket(self, site: Site, shape: tuple[int, ...], epilogue: Epilogue, progress: Progress) -> Bucket:
        matrix, dtype = site.matrix, dtype_of(site.tensors.weight)
        assert dtype is not None, "sites are of a type that kernels take"
        values = site.tensors.bias_values()
        fuses = epilogue != PLAIN or (values is None and not site.relu and not site.adds)
        bias = None if epilogue == PLAIN or values is None else bias_digest(values)
        if not site.is_convolution:
            (n,) = shape
            kernel = self.tune(Problem(matrix, n, self.device, epilogue=epilogue, dtype=dtype), progress)
            call = ((matrix.k, n), site.relu, False, ())
            return Bucket(kernel, call, (matrix.m, n), max(1, int(n * LEAST_SHARE)), fuses, bias)
        window = convolution_of(site, shape)
        kernel = self.tune(Problem(matrix, window.n, self.device, window, epilogue, dtype), progress)
        way = way_of(site.module)
        assert way is not None
        flat = tuple(number for pair in way for number in pair)
        least = ceil_div(shape[0], 2) * window.pixels
        return Bucket(kernel, (shape, site.relu, site.adds, flat), window.output_shape(matrix.m), least, fuses, bias)

    @contextmanager
    def _told(self, layer: str) -> Iterator[Progress]:
        told = self.progress
        if told is not None:
            yield lambda stage, done, total: told(layer, stage, done, total)
            return
        with reported(quiet=not _is_terminal()) as progress:
            yield progress


def _is_terminal() -> bool:
    return sys.stderr.isatty()


def tuner_here(device: str, options: Options, progress: LayerProgress | None) -> Tuner:
    """Raises BadRequest for a device that there is not."""
    gpu = detect_device() if device == "auto" else find_device(device)
    store = jobs.open_store()

    def tune(problem: Problem, told: Progress) -> Kernel:
        # Tuning runs in a process of its own, which needs memory that PyTorch has no use for just now.
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        return Kernel(jobs.tune(jobs.Request(problem, options_for(problem, options)), store=store, progress=told))

    return Tuner(gpu, tune, progress)


def tuner_there(client: "Client", device: str, options: Options, progress: LayerProgress | None) -> Tuner:
    """By a service, which is told the device's name; "auto" needs a GPU here. Raises BadRequest and Unsupported."""
    gpu = detect_device() if device == "auto" else find_device(device)
    check_served(asdict(options))

    def tune(problem: Problem, told: Progress) -> Kernel:
        own = options_for(problem, options)
        served = {name: getattr(own, name) for name in SERVED_OPTIONS}
        epilogue = problem.epilogue
        return client.tune(
            problem.matrix,
            problem.n,
            device=gpu.name,
            convolution=problem.convolution,
            bias=epilogue.bias,
            relu=epilogue.relu,
            residual=epilogue.residual,
            progress=told,
            **served,
        )

    return Tuner(gpu, tune, progress)
