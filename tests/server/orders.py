"""Orders, models and claims for tests of the queue: job number 1, number 2, ..."""

from lospmm.errors import NothingFits
from lospmm_server import queries, queue
from lospmm_server.database import Database
from lospmm_server.keys import Caller, Terms
from lospmm_server.problems import describe
from lospmm_server.queue import Claim, KernelOrder, Layer, ModelOrder


def order(number: int, *, gpu: str = "", is_kept: bool = False) -> KernelOrder:
    return KernelOrder(f"{number:064x}", {"m": 4, "k": 8, "nnz": number}, gpu, is_kept)


def model(*orders: KernelOrder | None, name: str = "net") -> ModelOrder:
    bad = describe(NothingFits("not a matrix"))
    layers = [Layer(f"layer{at}", one, None if one else bad) for at, one in enumerate(orders)]
    return ModelOrder(f"{len(orders):x}{name}".encode().hex().ljust(64, "0"), name, 128, "h200", layers)


def submitted(database: Database, *numbers: int, key: str = "", weight: int = 1) -> None:
    for number in numbers:
        queue.submit(database, order(number), Caller(key, terms=Terms(weight=weight)))


def claimed(database: Database, owner: str = "worker", gpu: str = "") -> Claim:
    found = queue.claim(database, owner, gpu)
    assert found is not None
    return found


def state(database: Database, number: int) -> str:
    job = queries.find_job(database, order(number).digest)
    assert job is not None
    return job.state
