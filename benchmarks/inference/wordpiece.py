"""BERT's tokens of a text: words and punctuation, each cut into the longest pieces that the vocabulary has.

As in Devlin et al. (NAACL 2019), for uncased models; texts are English, characters without spaces between words are not
taken apart.
"""

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: A longer word is unknown, as in the original.
MOST_CHARACTERS = 100

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The pieces in the order of the rows of the model's embedding; those that go on a word begin with ``##``."""

    pieces: tuple[str, ...]

    def numbers(self) -> dict[str, int]:
        return {piece: number for number, piece in enumerate(self.pieces)}


def tokens(text: str, known: dict[str, int]) -> list[str]:
    """Of one sentence, with its begin and its end."""
    found = [piece for word in words(text) for piece in pieces(word, known)]
    return ["[CLS]", *found, "[SEP]"]


def batch(texts: Sequence[str], vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """Numbers of tokens (sentences, length of the longest), and 1 where there is one, 0 behind a sentence's end."""
    known = vocabulary.numbers()
    rows = [[known[token] for token in tokens(text, known)] for text in texts]
    length = max(map(len, rows))
    padding = known["[PAD]"]
    numbers = torch.tensor([row + [padding] * (length - len(row)) for row in rows])
    attended = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    return numbers, attended


def words(text: str) -> Iterator[str]:
    """Lower case, without accents; each mark of punctuation is a word."""
    word = ""
    for character in unicodedata.normalize("NFD", text.lower()):
        if unicodedata.category(character) == "Mn":
            continue
        if character.isspace() or is_punctuation(character):
            if word:
                yield word
            word = ""
            if not character.isspace():
                yield character
        else:
            word += character
    if word:
        yield word


def is_punctuation(character: str) -> bool:
    """Also the signs of ASCII that Unicode counts among the symbols."""
    return unicodedata.category(character).startswith("P") or (character.isascii() and character in "$+<=>^`|~")


def pieces(word: str, known: dict[str, int]) -> list[str]:
    found: list[str] = []
    start = 0
    while start < len(word) <= MOST_CHARACTERS:
        mark = "##" if start else ""
        fitting = (end for end in range(len(word), start, -1) if mark + word[start:end] in known)
        end = next(fitting, None)
        if end is None:
            return ["[UNK]"]
        found.append(mark + word[start:end])
        start = end
    return found or ["[UNK]"]
