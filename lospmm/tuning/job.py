"""The context of one tuning, and the time that it reserves for the steps after the search."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lospmm.codegen import check_target
from lospmm.errors import BadRequest
from lospmm.families.candidate import UNROLLED
from lospmm.gpu.libraries import BASELINES, DENSE_OF
from lospmm.problem.problem import Problem
from lospmm.stages import Stages
from lospmm.store import Store
from lospmm.toolchain.discover import check_arch, find_toolkit, required_host_compiler
from lospmm.tuning.budget import Budget
from lospmm.tuning.options import DENSE, Options
from lospmm.tuning.refusal import takes_unrolled, unrolled_refusal
from lospmm.tuning.session import Session

#: Time after the search, in microseconds of one core per nonzero: to build the winner and write its text, by emitter;
#: and to verify it on the CPU.
END_MICROS: Mapping[str, float] = MappingProxyType({"sass": 6.0, "ptx": 20.0, "cuda": 20.0})

VERIFY_MICROS = 50.0

#: Measurements of the winner after the search, to verify it and compare it with the libraries, which are loaded first.
MEASUREMENTS = 3

COMPARE_SECONDS = 2.5

DENSE_SECONDS = 1.0  # compared with cuBLAS of the same type only

#: The comparison is made if the budget is at least this times as long.
COMPARED_FROM = 2.0


@dataclass(frozen=True, slots=True)
class Job:
    """The context that the steps of a tuning share."""

    problem: Problem  # the emitter's (``build.for_emitter``)
    options: Options  # resolved
    store: Store
    stages: Stages
    session: Session
    budget: Budget

    @property
    def compare_seconds(self) -> float:
        """Seconds to compare with all libraries, or with the dense one only; 0: no time in the budget."""
        seconds, takes_dense = self.options.budget_seconds, DENSE in self.options.family_names
        if self.options.measure != "gpu":
            return 0.0
        if seconds is None or seconds >= COMPARED_FROM * COMPARE_SECONDS:
            return COMPARE_SECONDS
        return DENSE_SECONDS if takes_dense and seconds >= COMPARED_FROM * DENSE_SECONDS else 0.0

    @property
    def compared(self) -> tuple[str, ...]:
        """Names of the libraries to compare with; includes the dense one if its time is known."""
        own = DENSE_OF[self.problem.dtype.name]
        if self.compare_seconds >= COMPARE_SECONDS:
            return tuple(BASELINES)
        known = self.session.layers.times(self.problem, self.options)
        return (own,) if self.compare_seconds or own in known else ()


def reserve_seconds(job: Job) -> float:
    """Return the forecast of the steps after the search, in seconds, without MEASUREMENTS."""
    nonzeros, options = job.problem.matrix.nnz, job.options
    micros = END_MICROS[options.emitter] + (VERIFY_MICROS if options.verify == "cpu" else 0.0)
    return micros * 1e-6 * nonzeros + job.compare_seconds


def check_job(problem: Problem, options: Options) -> None:
    """Raise if no kernel can be built: for this architecture, or unrolled only and with too many nonzeros.

    An unrolled kernel has an instruction for each nonzero and each row, empty ones included. Raises BadRequest,
    Unsupported and ToolchainFault.
    """
    if options.kernel_names == (UNROLLED,) and (why := unrolled_refusal(problem, options.emitter)) is not None:
        raise BadRequest(f"{why}; other families may have a kernel for it")
    check_arch(find_toolkit(), problem.device.arch)
    check_target(options.emitter, problem.device.arch)
    check_verifier(options, is_unrolled=takes_unrolled(problem, options))


def check_verifier(options: Options, *, is_unrolled: bool) -> None:
    """Raise ToolchainFault if a kernel, unrolled or with A as data, is to be verified by g++ and there is none."""
    if options.verify == "cpu" and not (is_unrolled and options.emitter != "cuda"):
        required_host_compiler()
