"""Generated Einsum kernels beside PyTorch: sampled products of a graph, and sparse convolutions of a point cloud."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.einsum_cases import power_law
from benchmarks.einsum_clock import LIMITS, TYPES, commit
from lospmm.einsums import EinsumKernel, einsum_kernel
from lospmm.errors import LospmmError
from lospmm.gpu.detect import own_gpu
from lospmm.gpu.driver import open_driver
from lospmm.gpu.protocol import Driver
from lospmm.gpu.timing import FULL, copies_beyond_l2, time_rotating
from lospmm.problem.device import find_device

#: Voxels along each side of the room, and the neighbours of one, itself among them.
SIDE = 400
OFFSETS = np.stack(np.meshgrid(*[[-1, 0, 1]] * 3, indexing="ij"), axis=-1).reshape(-1, 3)

Map = Mapping[str, NDArray[np.int64]]


def edges() -> tuple[Map, dict[str, int]]:
    """The nonzeros of a graph of 65536 nodes, by row: where products are sampled."""
    matrix = power_law(65536, 16, 1)
    return {"r": matrix.rows_of_nonzeros().astype(np.int64), "c": matrix.indices.astype(np.int64)}, {"nodes": matrix.m}


def neighbours(points: int) -> tuple[Map, dict[str, int]]:
    """Voxels on spheres and walls of a room, each with those of its 27 neighbours that are there."""
    random = np.random.default_rng(0)
    directions = random.standard_normal((points, 3))
    spheres = directions / np.linalg.norm(directions, axis=1, keepdims=True)
    centres, radii = random.uniform(60, SIDE - 60, (24, 3)), random.uniform(8, 40, 24)
    which = random.integers(0, 24, points)
    on_spheres = centres[which] + radii[which, np.newaxis] * spheres
    on_walls = random.uniform(1, SIDE - 2, (points // 2, 3))
    on_walls[np.arange(len(on_walls)), random.integers(0, 3, len(on_walls))] = 1
    voxels = np.unique(np.concatenate((on_spheres, on_walls)).astype(np.int64).clip(1, SIDE - 2), axis=0)
    key = (voxels[:, 0] * SIDE + voxels[:, 1]) * SIDE + voxels[:, 2]  # ascending: np.unique sorts rows
    steps = (OFFSETS[:, 0] * SIDE + OFFSETS[:, 1]) * SIDE + OFFSETS[:, 2]
    wanted = key[np.newaxis] + steps[:, np.newaxis]
    at = np.searchsorted(key, wanted).clip(max=len(key) - 1)
    w, o = np.nonzero(key[at] == wanted)
    return {"o": o, "i": at[w, o], "w": w}, {"points": len(key)}


@dataclass(frozen=True, slots=True)
class Work:
    """``shapes`` are those of both inputs and of the output, by the sizes that ``make`` found."""

    text: str
    make: Callable[[], tuple[Map, dict[str, int]]]
    shapes: Callable[[dict[str, int]], dict[str, tuple[int, ...]]]
    dtypes: tuple[str, ...]


def _sddmm(width: int) -> Work:
    def shapes(sizes: dict[str, int]) -> dict[str, tuple[int, ...]]:
        return {"X": (sizes["nodes"], width), "Y": (sizes["nodes"], width)}

    return Work("V[p] += X[r[p],d] * Y[c[p],d]", edges, shapes, ("float32", "float16"))


def _convolution(points: int, channels: int) -> Work:
    def shapes(sizes: dict[str, int]) -> dict[str, tuple[int, ...]]:
        wide = (sizes["points"], channels)
        return {"I": wide, "W": (27, channels, channels), "O": wide}

    dtypes = ("float32", "tf32", "float16")
    return Work("O[o[p],f] += I[i[p],c] * W[w[p],c,f]", lambda: neighbours(points), shapes, dtypes)


GENERATED: Mapping[str, Work] = MappingProxyType(
    {
        "SDDMM, graph 65536, 64 wide": _sddmm(64),
        "SDDMM, graph 65536, 128 wide": _sddmm(128),
        "point cloud, 32 channels": _convolution(100_000, 32),
        "point cloud, 64 channels": _convolution(100_000, 64),
        "point cloud, 128 channels": _convolution(100_000, 128),
    }
)


def kernels(name: str) -> Iterator[tuple[str, EinsumKernel]]:
    work = GENERATED[name]
    known, sizes = work.make()
    for dtype in work.dtypes:
        operands: dict[str, Any] = {**known, **work.shapes(sizes)}
        yield dtype, einsum_kernel(work.text, dtype=dtype, device=own_gpu() or "h200", **operands)


def build(name: str) -> None:
    for _, kernel in kernels(name):
        kernel.cubin()


def run(name: str) -> Iterator[dict[str, Any]]:
    """A line for each type."""
    driver = open_driver()
    with ExitStack() as stack:
        stack.enter_context(torch.cuda.stream(torch.cuda.ExternalStream(driver.stream)))
        for dtype, kernel in kernels(name):
            yield _line(driver, name, dtype, kernel)
        driver.synchronize()


def _line(driver: Driver, name: str, dtype: str, kernel: EinsumKernel) -> dict[str, Any]:
    operands, kind = kernel.operands, TYPES[dtype]
    shapes = [operands.shapes[one] for one in kernel.inputs]
    size = sum(int(np.prod(shape)) for shape in (*shapes, kernel.output_shape)) * kind.itemsize
    count = max(2, copies_beyond_l2(size, driver.l2_bytes()))
    torch.manual_seed(0)
    drawn = [torch.rand(shape, device="cuda") * 2 - 1 for shape in shapes]
    inputs = [[tensor.to(kind, copy=True) for tensor in drawn] for _ in range(count)]
    outputs = [torch.empty(kernel.output_shape, device="cuda", dtype=kind) for _ in range(count)]
    maps = {key: torch.from_numpy(array).cuda() for key, array in operands.indices.items()}
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    libraries = _sampled(maps) if "r" in maps else _scattered(maps)
    doubles = [tensor.double() for tensor in inputs[0]]
    reference = next(iter(libraries.values()))
    expected = torch.zeros(kernel.output_shape, device="cuda", dtype=torch.float64)
    around = expected.clone()
    reference(*doubles, expected)
    reference(*(tensor.abs() for tensor in doubles), around)

    def timed(enqueue: Callable[[int], None]) -> dict[str, Any]:
        try:
            outputs[0].fill_(float("nan"))
            enqueue(0)
            driver.synchronize()
            off = ((outputs[0].double() - expected).abs() / around.clamp(min=1e-30)).nan_to_num(nan=1e9)
            error = float(off.max())
            if not error <= LIMITS[dtype]:
                return {"micros": None, "error": None, "failure": f"wrong by {error:.1e}"}
            timing = time_rotating(driver, enqueue, copies=count, effort=FULL)
        except (LospmmError, RuntimeError) as fault:
            return {"micros": None, "error": None, "failure": str(fault)[:300]}
        return {"micros": round(timing.micros, 3), "error": error, "failure": None}

    function = driver.load(kernel.cubin(), kernel.packed.entry)

    def launch(copy: int) -> None:
        first, second = (tensor.data_ptr() for tensor in inputs[copy])
        pointers = (first, outputs[copy].data_ptr(), second)
        driver.launch(function, kernel.packed.launch, tuple(map(np.uint64, pointers)))

    line: dict[str, Any] = {
        "case": name,
        "dtype": dtype,
        "device": find_device(own_gpu() or "h200").name,
        "commit": commit(),
        "expression": GENERATED[name].text,
        "n": shapes[0][-1],
        "entries": len(next(iter(operands.indices.values()))),
        "rows": shapes[0][0],
        "kernels": [{"family": kernel.family, "plan": {}, **timed(launch), "registers": function.registers}],
        "libraries": {},
    }
    for library, multiply in libraries.items():

        def enqueue(copy: int, multiply: Callable[..., None] = multiply) -> None:
            multiply(*inputs[copy], outputs[copy])

        line["libraries"][library] = timed(enqueue)
    return line


def _sampled(maps: Mapping[str, torch.Tensor]) -> dict[str, Callable[..., None]]:
    r, c = maps["r"], maps["c"]

    def gathered(x: torch.Tensor, y: torch.Tensor, v: torch.Tensor) -> None:
        torch.sum(x[r] * y[c], dim=1, out=v)

    offsets = torch.nn.functional.pad(torch.bincount(r, minlength=65536).cumsum(0), (1, 0)).int()
    columns = c.int()

    def sampled(x: torch.Tensor, y: torch.Tensor, v: torch.Tensor) -> None:
        pattern = torch.sparse_csr_tensor(offsets, columns, v, size=(len(x), len(y)), check_invariants=False)
        torch.sparse.sampled_addmm(pattern, x, y.T, beta=0.0, out=pattern)

    return {"torch, gathered": gathered, "cuSPARSE SDDMM by torch": sampled}


def _scattered(maps: Mapping[str, torch.Tensor]) -> dict[str, Callable[..., None]]:
    parts = [(maps["o"][maps["w"] == at], maps["i"][maps["w"] == at]) for at in range(27)]

    def scattered(rows: torch.Tensor, weights: torch.Tensor, output: torch.Tensor) -> None:
        output.zero_()
        for at, (o, i) in enumerate(parts):
            output.index_add_(0, o, rows[i] @ weights[at])

    return {"torch, gathered": scattered}
