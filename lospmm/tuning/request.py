"""A tuning request: a problem with options, and the digest that names its artifact."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from lospmm.families.candidate import UNROLLED
from lospmm.gpu.detect import own_gpu
from lospmm.matrix.readers import Values
from lospmm.problem.dtype import dtype_named
from lospmm.problem.problem import Problem, layer_fields
from lospmm.problem.values import VALUE_TYPES
from lospmm.settings import settings
from lospmm.toolchain.compilers import compiler_name
from lospmm.tuning.build import for_emitter
from lospmm.tuning.options import ARGUMENTS, Options, decisive_fields, options_of
from lospmm.tuning.rankers import digests, with_ranker
from lospmm.tuning.refusal import unrolled_refusal
from lospmm.version import __version__

#: Part of every request's digest: increase it when the same request gives another artifact than before.
ARTIFACT_FORMAT = 27


@dataclass(frozen=True)
class Request:
    """A tuning request: a problem, and the options to tune it with."""

    problem: Problem
    options: Options
    values: Values = "stored"
    seed: int = 0  # of random values, for a matrix without values
    is_settled: bool = False  # whether the options are resolved for the machine that will tune

    def __post_init__(self) -> None:
        """Set the problem's types to the options'.

        Raises BadRequest for types without kernels, BadMatrix if A's values exceed their range.
        """
        self.options.check_dtype()
        dtype, sums = dtype_named(self.options.dtype), dtype_named(self.options.sums)
        values = VALUE_TYPES.get(self.options.values)
        if (self.problem.dtype, self.problem.sums, self.problem.values) != (dtype, sums, values):
            object.__setattr__(self, "problem", replace(self.problem, dtype=dtype, sums=sums, values=values))

    @cached_property
    def resolved(self) -> Options:
        """The options resolved for this machine. Raises BadRequest if they need a GPU that it lacks."""
        return self.options if self.is_settled else self._resolved(own_gpu())

    def settled(self, gpu: str | None = None) -> "Request":
        """Return the request resolved for a machine with the GPU ``gpu``; None: for this machine.

        Raises BadRequest as ``resolved``.
        """
        options = self.resolved if gpu is None else self._resolved(gpu)
        return replace(self, options=options, is_settled=True)

    def _resolved(self, gpu: str | None) -> Options:
        device = self.problem.device
        return with_ranker(self.options.resolved(device, gpu), device)

    @cached_property
    def searched(self) -> Problem:
        """The problem with the emitter's registers (``build.for_emitter``). Raises as ``resolved``."""
        return for_emitter(self.problem, self.resolved.emitter)

    @cached_property
    def digest(self) -> str:
        """The sha256 over everything that decides the artifact: its name in the store and in URLs.

        Raises BadRequest as ``resolved``, ToolchainFault without a toolkit.
        """
        decisive = {
            "version": __version__,
            "format": ARTIFACT_FORMAT,
            "fingerprint": self.problem.matrix.fingerprint,
            "n": self.problem.n,
            "device": asdict(self.problem.device),
            "values": self.values,
            "seed": self.seed if self.values == "drawn" else None,
            "options": decisive_fields(self.resolved),
            **digests(self.problem, self.resolved),
            "compiler": compiler_name(self.resolved.emitter, self.problem.device.arch),
            **layer_fields(self.problem),
        }
        if UNROLLED in self.resolved.kernel_names and unrolled_refusal(self.searched, self.resolved.emitter):
            decisive["unrolled"] = False  # the limits are settings
        if not settings().fetch_code:
            decisive["fetch_code"] = False
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def request_of(problem: Problem, given: Mapping[str, Any], values: Values, seed: int) -> Request:
    """Return a request with the options ``given`` by name, as keyword arguments. Raises BadRequest."""
    return Request(problem, options_of(given, ARGUMENTS), values, seed)
