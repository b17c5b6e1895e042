"""A service of pages alone: what they show lies in a dictionary, and a test may change it while a browser looks."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any

import numpy as np
import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse

from lospmm.artifact import artifact
from lospmm.artifact.artifact import SPACE_FILE, Artifact
from lospmm.artifact.manifest import MANIFEST_FILE, Measured
from lospmm.errors import LospmmError
from lospmm.matrix.csr import from_dense
from lospmm.problem.device import DEVICES, Clocks
from lospmm.problem.problem import Problem
from lospmm.store import Store
from lospmm.tuning import jobs
from lospmm.tuning.options import Options
from lospmm.tuning.request import Request as TuningRequest
from lospmm_server import schemas
from lospmm_server.origin import refuse_foreign_pages
from lospmm_server.pages import Pages, error_handler, pages_router
from lospmm_server.queries import JobRow, LayerState
from lospmm_server.schemas import KernelQuery, ModelQuery
from lospmm_server.uploads import Received, UploadRoom

NOON = datetime(2026, 1, 2, 12, 0, 0, tzinfo=UTC)
HOSTILE = "<script>alert(1)</script>\"'&"
PAGE = 3

MEASURED = Measured(
    micros=21.5,
    spread=0.01,
    noise=0.02,
    cold=True,
    bound_micros=9.25,
    cusparse_micros=64.5,
    cusparse_algorithm="CSR_ALG3",
    cublas_fp32_micros=43.0,
    cublas_tf32_micros=17.2,
    sputnik_micros=None,
    advice="dense",
    gpu="NVIDIA H200",
    clocks=Clocks(1980, 3201, 45, ()),
)


def digest_of(name: str) -> str:
    return sha256(name.encode()).hexdigest()


def tuned(store: Store, *, m: int = 16, k: int = 24, n: int = 50, emitter: str = "auto") -> Artifact:
    """A real kernel, of a matrix in which one element of five is left."""
    random = np.random.default_rng(1)
    dense = np.where(random.random((m, k)) < 0.2, random.standard_normal((m, k)), 0).astype(np.float32)
    request = TuningRequest(Problem(from_dense(dense), n, DEVICES["h200"]), Options(emitter=emitter, verify="cpu"))
    return jobs.tune(request, store=store)


def changed(kernel: Artifact, **fields: Any) -> Artifact:
    """The kernel with other fields in its manifest."""
    files = {**kernel.files, MANIFEST_FILE: json.dumps({**kernel.manifest, **fields}).encode()}
    return artifact.from_files(files, "the test's")


def timed(kernel: Artifact) -> Artifact:
    return changed(kernel, measured=asdict(MEASURED))


def without_space(kernel: Artifact) -> Artifact:
    files = {name: content for name, content in kernel.files.items() if name != SPACE_FILE}
    return artifact.from_files(files, "the test's")


@dataclass
class FakeView:
    """``found`` are the jobs, the newest first; ``change`` tells those who follow one of them."""

    found: dict[str, JobRow] = field(default_factory=dict)
    kernels: dict[str, Artifact] = field(default_factory=dict)
    submitted: list[tuple[str, bytes, KernelQuery]] = field(default_factory=list)
    fault: Exception | None = None
    version: int = 0
    listeners: int = 0

    async def jobs(self, _: Request, state: str | None, cursor: int | None) -> tuple[list[JobRow], int | None]:
        self._fail()
        chosen = [job for job in self.found.values() if state in (None, job.state)]
        first = cursor or 0
        following = first + PAGE if len(chosen) > first + PAGE else None
        return chosen[first : first + PAGE], following

    async def job(self, _: Request, job: str) -> JobRow:
        self._fail()
        if job in self.found:
            return self.found[job]
        if job in self.kernels:
            return JobRow(id=job, kind="kernel", state="succeeded")
        raise HTTPException(404, f"{job}: no job of this id; post its matrix (again)")

    async def kernel(self, _: Request, digest: str) -> Artifact:
        self._fail()
        if digest not in self.kernels:
            raise HTTPException(404, f"{digest}: no kernel of this digest")
        return self.kernels[digest]

    async def submit_model(self, request: Request, files: Received, query: ModelQuery) -> str:  # noqa: ARG002
        raise AssertionError("the real service has tests of it")

    async def cancel(self, _: Request, job: str) -> None:
        self.change(job, is_cancelling=True)

    async def submit(self, request: Request, files: Received, query: KernelQuery) -> str:  # noqa: ARG002
        self._fail()
        upload = files.matrices[0]
        content = await upload.read()
        digest = digest_of(f"{content!r}{query}")
        self.submitted.append((upload.filename or "", content, query))
        self.found = {digest: JobRow(id=digest, kind="kernel", state="queued", created=NOON), **self.found}
        return digest

    def change(self, job: str, **fields: Any) -> None:
        self.found[job] = replace(self.found[job], **fields)
        self.version += 1

    def _fail(self) -> None:
        if self.fault is not None:
            raise self.fault


def app_of(view: FakeView) -> FastAPI:
    async def admit(request: Request) -> None:
        refuse_foreign_pages(request, is_open=True)

    app, pages = FastAPI(docs_url=None, dependencies=[Depends(admit)]), Pages()
    app.state.uploads = UploadRoom()
    app.include_router(pages_router(pages, view))

    @app.get("/v1/jobs/{job}/events")
    async def events(job: str, request: Request) -> StreamingResponse:
        async def stream() -> AsyncIterator[str]:
            view.listeners += 1
            sent = -1
            try:
                while not await request.is_disconnected():
                    if sent != view.version:
                        sent = view.version
                        state = view.found[job].state
                        yield f"id: {sent + 1}\nevent: {state if state != 'running' else 'progress'}\ndata: {{}}\n\n"
                        if view.found[job].is_ended:
                            return
                    await asyncio.sleep(0.02)
            finally:
                view.listeners -= 1

        return StreamingResponse(stream(), media_type="text/event-stream")

    @app.get("/v1/kernels/{digest}/cubin")
    async def cubin(digest: str) -> None:
        raise HTTPException(404, f"{digest}: no kernel of this digest")

    for error in (LospmmError, RequestValidationError, 404, 405, HTTPException, Exception):
        app.add_exception_handler(error, error_handler(pages))  # type: ignore[arg-type]
    return app


@contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    """The URL of the application, served by a thread until the block ends."""
    config = uvicorn.Config(app, port=0, log_level="error", lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        deadline = time.monotonic() + 20
        while not server.started:
            assert thread.is_alive() and time.monotonic() < deadline, "the server did not start"
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(20)


def problem(detail: str) -> schemas.Problem:
    return schemas.Problem(
        type="/problems/bad-matrix", title="The matrix file cannot be used", status=422, detail=detail
    )


def a_model(kernel: str) -> JobRow:
    """Timed, not timed, under way, and one that cannot be read."""
    sizes: dict[str, Any] = {"m": 512, "k": 2048, "n": 4096, "nnz": 104_857}
    layers = (
        LayerState(name="encoder.0.weight", state="succeeded", digest=kernel, speedup=2.5, **sizes),
        LayerState(name="encoder.1.weight", state="succeeded", digest=digest_of("one"), speedup=0.8, **sizes),
        LayerState(
            name="encoder.2.weight", state="succeeded", digest=digest_of("two"), estimated_micros=7.846, **sizes
        ),
        LayerState(name="encoder.3.weight", state="running", digest=digest_of("three"), stage="compile", **sizes),
        LayerState(name=HOSTILE, state="failed", error=problem(f"{HOSTILE}: truncated or damaged archive")),
    )
    return JobRow(
        id=digest_of("model"),
        kind="model",
        state="running",
        name=f"bert {HOSTILE}",
        created=NOON,
        started=NOON + timedelta(seconds=1),
        attempts=1,
        stage="compile",
        progress={"layers": (4, 5)},
        request={"n": 4096, "device": {"name": "h200"}},
        layers=layers,
    )
