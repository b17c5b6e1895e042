"""Work that several processes need at the same time, done by all of them: each part once, by one of them.

Processes that build kernels of the same matrix would each find out the same about it. Instead each makes parts that
nobody has made and nobody is at, leaves them in the store, and takes the others from there; so does whoever needs them
later. What is made must be the same whoever makes it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from lospmm.errors import ToolchainFault
from lospmm.store import Store

Files = Mapping[str, bytes]

#: How often one who needs a part looks whether another is done with it; and for how long, before it is made twice: the
#: other may have been stopped.
POLL_SECONDS, PATIENCE_SECONDS = 0.02, 10.0


def made_together(store: Store, kind: str, keys: Sequence[str], make: Callable[[int], Files]) -> list[Files]:
    """The entries of ``keys``, of which ``make(i)`` makes the one of ``keys[i]``. What cannot be kept is made anew each
    time. Raises what ``make`` raises."""
    found: dict[int, Files] = {}
    patience = time.monotonic() + PATIENCE_SECONDS
    while missing := [at for at in range(len(keys)) if at not in found]:
        before = len(found)
        for at in missing:
            if (entry := _made(store, kind, keys[at], partial(make, at))) is not None:
                found[at] = entry
        if len(found) > before:
            patience = time.monotonic() + PATIENCE_SECONDS
        elif time.monotonic() < patience:
            time.sleep(POLL_SECONDS)
        else:
            found[missing[0]] = make(missing[0])
    return [found[at] for at in range(len(keys))]


def _made(store: Store, kind: str, key: str, make: Callable[[], Files]) -> Files | None:
    """None where another is at it."""
    if (entry := _kept(store, kind, key)) is not None:
        return entry
    with store.claimed(kind, key) as is_ours:
        if not is_ours:
            return None
        made = _kept(store, kind, key)  # by who had the claim before
        if made is None:
            made = make()
            with suppress(ToolchainFault):
                store.put(kind, key, made)
        return made


def _kept(store: Store, kind: str, key: str) -> Files | None:
    with suppress(ToolchainFault):
        return store.get(kind, key)
    return None
