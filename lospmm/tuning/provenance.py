"""Provenance of a kernel: its files made anew from the matrix and the manifest in its folder."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lospmm.artifact.artifact import Artifact
from lospmm.errors import BadRequest
from lospmm.families.candidate import UNROLLED, Candidate, unrolled
from lospmm.problem.device import DeviceSpec
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.space.candidates import Schedule, TileSize, UnrolledPlan
from lospmm.space.reorder import regroup, threads_for
from lospmm.store import Store
from lospmm.toolchain import lifetime
from lospmm.tuning.build import build, for_emitter, with_source
from lospmm.tuning.plans import plan_of
from lospmm.tuning.replay import AXES, emitter_of
from lospmm.tuning.summary import record_of

#: What may differ though the kernel is the same: who made it.
MAKERS = ("version", "toolchain")


@dataclass(frozen=True, slots=True)
class Provenance:
    """What the manifest records and what a build here gave, by the manifest's fields, where they differ."""

    differences: Mapping[str, tuple[Any, Any]]

    @property
    def agrees(self) -> bool:
        """Whether the kernel, its launch and its source are the same, whoever made them."""
        return not self.differences.keys() - set(MAKERS)


def provenance(kept: Artifact, device: DeviceSpec) -> Provenance:
    """Build the kernel of an artifact anew, without the cache.

    Raises BadRequest for a plan that this version does not make, Unsupported and ToolchainFault.
    """
    manifest = kept.manifest
    emitter = emitter_of(manifest, device)
    plain = kept.problem(device)
    problem = for_emitter(plain, emitter)
    with lifetime.temporary_directory() as folder:
        made = build(problem, _candidate(manifest, problem), emitter, store=Store(folder), workers=settings().workers)
    record = record_of(plain, with_source(made, device.arch))
    here = json.loads(json.dumps(record, default=asdict))  # as a manifest has it
    for fields in (recorded := {name: manifest[name] for name in here}, here):
        fields["toolchain"] = fields["toolchain"].partition(" (")[0]  # where it was found does not matter
    return Provenance({name: (recorded[name], here[name]) for name in here if recorded[name] != here[name]})


def _candidate(manifest: Mapping[str, Any], problem: Problem) -> Candidate:
    """Return the candidate that a manifest names. Raises BadRequest if there is none here."""
    tile, family = manifest["tile"], manifest["cubin_family"]
    if tile is not None and family == UNROLLED and tile["prefetch"] > 0:
        schedule = Schedule(**{axis: tile[axis] for axis in AXES if axis not in TileSize._fields})
        tiling = regroup(problem.matrix, [tile["rows"]], workers=threads_for(problem.matrix))[tile["rows"]]
        return unrolled(UnrolledPlan(TileSize(tile["rows"], tile["cols"]), schedule, tiling))
    if (found := plan_of(manifest, problem)) is not None:
        return found
    raise BadRequest(f"{manifest['name']}: this version makes no such kernel of the family {family[:20]!r}")
