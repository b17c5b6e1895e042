"""Pruned weights of a model, and the shapes of their inputs."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from lospmm.errors import LospmmError, Unsupported
from lospmm.kernel import whole_number
from lospmm.matrix.csr import SparseMatrix, check_shape
from lospmm.matrix.limit import too_few
from lospmm.matrix.npz import write_npz
from lospmm.nn.attention import no_fast_path, why_dense
from lospmm.nn.bound import Tensors, dtype_of, named, versions_of
from lospmm.nn.fusion import FusedConv2d, FusedLinear, evaluated
from lospmm.nn.place import WeightPlace, as_images, forget_mask, is_dense, place_of, tensors_of, way_of
from lospmm.nn.report import Row
from lospmm.problem.convolution import Convolution
from lospmm.problem.device import DeviceSpec
from lospmm.problem.epilogue import Epilogue, epilogue_of
from lospmm.problem.problem import Problem, check_columns

#: Kind of each class of module that can have kernels.
_KINDS: Mapping[type[nn.Module], str] = {
    nn.Linear: "Linear",
    nn.modules.linear.NonDynamicallyQuantizableLinear: "Linear",
    nn.Conv1d: "Conv1d",
    nn.Conv2d: "Conv2d",
    FusedConv2d: "FusedConv2d",
    FusedLinear: "FusedLinear",
    nn.MultiheadAttention: "MultiheadAttention",
}

#: Name of weight and bias, for kinds where these are not weight and bias.
_WEIGHTS = {"MultiheadAttention": ("in_proj_weight", "in_proj_bias")}


def kind_of(original: type[nn.Module]) -> str | None:
    """Return the kind of exactly this class, or None, as for subclasses with a forward of their own."""
    if original in _KINDS:
        return _KINDS[original]
    # torch.nn.utils.parametrize names its classes so.
    return _KINDS.get(original.__bases__[0]) if original.__name__.startswith("Parametrized") else None


@dataclass(slots=True, eq=False)
class Site:
    """Weight that is pruned enough; ``weight`` is its name in ``module``."""

    name: str
    module: nn.Module
    weight: str
    kind: str
    place: WeightPlace
    shape: tuple[int, int]  # of A
    sparsity: float  # share of zeros in the weight; with groups, A has more
    versions: tuple[int, ...] | None  # of its tensors when they were read, as in ``versions_of``
    _matrix: SparseMatrix | None = None
    _reading: Lock = field(default_factory=Lock)

    @property
    def tensors(self) -> Tensors:
        """Current tensors of the weight."""
        return tensors_of(self.module, self.place)

    @property
    def matrix(self) -> SparseMatrix:
        """A, read on first use and kept until ``forget``: a model's take more memory than its weights."""
        with self._reading:
            if self._matrix is None:
                self._matrix = self.tensors.matrix()
            return self._matrix

    def read(self) -> None:
        """Read ``matrix`` and write its file ahead, in a thread; what fails there fails again on use."""
        write_npz(self.matrix)

    def forget(self) -> None:
        """Free the memory of ``matrix``."""
        self._matrix = None

    @property
    def is_convolution(self) -> bool:
        """Whether the layer is a convolution."""
        return isinstance(self.module, nn.Conv1d | nn.Conv2d)

    @property
    def relu(self) -> bool:
        """Whether the layer ends with ReLU."""
        module = self.module
        return isinstance(module, FusedLinear) or (isinstance(module, FusedConv2d) and module.relu)

    @property
    def adds(self) -> bool:
        """Whether the layer adds a residual."""
        return isinstance(self.module, FusedConv2d) and self.module.adds

    @property
    def is_swapped(self) -> bool:
        """Whether the layer runs on kernels."""
        return "lospmm_state" in vars(self.module)

    def epilogue(self) -> Epilogue:
        """Return the layer's bias, ReLU and residual."""
        return epilogue_of(self.tensors.bias_values(), relu=self.relu, residual=self.adds)

    def problem(self, shape: tuple[int, ...], device: DeviceSpec, epilogue: Epilogue) -> Problem:
        """Return the problem of an input (n,) or (batch, channels, height, width).

        Raises BadRequest and Unsupported.
        """
        dtype = dtype_of(self.tensors.weight)
        assert dtype is not None, "find_sites takes weights of these types alone"
        window = convolution_of(self, shape) if self.is_convolution else None
        return Problem(self.matrix, shape[0] if window is None else window.n, device, window, epilogue, dtype)

    def row(self, reason: str, **rest: Any) -> Row:
        """Return the layer's row of the report, dense unless ``rest`` says otherwise."""
        usual = {"n": None, "advice": "dense"}
        return Row(
            layer=self.name, kind=self.kind, shape=self.shape, sparsity=self.sparsity, reason=reason, **(usual | rest)
        )


def find_sites(model: nn.Module, min_sparsity: float) -> tuple[list[Site], list[Row]]:
    """Return the weights that can have kernels, and a row for each that cannot, in the model's order."""
    sites, rows = [], []
    dense = _dense_parts(model)
    for name, module in model.named_modules():
        kind = kind_of(type(module))
        if kind is None:
            continue
        weight, bias = _WEIGHTS.get(kind, ("weight", "bias"))
        full = ".".join(part for part in (name, "" if weight == "weight" else weight) if part) or type(module).__name__
        kept = module._parameters.get(weight, module._parameters.get(f"{weight}_orig"))
        shape = (0, 0) if kept is None else (kept.shape[0], math.prod(kept.shape[1:]))
        base: dict[str, Any] = {"layer": full, "kind": kind, "n": None, "advice": "dense"}
        try:
            if module in dense:
                raise Unsupported(dense[module])
            place, tensors, a = _pruned(module, weight, bias)
        except LospmmError as error:
            rows.append(Row(shape=shape, sparsity=None, reason=str(error), **base))
            continue
        (m, k), nnz = a.shape, int(torch.count_nonzero(a))
        shape, sparsity = (m, k * tensors.groups), 1.0 - nnz / (m * k)
        reason = too_few(sparsity, min_sparsity) if nnz else "all its weights are zero"
        if reason is None:
            sites.append(Site(full, module, weight, kind, place, shape, sparsity, versions_of(tensors)))
            continue
        rows.append(Row(shape=shape, sparsity=sparsity, reason=reason, **base))
    return sites, rows


def freeable(model: nn.Module, sites: Iterable[Site]) -> set[str]:
    """Return the names of sites whose weights may leave the GPU: without a mask, and of no other module."""
    owners = Counter(id(one) for _, one in model.named_parameters(remove_duplicate=False))
    return {site.name for site in sites if not site.place.mask and owners[id(site.tensors.weight)] == 1}


def _dense_parts(model: nn.Module) -> dict[nn.Module, str]:
    """Return the attentions, with their ``out_proj``, that PyTorch has to run dense, and why."""
    attentions = [one for one in model.modules() if isinstance(one, nn.MultiheadAttention)]
    reasons = [(one, why_dense(one)) for one in attentions]
    return {part: why for one, why in reasons if why is not None for part in (one, one.out_proj)}


def _pruned(module: nn.Module, weight: str, bias: str) -> tuple[WeightPlace, Tensors, Tensor]:
    """Find a pruned weight, and return it with what is left of it. Raises Unsupported and BadMatrix."""
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        if module.groups == module.in_channels > 1:
            raise Unsupported("it is depthwise: a sum for each channel, which pruning does not shorten")
        if module.padding_mode != "zeros":
            raise Unsupported(f"its padding is {module.padding_mode!r}, and kernels pad with zeros")
        if way_of(module) is None:
            raise Unsupported(f"its padding {module.padding!r} differs at both ends")
    place = place_of(module, weight, bias)
    tensors = tensors_of(module, place)
    if tensors.weight.is_meta:
        raise Unsupported("its weights are on the device meta")
    for one in (tensors.weight, tensors.mask):
        if one is not None and not is_dense(one):
            raise Unsupported(f"its weights lie in memory as {one.layout}, not {torch.strided}: make them dense first")
    if dtype_of(tensors.weight) is None:
        raise Unsupported(f"its weights are {named(tensors.weight.dtype)}, and kernels take float32 and 16-bit types")
    a = tensors.pruned()
    check_shape(tuple(a.shape))
    if not torch.isfinite(a).all():
        tensors.matrix()  # raises BadMatrix
    return place, tensors, a


def learn_shapes(model: nn.Module, sites: Sequence[Site], example: Any) -> dict[str, list[tuple[int, ...]]]:
    """Run ``example`` once; return, by site, the shapes of the weight's inputs, (n,) for a product.

    ``example`` is a tensor, a tuple of arguments or a mapping of named ones.
    """
    seen: dict[str, list[tuple[int, ...]]] = {site.name: [] for site in sites}
    by_module = {site.module: site for site in sites}

    def note(site: Site, x: Tensor) -> None:
        shape = _operand(site, x)
        if shape is not None and shape not in seen[site.name]:
            seen[site.name].append(shape)

    def hear(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        first = arguments[0] if arguments else next(iter(named.values()))
        site = by_module.get(module)
        if isinstance(module, nn.MultiheadAttention):
            given = dict(zip(("query", "key", "value"), arguments, strict=False)) | named
            if site is not None and given["query"] is given["key"] and given["key"] is given["value"]:
                note(site, given["query"])
            inner = by_module.get(module.out_proj)
            if inner is not None:  # the dense attention does not call it
                note(inner, given["query"])
        elif site is not None:
            note(site, first)

    heard = [*by_module, *(one for one in model.modules() if isinstance(one, nn.MultiheadAttention))]
    with ExitStack() as stack:
        for module in dict.fromkeys(heard):
            stack.callback(module.register_forward_pre_hook(hear, with_kwargs=True).remove)
        run(model, example)
    return seen


def run(model: nn.Module, example: Any) -> Any:
    """Return the model's output in evaluation mode, which ends with the call."""
    with torch.no_grad(), no_fast_path(), evaluated(model):
        return call_with(model, example)


def call_with(model: Callable[..., Any], example: Any) -> Any:
    """Call a model with an example: a tensor, a tuple of arguments or a mapping of named ones."""
    if isinstance(example, Mapping):
        return model(**example)
    return model(*example) if isinstance(example, tuple | list) else model(example)


def _operand(site: Site, x: Tensor) -> tuple[int, ...] | None:
    if not is_dense(x):
        return None
    if not site.is_convolution:
        return (x.numel() // x.shape[-1],) if x.dim() and x.shape[-1] else None
    images = as_images(x, site.tensors.weight.dim())
    return None if images is None else tuple(images.shape)


def convolution_of(site: Site, shape: tuple[int, ...]) -> Convolution:
    """Return the convolution of a site's input (batch, channels, height, width); raises Unsupported."""
    weight = as_images(site.tensors.weight, site.tensors.weight.dim())
    way = way_of(site.module)
    assert weight is not None and way is not None
    pairs = {name: (pair[0], pair[1]) for name, pair in zip(("stride", "padding", "dilation"), way, strict=True)}
    batch, channels, height, width = shape
    return Convolution(batch, channels, height, width, weight.shape[2], weight.shape[3], **pairs)


def forget_masks(sites: Sequence[Site]) -> None:
    """Remove the masks that ``find_sites`` added to layers that stay dense."""
    for site in sites:
        if not site.is_swapped:
            forget_mask(site.module, site.weight)


def column_shapes(n: int | Iterable[int]) -> list[tuple[int, ...]]:
    """Return the shape of each number of columns in ``n``. Raises BadRequest."""
    are_several = isinstance(n, Iterable) and not isinstance(n, str) and getattr(n, "ndim", 1) > 0
    columns = [whole_number("n", one) for one in (n if are_several else [n])]  # type: ignore[union-attr]
    for one in columns:
        check_columns(one)
    return [(one,) for one in columns]
