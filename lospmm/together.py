"""Work that several processes need at the same time, done by all of them: each part once, by one of them.

Processes that build kernels of the same matrix would each find out the same about it. Instead each makes parts that
nobody has made and nobody is at, leaves them in the store, and takes the others from there; so does whoever needs them
later. What is made must be the same whoever makes it.
"""

from collections.abc import Callable, Mapping, Sequence

from lospmm.store import Store

Files = Mapping[str, bytes]


def made_together(store: Store, kind: str, keys: Sequence[str], make: Callable[[int], Files]) -> list[Files]:
    """The entries of ``keys``, of which ``make(i)`` makes the one of ``keys[i]``. Raises ToolchainFault where the disk
    fails."""
    found: dict[int, Files] = {}

    def take(at: int, *, wait: bool) -> None:
        entry = _made(store, kind, keys[at], lambda: make(at), wait=wait)
        if entry is not None:
            found[at] = entry

    while missing := [at for at in range(len(keys)) if at not in found]:
        before = len(found)
        for at in missing:
            take(at, wait=False)
        if len(found) == before:  # others are at all that is missing
            take(missing[0], wait=True)
    return [found[at] for at in range(len(keys))]


def _made(store: Store, kind: str, key: str, make: Callable[[], Files], *, wait: bool) -> Files | None:
    """None where another is at it, and nobody is to ``wait``."""
    if (entry := store.get(kind, key)) is not None:
        return entry
    with store.claimed(kind, key, wait=wait) as is_ours:
        if not is_ours:
            return None
        made: Files | None = store.get(kind, key)  # by who had the claim before
        if made is None:
            made = make()
            store.put(kind, key, made)
        return made
