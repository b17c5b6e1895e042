"""How a kernel is launched."""

from dataclasses import dataclass, replace

from pydantic import NonNegativeInt, PositiveInt

#: What the name of a kernel ends with that writes C (n, m), beside the one of (m, n): of B (n, k), and of B (k, n).
READS_TOKENS, WRITES_TOKENS = "_tokens", "_c_tokens"


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch configuration of a kernel."""

    grid: tuple[PositiveInt, PositiveInt, PositiveInt]
    block: PositiveInt  # threads
    shared_bytes: NonNegativeInt = 0

    def narrowed(self, words: int) -> "Launch":
        """Return the launch of only the column blocks of the first ``words``, one word a thread."""
        x, block_rows, _ = self.grid
        blocks = -(-words // self.block)
        return replace(self, grid=(min(x, blocks), block_rows, -(-blocks // x)))
