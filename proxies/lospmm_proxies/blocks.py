"""Section 5.1.2, thread block function reduction: tiles with similar work share one proxy block.

Tiles are compared by the Euclidean distance of (loads, multiply-adds) and merged by complete linkage: it bounds how
far any tile of a cluster is from any other, hence from the proxy block that stands for it. It also needs only the
distinct features, however many tiles have them, so tens of thousands of tiles do not need a distance for every pair.
scikit-learn's AgglomerativeClustering gives the same clusters, but costs every process that builds 0.8 s of a core more
to import.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lospmm.problem.problem import Problem
from lospmm.space.candidates import Tiling, UnrolledPlan
from lospmm_proxies.launch import active_kernel_blocks

#: Clusters for each thread block that an SM runs at a time ("based on our experience", section 5.1.2).
CLUSTERS_PER_ACTIVE_BLOCK = 3


@dataclass(frozen=True, slots=True, eq=False)
class Cluster:
    """Tiles that one proxy block stands for, and their centroid: the means of their features, rounded."""

    tiles: NDArray[np.int64]  # their numbers in the tiling, ascending
    loads: int
    fmas: int


def cluster_limit(problem: Problem, sharers: Sequence[UnrolledPlan]) -> int:
    """Return the most proxy blocks of the proxy of ``sharers``: 3 x max(NUMS_ATB)."""
    return CLUSTERS_PER_ACTIVE_BLOCK * max(active_kernel_blocks(problem, candidate) for candidate in sharers)


def cluster_tiles(tiling: Tiling, limit: int) -> list[Cluster]:
    """Return ``limit`` clusters, or one a tile if there are fewer, in the order of their first tiles."""
    features = np.stack((tiling.nnc, tiling.nnz), axis=1)
    label = _labels(features, min(limit, tiling.count))
    _, first = np.unique(label, return_index=True)
    members = [np.flatnonzero(label == label[tile]) for tile in np.sort(first)]
    means = [np.rint(features[tiles].mean(axis=0)).astype(int).tolist() for tiles in members]
    return [Cluster(tiles, loads, fmas) for tiles, (loads, fmas) in zip(members, means, strict=True)]


def central_tile(tiling: Tiling, cluster: Cluster, loads: int) -> NDArray[np.int32]:
    """Return the rows of the tile nearest to the centroid among those with ``loads`` loads or more: never none."""
    enough = cluster.tiles[tiling.nnc[cluster.tiles] >= loads]
    distance = np.hypot(tiling.nnc[enough] - cluster.loads, tiling.nnz[enough] - cluster.fmas)
    tile = int(enough[np.argmin(distance)])
    start = int(tiling.starts[tile])
    return tiling.rows[start : start + int(tiling.sizes[tile])]


def dispatch(tiling: Tiling, clusters: Sequence[Cluster], parts: int = 1) -> tuple[int, ...]:
    """Return the proxy block of each block row (Figure 8c, get_cluster_id); empty rows come last, as one.

    If a tile has several ``parts``, so has its proxy block: they follow one another.
    """
    block = np.full(tiling.block_rows, len(clusters))
    for number, cluster in enumerate(clusters):
        block[cluster.tiles] = number
    of_parts = block[:, np.newaxis] * parts + np.arange(parts)
    return tuple(np.minimum(of_parts, len(clusters) * parts).ravel().tolist())


def _labels(features: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return the cluster of each row of ``features`` (tiles, 2): any ``count`` numbers, all of them used."""
    # The order of the pairs as one number, which np.unique takes without a copy of the table.
    key = features[:, 0] * (features[:, 1].max(initial=0) + 1) + features[:, 1]
    _, first, group, sizes = np.unique(key, return_index=True, return_inverse=True, return_counts=True)
    if len(first) > count:
        from scipy.cluster.hierarchy import cut_tree, linkage  # a third of a second, which few commands need

        merges = linkage(features[first].astype(np.float64), method="complete")
        return np.asarray(cut_tree(merges, n_clusters=count)[:, 0], dtype=np.int64)[group]
    return _split(group, sizes, count)


def _split(group: NDArray[np.int64], sizes: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return ``count`` clusters from fewer groups of equal tiles: equal work, but separate code.

    How much code an SM runs decides how often it misses its instruction cache, so a proxy has as many blocks as it
    may even if fewer would have the right loads and multiply-adds. Neighbouring tiles go to different clusters,
    because blocks that run at the same time run different code in the kernel.
    """
    pieces = np.ones(len(sizes), dtype=np.int64)
    for _ in range(count - len(sizes)):
        pieces[np.argmax(sizes / pieces)] += 1
    rank = np.empty(len(group), dtype=np.int64)
    rank[np.argsort(group, kind="stable")] = np.arange(len(group)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return (np.cumsum(pieces) - pieces)[group] + rank % pieces[group]
