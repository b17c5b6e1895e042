"""Parser of indirect Einsums (Insum, arXiv:2510.17505).

    expression  access "+=" access ("*" access)*
    access      name "[" index ("," index)* "]"
    index       name | name "[" name ("," name)* "]"

A plain index is a variable; ``r[p]`` is the number that the array ``r`` holds at ``p``. The meaning is that of loops
over all values of all variables, in which the product is added to the output's element.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lospmm.errors import BadRequest

_TOKEN = re.compile(r"\s*(?P<token>[A-Za-z_][A-Za-z_0-9]*|\+=|[\[\],*])", re.ASCII)
_NAME = re.compile(r"[A-Za-z_]")


@dataclass(frozen=True, slots=True)
class Index:
    """A variable or, with ``variables``, an element of the array ``name``; ``at``: its place in the text."""

    name: str
    variables: tuple["Index", ...]
    at: int

    @property
    def is_indirect(self) -> bool:
        """Whether it is an element of an array of indices."""
        return bool(self.variables)

    @property
    def names(self) -> tuple[str, ...]:
        """Variables that it depends on."""
        return tuple(one.name for one in self.variables) or (self.name,)


@dataclass(frozen=True, slots=True)
class TensorAccess:
    """An array with its indices; ``at`` is its place in the text."""

    name: str
    indices: tuple[Index, ...]
    at: int


@dataclass(frozen=True, slots=True)
class Expression:
    """A parsed expression."""

    text: str
    output: TensorAccess
    factors: tuple[TensorAccess, ...]

    def fault(self, part: Index | TensorAccess, reason: str) -> BadRequest:
        """Return an error that points at a part of the expression."""
        return fault(self.text, part.at, reason)

    @property
    def accesses(self) -> tuple[TensorAccess, ...]:
        """The output and all factors."""
        return (self.output, *self.factors)

    @property
    def indirect(self) -> tuple[Index, ...]:
        """Every use of an array of indices, in the order of the text."""
        return tuple(index for access in self.accesses for index in access.indices if index.is_indirect)

    @property
    def variables(self) -> tuple[str, ...]:
        """The variables, in the order of the text."""
        return tuple(
            dict.fromkeys(name for access in self.accesses for index in access.indices for name in index.names)
        )


def fault(text: str, at: int, reason: str) -> BadRequest:
    """Return an error that points at a character of the expression."""
    return BadRequest(f"einsum: {reason}, at character {at + 1}\n  {text}\n  {' ' * at}^")


def parse(text: str) -> Expression:
    """Parse an expression. Raises BadRequest that points at the first unexpected character."""
    if not isinstance(text, str):
        raise BadRequest(f"einsum: the expression is a {type(text).__name__}, not a text")
    line = " ".join(text.splitlines())
    tokens = _Tokens(line)
    output = _access(tokens)
    tokens.take("+=", "after the output")
    factors = [_access(tokens)]
    while tokens.at_hand == "*":
        tokens.step()
        factors.append(_access(tokens))
    if tokens.at_hand:
        raise fault(line, tokens.at, f"{tokens.at_hand!r} where '*' or the end is expected")
    expression = Expression(line, output, tuple(factors))
    _check_names(expression)
    return expression


class _Tokens:
    """The tokens of a line, with one of lookahead; '' at its end."""

    def __init__(self, line: str) -> None:
        self.line = line
        self._rest = self._split()
        self.at_hand, self.at = next(self._rest)

    def _split(self) -> Iterator[tuple[str, int]]:
        at = 0
        while at < len(self.line.rstrip()):
            match = _TOKEN.match(self.line, at)
            if match is None:
                wrong = at + len(self.line[at:]) - len(self.line[at:].lstrip())
                raise fault(self.line, wrong, f"{self.line[wrong]!r} has no meaning here")
            yield match["token"], match.start("token")
            at = match.end()
        while True:
            yield "", len(self.line.rstrip())

    def take(self, wanted: str, where: str) -> None:
        """Consume ``wanted``."""
        if self.at_hand != wanted:
            raise fault(self.line, self.at, f"{wanted!r} is expected {where}, not {self.at_hand or 'the end'!r}")
        self.step()

    def name(self, what: str) -> tuple[str, int]:
        found = self.at_hand
        if not _NAME.match(found):
            raise fault(self.line, self.at, f"{what} is expected, not {found or 'the end'!r}")
        return found, self.step()

    def step(self) -> int:
        """Go on to the next token and return the place of this one."""
        at = self.at
        self.at_hand, self.at = next(self._rest)
        return at


def _access(tokens: _Tokens) -> TensorAccess:
    name, at = tokens.name("the name of an array")
    return TensorAccess(name, _bracketed(tokens, name, "indices", _index), at)


def _index(tokens: _Tokens) -> Index:
    name, at = tokens.name("an index")
    return Index(name, _bracketed(tokens, name, "variables", _variable) if tokens.at_hand == "[" else (), at)


def _variable(tokens: _Tokens) -> Index:
    name, at = tokens.name("a variable")
    if tokens.at_hand == "[":
        raise fault(tokens.line, tokens.at, f"an index within an index: write {name}[...] as an array of its own")
    return Index(name, (), at)


def _bracketed(tokens: _Tokens, name: str, what: str, one: Callable[[_Tokens], Index]) -> tuple[Index, ...]:
    tokens.take("[", f"after {name}")
    found = [one(tokens)]
    while tokens.at_hand == ",":
        tokens.step()
        found.append(one(tokens))
    tokens.take("]", f"after the {what} of {name}")
    return tuple(found)


def _check_names(expression: Expression) -> None:
    """Check that a name has one meaning: the output, a factor, an array of indices or a variable."""
    kinds: dict[str, str] = {expression.output.name: "the output"}
    uses = [("a factor", factor.name, factor.at) for factor in expression.factors]
    uses += [("an array of indices", index.name, index.at) for index in expression.indirect]
    for access in expression.accesses:
        for index in access.indices:
            plain = index.variables or (index,)
            uses += [("a variable", one.name, one.at) for one in plain]
    for kind, name, at in uses:
        if kinds.setdefault(name, kind) != kind:
            raise fault(expression.text, at, f"{name} is {kind} here and {kinds[name]} elsewhere")


def shape_of_text(output: TensorAccess, factors: Sequence[TensorAccess]) -> str:
    """Return an expression with each name replaced by its number in order of first occurrence: its form."""
    numbers: dict[str, int] = {}

    def number(name: str) -> str:
        return str(numbers.setdefault(name, len(numbers)))

    def text(access: TensorAccess) -> str:
        parts = []
        for index in access.indices:
            own = number(index.name)
            inner = ",".join(number(one.name) for one in index.variables)
            parts.append(f"{own}[{inner}]" if inner else own)
        return f"{number(access.name)}[{','.join(parts)}]"

    return f"{text(output)}+={'*'.join(text(factor) for factor in factors)}"
