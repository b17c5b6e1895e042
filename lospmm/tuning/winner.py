"""The winner of a tuning: built with its source text, verified, and compared with the libraries."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

from lospmm.artifact.manifest import Verified
from lospmm.cpu.verify import verify_on_cpu, verify_packed_on_cpu
from lospmm.errors import ToolchainFault
from lospmm.families.candidate import Candidate
from lospmm.gpu.bench import BESIDE, Bench
from lospmm.gpu.compare import Comparison, compare
from lospmm.gpu.messages import Measurement
from lospmm.settings import settings
from lospmm.toolchain.compile import Built, OnDisk
from lospmm.toolchain.data import data_of
from lospmm.tuning.build import Build, build, build_with_source, with_cubin, with_source
from lospmm.tuning.builders import PrefetchedBuilds
from lospmm.tuning.job import Job, check_verifier


@dataclass(frozen=True, slots=True, eq=False)
class BuiltWinner:
    """The built winner. ``runs`` is verified and timed; ``shipped`` waits for the build with source text."""

    runs: Built
    shipped: Callable[[], Build]
    build: Build | None = None  # None: another process builds it


def build_winner(job: Job, winner: Candidate, prefetched: PrefetchedBuilds) -> BuiltWinner:
    """Build the winner with its source text; in a builder if its kernel was kept since it was timed.

    Raises Unsupported, ToolchainFault and CancelledError.
    """
    check_verifier(job.options, is_unrolled=winner.is_unrolled)
    runs = prefetched.kept(winner)
    builders = None if runs is None else job.session.builders(job.options.emitter)
    with ExitStack() as stack:
        threads = ThreadPoolExecutor(1, thread_name_prefix="text")
        stack.callback(threads.shutdown, wait=False)
        if runs is None or builders is None or job.options.verify == "cpu":
            built = build(
                job.problem,
                winner,
                job.options.emitter,
                store=job.store,
                workers=job.session.workers,
                stage=job.stages.stage,
                progress=job.stages.count("compile"),
                cancel=job.stages.cancel,
            )
            return BuiltWinner(
                built.compiled, threads.submit(with_source, built, job.problem.device.arch).result, built
            )
        code = runs.cubin if isinstance(runs.cubin, bytes) else runs.cubin.read_bytes()
        for name in ("emit", "compile"):  # done as far as this tuning waits for them
            job.stages.progress(name, 1, 1)
        if isinstance(runs, OnDisk) and isinstance(runs.build, Build):
            packed = runs.build
            return BuiltWinner(runs, lambda: with_cubin(packed, code, data_of(code)))
        arguments = job.problem, winner, job.options.emitter, job.store
        coming = threads.submit(builders.call, build_with_source, *arguments, cancel=job.stages.cancel)

    def shipped() -> Build:
        made = coming.result()
        assert isinstance(made, Build)
        if made.binary.cubin != code:
            raise ToolchainFault(f"{made.compiled.entry}: built twice, and its code differs; run it again")
        return made

    return BuiltWinner(runs, shipped)


def verify_winner(job: Job, made: BuiltWinner, bench: Bench | None, compared: Comparison | None) -> Verified | None:
    """Verify the winner's results on the GPU or the CPU, as the options say. Raises VerificationFailed.

    A comparison has checked all of C on the GPU.
    """
    if job.options.verify == "none":
        return None
    if job.options.verify == "gpu" and compared is not None:
        return Verified("gpu", compared.max_relative_error, job.problem.n)
    with job.stages.stage("verify"):
        if job.options.verify == "cpu":
            built, progress = made.build, job.stages.count("verify")
            assert built is not None, "this process has built it"
            if built.kernel is not None:
                return verify_packed_on_cpu(job.problem, built.kernel, progress=progress)
            assert built.program is not None and built.emission is not None
            return verify_on_cpu(job.problem, built.program, built.emission, progress=progress)
        assert bench is not None
        bench.kernel_seconds = None
        error = bench.error_of(made.runs.cubin, made.runs.entry, made.runs.launch)
        return Verified("gpu", error, job.problem.n)


def compare_winner(
    job: Job, made: BuiltWinner, bench: Bench | None, before: Measurement | None = None
) -> Comparison | None:
    """Time the winner and the libraries in one run; the winner alone if the budget has no time for more.

    ``before`` is the measurement of a winner that was chosen by the times of another layer: the first of two.
    """
    if job.options.measure != "gpu":
        return None
    assert bench is not None
    bench.kernel_seconds = None
    with job.stages.stage("compare"):
        return compare(
            bench,
            made.runs,
            effort=BESIDE,
            names=job.compared,
            known=job.session.layers.times(job.problem, job.options),
            sputnik=settings().sputnik,
            before=before,
            progress=job.stages.progress,
        )
