"""Tuning by the REST service: its client, and the layers of a model that it tunes."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from lospmm.cli.options import Tuning, say
from lospmm.errors import LospmmError
from lospmm.model.folder import Batch, ModelFolder
from lospmm.settings import settings

if TYPE_CHECKING:
    from lospmm.client.client import Client
    from lospmm.client.progress import LayerProgress


def open_client(tuning: Tuning) -> "Client":
    """Open a client of the service that tunes, with its key or that of the settings; waits are reported on stderr."""
    from lospmm.client.client import Client  # HTTP takes a while to import

    assert tuning.address is not None
    return Client(tuning.address, tuning.key or settings().key, waits=say(quiet=tuning.quiet))


def fetch_layers(client: "Client", folder: ModelFolder, batch: Batch, progress: "LayerProgress | None") -> None:
    """Have the layers of a model tuned by the service, and put their kernels into the folder.

    Raises ToolchainFault where no report can be written, and what ``Client.each_layer`` raises.
    """
    kernels = {(kernel.layer, kernel.row.columns): kernel for kernel in batch.kernels}
    results = client.each_layer(
        batch.model,
        layers=batch.table,
        device=batch.device,
        seed=batch.seed,
        progress=progress,
        has=lambda kernel, digest: folder.held(kernel, digest) is not None,
        **asdict(batch.options),
    )
    for result in results:
        if result.skipped is not None or result.n is None:
            folder.skip(result.name, result.skipped or "")
            continue
        kernel = kernels[result.name, result.n]
        try:
            if result.error is not None:
                raise result.error
            assert result.digest is not None
            if result.kernel is None:
                held = folder.held(kernel, result.digest)
                assert held is not None, "it was there when the service was asked"
                folder.succeed(kernel, result.digest, held)
            else:
                folder.keep(kernel, result.digest, result.kernel.artifact)
        except LospmmError as error:
            folder.fail(kernel, result.digest, error)
