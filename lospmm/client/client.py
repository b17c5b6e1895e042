"""Client of the REST service: it tunes there, and returns the same ``Kernel`` as ``lospmm.tune``.

with Client("http://localhost:8000") as client:
    kernel = client.tune(weights, n=4096, device="h200")

An accepted job goes on whether anybody waits or not. A waiting call continues after a lost connection and after a
restart of the service; what the service has forgotten is posted again, which is the same job.
"""

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from lospmm.artifact import artifact
from lospmm.artifact.artifact import (
    BIAS_FILE,
    CUBIN_FILE,
    MANIFEST_FILE,
    MATRIX_FILE,
    SOURCE_FILES,
    SPACE_FILE,
    TUNING_FILE,
)
from lospmm.client.answers import Job, JobsPage, NamedKernel, error_of, parsed
from lospmm.client.connection import Connection, Gone
from lospmm.client.progress import Hear, LayerProgress, layer_stages, stages
from lospmm.client.uploads import Biases, ModelWeights, Numbers, Upload, read_uploads, table_of, upload_of
from lospmm.errors import BadRequest, LospmmError, ServiceFault
from lospmm.kernel import Kernel, whole_number
from lospmm.model.layer_table import ANY, LayerKernel, LayerSpec, LayerTable
from lospmm.problem.convolution import Convolution, written
from lospmm.problem.problem import columns_of
from lospmm.problem.weights import Weights, file_of, flattened
from lospmm.stages import Progress, silent
from lospmm.tuning.options import SERVED_OPTIONS, check_served, options_of

Result = TypeVar("Result")

#: Seconds between two reports of a job's progress; its end is reported at once.
POLL_SECONDS = 2.0

#: Seconds between two requests for a job if the service answers at once, as when it is stopping.
PAUSE_SECONDS = 0.3

#: Seconds that a service may take, once the time is up, to report a job's progress.
LAST_SECONDS = 2.0

#: The most times that a job or kernel is posted again after the service forgot it.
POSTS = 3

#: The parts of a kernel that have a URL, beside its source, and their files; not every kernel has all of them.
PARTS = {
    "cubin": CUBIN_FILE,
    "tuning": TUNING_FILE,
    "matrix": MATRIX_FILE,
    "space": SPACE_FILE,
    "bias": BIAS_FILE,
}

#: The most characters of a model's name that the service takes.
NAME_CHARACTERS = 200

_IDENTITY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class LayerResult:
    """A layer's kernel for ``n`` columns, why it has none, or why none was asked for.

    Equal layers have the same digest.
    """

    name: str
    digest: str | None = None
    kernel: Kernel | None = None
    error: LospmmError | None = None
    skipped: str | None = None
    n: int | None = None


class Client:
    """A client of the service at ``url``; ``key`` is its API key, if it needs one.

    A service that is unreachable, restarting or busy is waited for up to ``patience_seconds`` at a time; ``waits`` is
    called with the reason. Every method raises ServiceFault after that, or if the service failed; BadRequest if it
    refuses.
    """

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        patience_seconds: float = 300.0,
        waits: Callable[[str], None] | None = None,
    ) -> None:
        self._connection = Connection(url, key, patience_seconds=patience_seconds, waits=waits)

    def __enter__(self) -> "Client":
        """Return the client."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the client."""
        self.close()

    def close(self) -> None:
        """Close its connections. Jobs go on."""
        self._connection.close()

    def tune(
        self,
        weights: Weights,
        n: int | None = None,
        *,
        device: str = "auto",
        convolution: Convolution | None = None,
        bias: Numbers | None = None,
        relu: bool = False,
        residual: bool = False,
        tensor: str | None = None,
        transpose: bool = False,
        seed: int = 0,
        progress: Progress = silent,
        timeout_seconds: float | None = None,
        **options: Any,
    ) -> Kernel:
        """Tune a kernel on the service, as ``lospmm.tune`` does.

        ``device`` is by name, and auto is the GPU of the service. ``transpose`` takes the weights as in x out.

        Options other than SERVED_OPTIONS must have their defaults. Raises ServiceFault also if there is no kernel
        within ``timeout_seconds``: the job goes on, and the same call finds it.
        """
        columns = None if n is None else whole_number("n", n)
        row = replace(_row_of(columns, convolution, bias=False, relu=relu, residual=residual), transpose=transpose)
        given = {name: value for name, value in row.given.items() if name in ("conv", "relu", "residual")}
        query = {**_options_query(device, seed, options), "n": row.columns, **given}
        file = row.file(file_of(flattened(weights, convolution), tensor, seed))
        of_file = Path(weights).stem if isinstance(weights, str | PathLike) else "weights"
        upload = upload_of(tensor or of_file, file.matrix, file.values, bias)
        return self._tuned(upload, query, stages(progress), _deadline(timeout_seconds))

    def each_layer(
        self,
        model: ModelWeights,
        n: int | Iterable[int] | None = None,
        *,
        layers: LayerTable | None = None,
        name: str | None = None,
        device: str = "auto",
        convolution: Convolution | None = None,
        biases: Biases = False,
        relu: bool = False,
        residual: bool = False,
        min_sparsity: float | None = None,
        seed: int = 0,
        progress: LayerProgress | None = None,
        timeout_seconds: float | None = None,
        has: Callable[[LayerKernel, str], bool] | None = None,
        **options: Any,
    ) -> Iterator[LayerResult]:
        """Tune the layers of a model: a ``.safetensors``, ``.onnx`` or ``.pt``, a folder, or weights by name.

        ``layers`` gives each layer its own n or convolution, bias and epilogue, in place of those of all layers. With
        several n a layer has a result for each, and ``progress`` names like fc1.weight@8.
        ``biases`` are those of layers by name, or True: each layer of a model's file has the one beside its weight.
        Layers with a share of zeros below ``min_sparsity`` (0.4) are skipped, unless ``layers`` names them.

        A layer that is wrong, or that has no kernel in the end, has an ``error`` and the others their kernels; what is
        ``skipped`` comes last. Raises BadMatrix where the model cannot be read at all, and the rest as ``tune``.

        ``each_layer`` yields the results once all have ended, with one kernel in memory at a time; ``tune_model``
        returns them as a list. A kernel that the caller ``has``, with this digest, is not fetched.
        """
        query = _options_query(device, seed, {"cache": "network", **options})
        if layers is None:
            layers = LayerTable({ANY: _row_of(n, convolution, bias=biases is True, relu=relu, residual=residual)})
        elif n is not None or convolution is not None or biases or relu or residual:
            raise BadRequest("layers gives n, convolution, bias, relu and residual of each layer: leave these out")
        table = layers if min_sparsity is None else replace(layers, min_sparsity=min_sparsity)
        posted = read_uploads(model, seed, biases, table)
        uploads = [found for found in posted.layers.values() if isinstance(found, Upload)]
        params = {**query, "wait": 0, "name": (name or posted.name)[:NAME_CHARACTERS]}
        ended: dict[str, LayerResult] = {}
        if uploads:
            kernels = [kernel for upload in uploads for kernel in table.kernels_of(upload.layer)]
            deadline = _deadline(timeout_seconds)
            ended = self._again(lambda: self._run_model(uploads, table, kernels, params, progress, deadline))
        for layer, found in posted.layers.items():
            for kernel in table.kernels_of(layer):
                if isinstance(found, Upload):
                    yield self._with_kernel(ended[kernel.folder], kernel, found, has)
                else:
                    yield LayerResult(layer, error=found, n=kernel.row.columns)
        for layer, reason in posted.skipped.items():
            yield LayerResult(layer, skipped=reason)

    @wraps(each_layer)
    def tune_model(self, *arguments: Any, **options: Any) -> list[LayerResult]:
        """Return the results of ``each_layer`` as a list."""
        return list(self.each_layer(*arguments, **options))

    def kernel(self, digest: str) -> Kernel:
        """Fetch a finished kernel, and check every byte of its files.

        Raises Gone for one that the service does not have.
        """
        return self._kernel(_identity(digest), math.inf)

    def _kernel(self, digest: str, deadline: float) -> Kernel:
        where = f"{self._connection.url}: kernel {digest}"
        path = f"/v1/kernels/{digest}"
        described = parsed(dict[str, Any], self._connection.ask("GET", path, deadline=deadline))
        links, source = described.pop("links", None), SOURCE_FILES.get(str(described.get("emitter")))
        if not isinstance(links, dict) or source is None:
            raise ServiceFault(f"{where}: the answer is not the manifest of a kernel")
        del described["digest"]
        files = {
            name: self._connection.ask("GET", f"{path}/{part}", deadline=deadline).content
            for part, name in {**PARTS, "source": source}.items()
            if links.get(part) is not None
        }
        files[MANIFEST_FILE] = f"{json.dumps(described, indent=2)}\n".encode()
        try:
            return Kernel(artifact.from_files(files, where))
        except BadRequest as error:  # not the caller's fault
            raise ServiceFault(str(error)) from None

    def jobs(self, state: str | None = None) -> Iterator[Job]:
        """Yield the jobs of the service, the last queued first; models without their layers."""
        params = {} if state is None else {"state": state}
        while True:
            page = parsed(JobsPage, self._connection.ask("GET", "/v1/jobs", params=params))
            yield from page.jobs
            if page.next is None:
                return
            params = {**params, "cursor": page.next}

    def job(self, job_id: str, wait_seconds: float = 0.0) -> Job:
        """Return a job once it has ended, or after ``wait_seconds`` (600 s at most).

        Raises Gone for an unknown id.
        """
        return self._job(_identity(job_id), wait_seconds, math.inf)

    def _job(self, job_id: str, wait_seconds: float, deadline: float) -> Job:
        path, params, still_seconds = f"/v1/jobs/{job_id}", {"wait": wait_seconds}, wait_seconds + 60.0
        answer = self._connection.ask("GET", path, params=params, still_seconds=still_seconds, deadline=deadline)
        return parsed(Job, answer)

    def cancel(self, job_id: str) -> Job:
        """Cancel a job; what has ended stays as it is. Raises Gone for an unknown id."""
        return parsed(Job, self._connection.ask("DELETE", f"/v1/jobs/{_identity(job_id)}"))

    def _again(self, attempt: Callable[[], Result]) -> Result:
        lost = ""
        for _ in range(POSTS):
            try:
                return attempt()
            except Gone as error:  # another database or cache than before; posting again is the same job
                lost = str(error)
                time.sleep(PAUSE_SECONDS)
        raise ServiceFault(lost)

    def _follow(self, job_id: str, hear: Hear, deadline: float) -> Job:
        """Wait for a job to end; call ``hear`` with it every POLL_SECONDS."""
        while True:
            waits = max(0.0, min(POLL_SECONDS, deadline - time.monotonic()))
            job = self._job(job_id, waits, deadline + LAST_SECONDS)
            hear(job)
            if job.is_ended:
                return job
            if time.monotonic() >= deadline:
                raise ServiceFault(
                    f"{self._connection.url}/v1/jobs/{job_id}: {job.state} when the time was up; the job goes on, and "
                    "asking again finds it"
                )
            time.sleep(PAUSE_SECONDS)

    def _run_model(
        self,
        uploads: list[Upload],
        table: LayerTable,
        kernels: list[LayerKernel],
        params: Mapping[str, Any],
        progress: LayerProgress | None,
        deadline: float,
    ) -> dict[str, LayerResult]:
        """Return the results by the kernels' folders once all have ended, without the kernels."""
        files = [("matrix", upload.file) for upload in uploads]
        files += [("bias", upload.bias) for upload in uploads if upload.bias is not None]
        files.append(("layers", table_of(uploads, table)))
        job = parsed(Job, self._connection.ask("POST", "/v1/models", params=params, files=files, deadline=deadline))
        if not job.is_ended:
            job = self._follow(job.id, layer_stages(progress, [kernel.name for kernel in kernels]), deadline)
        if job.layers is None or len(job.layers) != len(kernels):
            raise ServiceFault(f"{self._connection.url}: the job {job.id} is not of the layers that were posted")
        found = {}
        for kernel, layer in zip(kernels, job.layers, strict=True):
            error = None if layer.error is None else error_of(layer.error, self._connection.url)
            if error is None and layer.state != "succeeded":
                error = ServiceFault(
                    f"{self._connection.url}: the layer is {layer.state}, and the service says not why"
                )
            found[kernel.folder] = LayerResult(kernel.layer, layer.digest, error=error, n=kernel.row.columns)
        return found

    def _tuned(self, upload: Upload, query: Mapping[str, Any], hear: Hear, deadline: float) -> Kernel:
        def attempt() -> Kernel:
            files = {"matrix": upload.file, **({} if upload.bias is None else {"bias": upload.bias})}
            params = {**query, "wait": 0}
            answer = self._connection.ask("POST", "/v1/kernels", params=params, files=files, deadline=deadline)
            if answer.status_code == 201:
                return self._fetched(parsed(NamedKernel, answer).digest, upload, deadline)
            job = self._follow(parsed(Job, answer).id, hear, deadline)
            if job.error is not None:
                raise error_of(job.error, self._connection.url)
            return self._fetched(job.id, upload, deadline)

        return self._again(attempt)

    def _fetched(self, digest: str, upload: Upload, deadline: float = math.inf) -> Kernel:
        """Fetch a kernel, which must be of the matrix that was posted."""
        kernel = self._kernel(digest, deadline)
        if kernel.artifact.manifest["fingerprint"] != upload.fingerprint:
            raise ServiceFault(f"{self._connection.url}: kernel {digest} is of another matrix than was posted")
        return kernel

    def _with_kernel(
        self, result: LayerResult, kernel: LayerKernel, upload: Upload, has: Callable[[LayerKernel, str], bool] | None
    ) -> LayerResult:
        """Fetch the kernel of a result, if there is one that the caller does not have."""
        if result.error is not None or result.digest is None or (has is not None and has(kernel, result.digest)):
            return result
        try:
            return replace(result, kernel=self._fetched(result.digest, upload))
        except LospmmError as error:
            return replace(result, error=error)


def _identity(text: str) -> str:
    """Return the id of a job or a kernel. Raises BadRequest for anything else: it becomes part of a URL."""
    if not _IDENTITY.fullmatch(text):
        raise BadRequest(f"{text[:80]!r} is not the id of a job or the digest of a kernel: 64 hexadecimal digits")
    return text


def _deadline(timeout_seconds: float | None) -> float:
    return math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds


def _options_query(device: str, seed: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a tuning, without those of a layer.

    Raises BadRequest, and Unsupported for what the service decides itself.
    """
    check_served(options)
    chosen = options_of(options)
    served = {name: getattr(chosen, name) for name in SERVED_OPTIONS}
    return {"device": str(device), "seed": whole_number("seed", seed), **served}


def _row_of(
    n: int | Iterable[int] | None, convolution: Convolution | None, *, bias: bool, relu: bool, residual: bool
) -> LayerSpec:
    """Return the row of all layers of a model, with one or several numbers of columns. Raises BadRequest."""
    if isinstance(n, Iterable):
        columns: int | tuple[int, ...] | None = tuple(whole_number("n", one) for one in n)
    else:
        columns = None if n is None else whole_number("n", n)
    columns_of(0, convolution)  # raises for what is no convolution
    conv = None if convolution is None else written(convolution)
    return LayerSpec(n=columns, conv=conv, bias=bias, relu=relu, residual=residual)
