"""The files of the artifact that a tuning produces."""

from lospmm.artifact import artifact
from lospmm.matrix.npz import write_npz
from lospmm.tuning.log import tile_map, tuning_lines
from lospmm.tuning.outcome import Outcome
from lospmm.tuning.summary import manifest, shipped_text


def files_of(outcome: Outcome, seconds: dict[str, float]) -> dict[str, bytes]:
    """Return the files of the artifact, by name."""
    build, bias = outcome.build, outcome.problem.epilogue.bias_file
    space = None if outcome.known.choice is None else tile_map(outcome.known).to_json().encode()
    return {
        **({} if bias is None else {artifact.BIAS_FILE: bias}),
        artifact.CUBIN_FILE: build.binary.cubin,
        artifact.SOURCE_FILES[build.language]: shipped_text(build),
        artifact.TUNING_FILE: tuning_lines(outcome).encode(),
        artifact.MATRIX_FILE: write_npz(outcome.problem.matrix),
        **({} if space is None else {artifact.SPACE_FILE: space}),
        artifact.MANIFEST_FILE: manifest(outcome, seconds).to_json().encode(),
    }
