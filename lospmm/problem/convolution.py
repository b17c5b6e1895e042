"""A convolution as a product C = A x B without B in memory (section 6.2, implicit im2col).

A is (out_channels, channels * kernel_height * kernel_width), a layer's weights in PyTorch's order, flattened. B would
be the unfolded input: a column for each output pixel of each image, a row for each channel and position in the
window. A kernel reads the element of the input (NCHW) instead. Its offset is a sum of two numbers: one of the
thread's column, computed once, and one of A's column, a constant in the code. Elements in the padding are zero and
are not read.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lospmm.errors import BadRequest, Unsupported

#: One image of the input or of the output has fewer elements, so that offsets within it fit 32 bits of bytes.
MAX_IMAGE_ELEMENTS = 2**30

#: The most digits of a number that ``parse_convolution`` reads.
MAX_DIGITS = 9

#: A window that reaches into the padding has at most so many rows and columns: a thread keeps a bit for each.
MAX_PADDED_WINDOW = 16

Pair = tuple[int, int]


class PaddingGuard(NamedTuple):
    """A row or column of the window that lies in the padding for some output pixel."""

    axis: int  # 0: a row, 1: a column
    at: int
    offset: int  # from the row or column of the input at which a window begins
    size: int  # of the input, along the axis
    bit: int  # of ``outside``


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution: input (batch, channels, height, width) and window; pairs are (height, width).

    Raises BadRequest for sizes that give no output or are too large, Unsupported for a padded window beyond
    MAX_PADDED_WINDOW.
    """

    batch: int
    channels: int
    height: int
    width: int
    kernel_height: int
    kernel_width: int
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is Pair and not isinstance(value, tuple):  # as PyTorch takes them: [2, 2], or 2
                value = tuple(value) if isinstance(value, list) else (value, value)
            least = 0 if field.name == "padding" else 1
            # NumPy's numbers become Python's, which JSON can hold.
            given = value if field.type is Pair else (value,)
            numbers = [int(one) if isinstance(one, np.integer) else one for one in given]
            if len(numbers) != (2 if field.type is Pair else 1) or not all(_is_whole(one) for one in numbers):
                kind = "a pair of whole numbers" if field.type is Pair else "a whole number"
                raise BadRequest(f"convolution: {field.name} is {value!r:.80}: give {kind}")
            if min(numbers) < least:
                raise BadRequest(f"convolution: {field.name} is {value}: at least {least}")
            object.__setattr__(self, field.name, tuple(numbers) if field.type is Pair else numbers[0])
        if min(self.out_height, self.out_width) < 1:
            raise BadRequest(
                f"convolution: a window of {self.kernel_height} x {self.kernel_width}, dilated by {self.dilation}, "
                f"does not fit into {self.height} x {self.width} padded by {self.padding}"
            )
        if max(self.channels * self.height * self.width, *self._padded) >= MAX_IMAGE_ELEMENTS:
            raise BadRequest(f"convolution: an image has {MAX_IMAGE_ELEMENTS} elements or more")
        if self.is_padded and max(self.kernel_height, self.kernel_width) > MAX_PADDED_WINDOW:
            raise Unsupported(
                f"convolution: a padded window of {self.kernel_height} x {self.kernel_width}: "
                f"at most {MAX_PADDED_WINDOW} each way"
            )

    @property
    def out_height(self) -> int:
        """Height of the output, in pixels."""
        return _outputs(self.height, self.kernel_height, self.stride[0], self.padding[0], self.dilation[0])

    @property
    def out_width(self) -> int:
        """Width of the output, in pixels."""
        return _outputs(self.width, self.kernel_width, self.stride[1], self.padding[1], self.dilation[1])

    @property
    def pixels(self) -> int:
        """Pixels of one image of the output."""
        return self.out_height * self.out_width

    @property
    def k(self) -> int:
        """Rows of B: channels x kernel height x kernel width."""
        return self.channels * self.kernel_height * self.kernel_width

    @property
    def n(self) -> int:
        """Columns of B and C: batch x output pixels."""
        return self.batch * self.pixels

    @property
    def input_shape(self) -> tuple[int, int, int, int]:
        """Shape of the input: (batch, channels, height, width)."""
        return self.batch, self.channels, self.height, self.width

    @property
    def image_elements(self) -> int:
        """Elements of one image of the input."""
        return self.channels * self.height * self.width

    @property
    def input_elements(self) -> int:
        """Elements of the whole input."""
        return self.batch * self.image_elements

    def output_shape(self, m: int) -> tuple[int, int, int, int]:
        """Return the shape of the output of ``m`` channels: (batch, m, height, width)."""
        return self.batch, m, self.out_height, self.out_width

    @property
    def is_padded(self) -> bool:
        """Whether any window reaches beyond the input."""
        return bool(self.guards)

    @property
    def guards(self) -> tuple[PaddingGuard, ...]:
        """Rows of the window that lie in the padding for some output pixel, then such columns."""
        found = []
        sides = (self.kernel_height, self.height, self.out_height), (self.kernel_width, self.width, self.out_width)
        for axis, (kernel, size, outputs) in enumerate(sides):
            last = (outputs - 1) * self.stride[axis]
            for at in range(kernel):
                offset = at * self.dilation[axis]
                if offset < self.padding[axis] or last + offset >= size + self.padding[axis]:
                    found.append(PaddingGuard(axis, at, offset, size, 1 << axis * MAX_PADDED_WINDOW + at))
        return tuple(found)

    @property
    def _padded(self) -> tuple[int, int]:
        """Elements of one channel of the padded input, and of the output: bounds on offsets."""
        height, width = self.height + 2 * self.padding[0], self.width + 2 * self.padding[1]
        return height * width, self.pixels


def convolution_of(sizes: Mapping[str, Any]) -> Convolution:
    """Return the convolution of a JSON object, whose pairs are lists. Raises BadRequest, Unsupported."""
    try:
        return Convolution(**sizes)
    except TypeError as error:
        raise BadRequest(f"convolution: {error}") from None


def parse_convolution(text: str) -> Convolution:
    """Parse a convolution as in "32x64x56x56,3x3,stride=2,padding=1"; a single number is both of a pair.

    Raises BadRequest for any other format, and as Convolution does.
    """
    sizes, *rest = (part.strip() for part in text.split(","))
    ways = dict.fromkeys(("stride", "padding", "dilation"), "")
    for part in rest[1:]:
        name, _, value = part.partition("=")
        if ways.get(name, "given") or not value:
            raise BadRequest(_MISWRITTEN.format(text))
        ways[name] = value
    input_shape, window = _numbers(sizes, text), _pair(rest[0] if rest else "", text)
    if len(input_shape) != 4:
        raise BadRequest(_MISWRITTEN.format(text))
    names = ("batch", "channels", "height", "width", "kernel_height", "kernel_width")
    numbers = dict(zip(names, (*input_shape, *window), strict=True))
    return convolution_of({**numbers, **{name: _pair(value, text) for name, value in ways.items() if value}})


def written(convolution: Convolution) -> str:
    """Return the text that ``parse_convolution`` reads."""
    parts = ["x".join(map(str, convolution.input_shape)), f"{convolution.kernel_height}x{convolution.kernel_width}"]
    pairs = {name: getattr(convolution, name) for name in ("stride", "padding", "dilation")}
    return ",".join([*parts, *(f"{name}={pair[0]}x{pair[1]}" for name, pair in pairs.items())])


_MISWRITTEN = (
    "conv {!r:.80}: write batch x channels x height x width of the input, the window, and what is not stride=1, "
    "padding=0, dilation=1, as in 32x64x56x56,3x3,stride=2,padding=1"
)


def _numbers(part: str, text: str) -> list[int]:
    words = part.split("x")
    if not all(re.fullmatch(r"-?[0-9]+", word) for word in words):
        raise BadRequest(_MISWRITTEN.format(text))
    if long := next((word for word in words if len(word) > MAX_DIGITS), None):
        raise BadRequest(f"conv {text!r:.80}: {long:.20} has more than {MAX_DIGITS} digits")
    return [int(word) for word in words]


def _pair(part: str, text: str) -> Pair:
    numbers = _numbers(part, text)
    if len(numbers) > 2:
        raise BadRequest(_MISWRITTEN.format(text))
    return numbers[0], numbers[-1]


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _outputs(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def window_places(convolution: Convolution, k: NDArray[np.integer]) -> tuple[NDArray[np.int64], ...]:
    """Return channel, row and column in the window of each row ``k`` of B."""
    rest, column = np.divmod(np.asarray(k, np.int64), convolution.kernel_width)
    channel, row = np.divmod(rest, convolution.kernel_height)
    return channel, row, column


def row_elements(convolution: Convolution, k: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the offset of each row ``k`` of B from the start of a column's window, in elements.

    It is a constant of the code.
    """
    channel, row, column = window_places(convolution, k)
    down, right = convolution.dilation
    return (channel * convolution.height + row * down) * convolution.width + column * right


def column_places(convolution: Convolution, columns: NDArray[np.integer]) -> tuple[NDArray[np.int64], ...]:
    """Return the image of each column of B, and the input's row and column at which its window begins.

    Places in the padding are negative.
    """
    image, pixel = np.divmod(np.asarray(columns, np.int64), convolution.pixels)
    y, x = np.divmod(pixel, convolution.out_width)
    return (
        image,
        y * convolution.stride[0] - convolution.padding[0],
        x * convolution.stride[1] - convolution.padding[1],
    )


def column_elements(convolution: Convolution, columns: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the offset of each column's window in the input, in elements. Each thread computes it once."""
    image, y, x = column_places(convolution, columns)
    return image * convolution.image_elements + y * convolution.width + x


def output_elements(convolution: Convolution, m: int, columns: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the offset of row 0 of each column of C in the output; rows are ``pixels`` elements apart."""
    image, pixel = np.divmod(np.asarray(columns, np.int64), convolution.pixels)
    return image * m * convolution.pixels + pixel


def guard_bits(convolution: Convolution, k: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the bits of ``outside`` that tell whether row ``k`` of B is in the padding; 0: it never is."""
    _, row, column = window_places(convolution, k)
    bits = np.zeros(convolution.kernel_height, np.int64), np.zeros(convolution.kernel_width, np.int64)
    for guard in convolution.guards:
        bits[guard.axis][guard.at] = guard.bit
    found: NDArray[np.int64] = bits[0][row] | bits[1][column]
    return found


def outside(convolution: Convolution, columns: NDArray[np.integer]) -> NDArray[np.uint32]:
    """Return the bits that a thread of each column keeps: which window rows and columns are padding."""
    _, *begins = column_places(convolution, columns)
    bits = np.zeros(len(columns), np.int64)
    for guard in convolution.guards:
        place = begins[guard.axis] + guard.offset
        bits |= np.where((place < 0) | (place >= guard.size), guard.bit, 0)
    return bits.astype(np.uint32)


def order_of_rows(convolution: Convolution) -> NDArray[np.int64]:
    """Return the rows of B in the order in which kernels load them, (k,).

    With padding, by position in the window, first those that never lie in it: a thread then decides a few times in a
    tile, not at every load, whether it takes part. Without padding, in ascending order.
    """
    k = np.arange(convolution.k)
    if not convolution.is_padded:
        return k
    channel, row, column = window_places(convolution, k)
    return np.lexsort((channel, column, row, guard_bits(convolution, k) != 0))


def unfold(
    convolution: Convolution, elements: NDArray[np.float32], columns: NDArray[np.integer], *, padding: float = 0.0
) -> NDArray[np.float32]:
    """Return some columns of B, (k, columns), given an input of ``input_shape``.

    ``padding`` is the value of elements outside the input.
    """
    k = np.arange(convolution.k)
    place = np.add.outer(row_elements(convolution, k), column_elements(convolution, columns))
    is_outside = (guard_bits(convolution, k)[:, np.newaxis] & outside(convolution, columns).astype(np.int64)) != 0
    found = elements.reshape(-1)[np.where(is_outside, 0, place)]
    return np.where(is_outside, np.float32(padding), found).astype(np.float32)


def rows_at(convolution: Convolution, columns: NDArray[np.integer], elements: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return, for each column, the row of B that holds the given element of the input; -1: none."""
    image, y, x = column_places(convolution, columns)
    rest, right = np.divmod(elements, convolution.width)
    rest, down = np.divmod(rest, convolution.height)
    found_image, channel = np.divmod(rest, convolution.channels)
    row, row_rest = np.divmod(down - y, convolution.dilation[0])
    column, column_rest = np.divmod(right - x, convolution.dilation[1])
    is_own = (found_image == image) & (row_rest == 0) & (column_rest == 0)
    is_own &= (row >= 0) & (row < convolution.kernel_height) & (column >= 0) & (column < convolution.kernel_width)
    k = (channel * convolution.kernel_height + row) * convolution.kernel_width + column
    return np.where(is_own, k, -1)
