"""The artifact that a tuning produces."""

from lospmm.artifact import artifact
from lospmm.artifact.artifact import Artifact
from lospmm.artifact.manifest import MANIFEST_FILE, parse
from lospmm.matrix.npz import write_npz
from lospmm.tuning.log import tile_map, tuning_lines
from lospmm.tuning.outcome import Outcome
from lospmm.tuning.summary import manifest, shipped_text


def artifact_of(outcome: Outcome, seconds: dict[str, float]) -> Artifact:
    """Return the artifact; its checksums, which are made here, are not compared again."""
    build, bias = outcome.build, outcome.problem.epilogue.bias_file
    space = None if outcome.known.choice is None else tile_map(outcome.known).to_json().encode()
    files = {
        **({} if bias is None else {artifact.BIAS_FILE: bias}),
        artifact.CUBIN_FILE: build.binary.cubin,
        artifact.SOURCE_FILES[build.language]: shipped_text(build),
        artifact.TUNING_FILE: tuning_lines(outcome).encode(),
        artifact.MATRIX_FILE: write_npz(outcome.problem.matrix),
        **({} if space is None else {artifact.SPACE_FILE: space}),
        MANIFEST_FILE: manifest(outcome, seconds).to_json().encode(),
    }
    return Artifact(parse(files[MANIFEST_FILE], "the new kernel"), files)
