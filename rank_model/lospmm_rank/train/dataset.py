"""Data set of measured kernels: one compressed file of columns, with what they were measured on.

Problems are split by their matrix, never by tile: of ten drawn ones eight are for training, one for early stopping
and one for the test; matrices of files are for the test alone. The features of every kernel are stored too, so that
training needs no matrix; ``stale`` says whether the code would compute others.
"""

import hashlib
import itertools
import json
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lospmm.errors import BadRequest
from lospmm.matrix.csr import SparseMatrix
from lospmm.matrix.readers import read
from lospmm.problem.device import DEVICES
from lospmm.problem.problem import Problem
from lospmm.space.candidates import Schedule, TileSize, UnrolledPlan
from lospmm.space.estimate import RATES
from lospmm.space.features import FEATURES, REVISION, features
from lospmm.space.reorder import regroup
from lospmm.tuning.build import for_emitter
from lospmm_rank.train.lines import AXES, SCHEMA
from lospmm_rank.train.pool import end_with_parent
from lospmm_rank.train.problems import drawn

Split = Literal["train", "validation", "test", "real"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test", "real")

#: Splits of drawn problems, by the last digit of their number: unlike scikit-learn's, they stay as data are added.
_TEST_DIGIT, _VALIDATION_DIGIT = 0, 1

#: Marks a data set without features.
NO_FEATURES = json.dumps({"features": []})

#: Columns of a file that define a candidate.
POINT_AXES = ("rows", "cols", *AXES)


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """Columns of problems (P of them) and of points (kernels); the points of a problem are consecutive."""

    key: NDArray[np.str_]  # (P,): a number, or a file's name
    pattern: NDArray[np.str_]  # (P,)
    size: NDArray[np.int64]  # (P, 4): m, k, n, nnz
    fingerprint: NDArray[np.str_]  # (P,): of the matrix
    device: NDArray[np.str_]  # (P,)
    emitter: NDArray[np.str_]  # (P,)
    problem: NDArray[np.int32]  # (points,): which one
    axes: NDArray[np.int16]  # (points, POINT_AXES)
    micros: NDArray[np.float32]  # (points,): NaN for a kernel that failed
    spread: NDArray[np.float32]  # (points,)
    features: NDArray[np.float32]  # (points, FEATURES)
    about: NDArray[np.str_]  # JSON of every run, of what it measured on; and of the features

    @property
    def provenance(self) -> list[dict[str, Any]]:
        """Machines and versions of the measurements, run by run."""
        return [json.loads(entry) for entry in self.about[:-1]]

    @property
    def feature_names(self) -> list[str]:
        """Names of the features."""
        names: list[str] = json.loads(str(self.about[-1]))["features"]
        return names

    @property
    def split(self) -> NDArray[np.str_]:
        """Split of each problem (``SPLITS``)."""
        return np.array([split_of(str(key)) for key in self.key])

    @property
    def digest(self) -> str:
        """sha256 of the measurements: the columns without the features."""
        digest = hashlib.sha256()
        for name in ("key", "size", "fingerprint", "problem", "axes", "micros"):
            column = getattr(self, name)
            digest.update("\n".join(column).encode() if column.dtype.kind == "U" else column.tobytes())
        return digest.hexdigest()

    def of_split(self, split: Split) -> list[NDArray[np.int64]]:
        """Return the points that ran, for each problem of ``split`` with two or more."""
        wanted = np.flatnonzero(self.split == split)
        ran = np.isfinite(self.micros)
        groups = [np.flatnonzero((self.problem == problem) & ran) for problem in wanted]
        return [group for group in groups if len(group) > 1]


def split_of(key: str) -> Split:
    """Return the split of a problem, by its key."""
    if not key.isdecimal():
        return "real"
    return {_TEST_DIGIT: "test", _VALIDATION_DIGIT: "validation"}.get(int(key) % 10, "train")  # type: ignore[return-value]


#: Rates that no feature depends on: training kernels are float32, whose loads are bound by bytes, not by requests.
WITHOUT_FEATURES = ("request_cycles",)


def features_digest() -> str:
    """Return what the features are: their names and revision, and the estimate's rates."""
    rates = {name: rate for name, rate in asdict(RATES).items() if name not in WITHOUT_FEATURES}
    return json.dumps({"features": list(FEATURES), "revision": REVISION, "rates": rates})


def pack(files: Sequence[Path]) -> Dataset:
    """Return the data set of files that ``collect`` wrote, without features yet (``renewed``).

    If a problem is there twice, the first counts. Raises BadRequest for any other file.
    """
    about: list[str] = []
    entries: dict[tuple[str, str], dict[str, Any]] = {}
    for file in files:
        device = ""
        for number, entry in enumerate(_entries(file)):
            if "problem" in entry:
                if not device:
                    raise BadRequest(f"{file}, line {number + 1}: a problem before the line that says what measured it")
                entries.setdefault((device, entry["problem"]), {**entry, "device": device})
            else:
                if entry.get("schema") != SCHEMA:
                    raise BadRequest(f"{file}, line {number + 1}: written by another version of lospmm")
                device = entry["device"]
                about.append(json.dumps(entry, sort_keys=True))
    if not entries:
        raise BadRequest(
            f"{', '.join(map(str, files)) or 'no files'}: no measured problem; lospmm_rank.train.collect makes them"
        )
    lines = [entries[key] for key in sorted(entries, key=_order)]
    return _dataset(lines, [*dict.fromkeys(about), NO_FEATURES])


def renewed(
    dataset: Dataset,
    *,
    matrices: Path | None = None,
    workers: int = 1,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Dataset:
    """Return the same measurements with the features of this code.

    Every matrix is drawn again, by ``workers`` processes, or read from the folder ``matrices``. Raises BadRequest if
    one is not what was measured.
    """
    ends = np.searchsorted(dataset.problem, np.arange(len(dataset.key) + 1))
    lines = [
        {
            "problem": str(dataset.key[at]),
            "n": int(dataset.size[at, 2]),
            **{name: str(getattr(dataset, name)[at]) for name in ("fingerprint", "device", "emitter")},
            **dict(zip(POINT_AXES, dataset.axes[start:end].T.tolist(), strict=True)),
        }
        for at, (start, end) in enumerate(itertools.pairwise(ends.tolist()))
    ]
    found = np.concatenate(_featured(lines, matrices, workers, progress))
    return replace(dataset, features=found, about=np.array([*dataset.about[:-1], features_digest()]))


def _order(key: tuple[str, str]) -> tuple[str, bool, int, str]:
    device, problem = key
    return device, not problem.isdecimal(), int(problem) if problem.isdecimal() else 0, problem


def _entries(file: Path) -> list[dict[str, Any]]:
    try:
        whole = file.read_bytes()
        return [json.loads(line) for line in whole[: whole.rfind(b"\n") + 1].splitlines()]
    except OSError as error:
        raise BadRequest(f"{file}: {error.strerror}") from None
    except ValueError:
        raise BadRequest(f"{file}: not a file of lospmm_rank.train.collect") from None


def _dataset(lines: Sequence[dict[str, Any]], about: list[str]) -> Dataset:
    axes = [np.array([line[axis] for axis in POINT_AXES], dtype=np.int16).T for line in lines]
    columns = {
        name: np.concatenate([np.array(line[name], dtype=np.float32) for line in lines])
        for name in ("micros", "spread")
    }
    texts = {name: np.array([line[name] for line in lines]) for name in ("pattern", "fingerprint", "device", "emitter")}
    return Dataset(
        key=np.array([line["problem"] for line in lines]),
        size=np.array([[line[name] for name in ("m", "k", "n", "nnz")] for line in lines]),
        problem=np.repeat(np.arange(len(lines), dtype=np.int32), [len(part) for part in axes]),
        axes=np.concatenate(axes),
        features=np.empty((sum(map(len, axes)), 0), dtype=np.float32),
        about=np.array(about),
        **texts,
        **columns,
    )


def _featured(
    lines: Sequence[dict[str, Any]], matrices: Path | None, workers: int, progress: Callable[[int, int], None]
) -> list[NDArray[np.float32]]:
    found = []
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=end_with_parent) as pool:
        for part in pool.map(features_of_line, lines, [matrices] * len(lines), chunksize=4):
            found.append(part)
            progress(len(found), len(lines))
    return found


def features_of_line(line: dict[str, Any], matrices: Path | None) -> NDArray[np.float32]:
    """Return the features of a line of ``collect``, (points, FEATURES). Raises BadRequest as ``renewed``."""
    matrix = _matrix(line["problem"], matrices)
    if matrix.fingerprint != line["fingerprint"]:
        raise BadRequest(
            f"problem {line['problem']}: its matrix is not the one that was measured; the numbers that NumPy "
            f"{np.__version__} draws differ from those of the version that the file names, or the file was changed"
        )
    problem = for_emitter(Problem(matrix, line["n"], DEVICES[line["device"]]), line["emitter"])
    tilings = regroup(matrix, sorted(set(line["rows"])))
    candidates = [
        UnrolledPlan(TileSize(rows, cols), Schedule(prefetch, group, split), tilings[rows])
        for rows, cols, prefetch, group, _, split in zip(*(line[axis] for axis in POINT_AXES), strict=True)
    ]
    found = features(problem, candidates).astype(np.float32)
    found[:, list(FEATURES).index("lockstep")] = line["lockstep"]
    return found


def _matrix(key: str, matrices: Path | None) -> SparseMatrix:
    if key.isdecimal():
        return drawn(int(key)).matrix
    if matrices is None:
        raise BadRequest(f"{key}: measured from a file; name the folder that it lies in (--matrices)")
    return read(matrices / key).matrix


def stale(dataset: Dataset) -> str | None:
    """Return why the features of a data set are not those of this code; None: they are."""
    if str(dataset.about[-1]) != features_digest():
        return "its features are others, or stand on other rates of the estimate: lospmm train-ranker renews them"
    return None


def save(dataset: Dataset, path: Path) -> None:
    """Write a data set, whole or not at all. The same data set gives the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".partial")
    with zipfile.ZipFile(scratch, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for field in fields(dataset):
            member = zipfile.ZipInfo(f"{field.name}.npy")  # of 1980: a time of writing would differ every time
            member.compress_type = zipfile.ZIP_DEFLATED
            with archive.open(member, "w", force_zip64=True) as file:
                np.lib.format.write_array(file, _stored(getattr(dataset, field.name)), allow_pickle=False)
    scratch.replace(path)


def _stored(column: NDArray[Any]) -> NDArray[Any]:
    """Return two-dimensional arrays in column-major order, which compresses better."""
    return np.asfortranarray(column)


def load(path: Path) -> Dataset:
    """Read a data set. Raises BadRequest for any other file."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            return Dataset(**{field.name: np.ascontiguousarray(archive[field.name]) for field in fields(Dataset)})
    except (OSError, KeyError, TypeError, ValueError, EOFError, zipfile.BadZipFile) as error:  # an .npy is an array
        if isinstance(error, OSError) and error.strerror:
            raise BadRequest(f"{path}: cannot be read: {error.strerror}") from None
        raise BadRequest(f"{path}: not a data set, which `lospmm train-ranker` writes as <device>.npz") from None
