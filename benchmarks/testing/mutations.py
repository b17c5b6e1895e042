"""Mutations of functions, named by function, statement and expression so that names survive moves of modules."""

import ast
import copy
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGES = {"lospmm": "lospmm", "lospmm_server": "server/lospmm_server"}  # whose functions are mutated

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitAnd,
}  # fmt: skip
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# A mutated text cannot be typed, tells nothing, or has no position of its own.
SKIPPED = (ast.JoinedStr, ast.Assert, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal)
TEXTS = re.compile(r"""(?:\bf)?('{3}.*?'{3}|"{3}.*?"{3}|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Name:
    """A mutant in any layout of the modules: ``ordinal`` counts the same mutation within one statement."""

    function: str
    statement: str
    kind: str
    before: str
    after: str
    ordinal: int


@dataclass(frozen=True, slots=True)
class Edit:
    """Bytes of one file to replace, and the lines by which a test covers them."""

    path: Path
    start: int
    end: int
    text: str
    lines: tuple[int, ...]

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]


@dataclass(frozen=True, slots=True)
class Change:
    kind: str
    node: ast.AST
    replacement: ast.AST


def source_of(node: ast.AST) -> str:
    """In one form, without the words of messages, which change more often than what is done."""
    return TEXTS.sub(lambda found: "'...'" if found[0][0] == "f" or " " in found[0] else found[0], ast.unparse(node))


def statement_text(statement: ast.stmt) -> str:
    """Its source in one form, without the statements within."""
    head = copy.copy(statement)
    for block in ("body", "orelse", "finalbody", "handlers", "cases", "decorator_list"):
        if isinstance(getattr(head, block, None), list):
            setattr(head, block, [])
    return source_of(head)


def functions_of(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, FUNCTIONS))


def statements_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.stmt]:
    """The statements of a function, itself first; not those of the functions and classes within."""
    yield function
    pending = list(reversed(function.body))
    while pending:
        statement = pending.pop()
        if isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
            continue
        yield statement
        inner: list[ast.stmt] = []
        for block in ("body", "orelse", "finalbody"):
            inner += getattr(statement, block, [])
        for part in (*getattr(statement, "handlers", []), *getattr(statement, "cases", [])):
            inner += part.body
        pending += reversed(inner)


def _expressions(node: ast.AST) -> Iterator[ast.expr]:
    """Below a node in the order of the source; not the statements within, annotations, and what is skipped."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "body") and isinstance(node, (ast.stmt, ast.arg)):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, (ast.stmt, ast.excepthandler, *SKIPPED)) or not isinstance(child, ast.AST):
                continue
            if isinstance(child, ast.expr):
                yield child
            yield from _expressions(child)


def _negated(test: ast.expr) -> ast.expr:
    return ast.UnaryOp(ast.Not(), test)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _of_expression(node: ast.expr) -> Iterator[Change]:
    match node:
        case ast.Compare(left=left, ops=operators, comparators=others):
            for index, operator in enumerate(operators):
                changed = [*operators[:index], COMPARISONS[type(operator)](), *operators[index + 1 :]]
                yield Change("comparison", node, ast.Compare(left, changed, others))
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in OPERATORS:
            if not _is_text(left) and not _is_text(right):  # of texts and paths: an error wherever it runs
                yield Change("operator", node, ast.BinOp(left, OPERATORS[type(operator)](), right))
        case ast.BoolOp(op=operator, values=values):
            yield Change("and/or", node, ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), values))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield Change("not", node, operand)
        case ast.Constant(value=bool(value)):
            yield Change("constant", node, ast.Constant(not value))
        case ast.Constant(value=int(value)):
            yield Change("constant", node, ast.Constant(value + 1))
            yield Change("constant", node, ast.Constant(value - 1))
        case ast.Constant(value=float(value)):
            yield Change("constant", node, ast.Constant(value + 1))
        case ast.IfExp(test=test, body=body, orelse=orelse) if not isinstance(test, ast.UnaryOp):
            yield Change("condition", node, ast.IfExp(_negated(test), body, orelse))


def changes_of(statement: ast.stmt) -> Iterator[Change]:
    """Every mutation of one statement; of a function, of the defaults of its parameters."""
    match statement:
        case ast.Raise():
            yield Change("raise", statement, ast.Pass())
        case ast.Return(value=value) if value and not (isinstance(value, ast.Constant) and value.value is None):
            yield Change("return", statement, ast.Return(ast.Constant(None)))
        case ast.If(test=test) if not isinstance(test, ast.UnaryOp):
            yield Change("condition", test, _negated(test))
    if isinstance(statement, SKIPPED):
        return
    if isinstance(statement, FUNCTIONS):
        for default in (*statement.args.defaults, *filter(None, statement.args.kw_defaults)):
            for change in _of_expression(default):
                yield Change("default", change.node, change.replacement)
        return
    for expression in _expressions(statement):
        yield from _of_expression(expression)


def _edit(path: Path, starts: list[int], statement: ast.stmt, change: Change) -> Edit:
    node = change.node
    assert isinstance(node, (ast.expr, ast.stmt)) and node.end_lineno and node.end_col_offset is not None
    text = ast.unparse(change.replacement)
    if isinstance(statement, FUNCTIONS):  # a default is seen by whoever runs the body
        lines = range(statement.body[0].lineno, (statement.end_lineno or 0) + 1)
    else:
        lines = range(statement.lineno, node.end_lineno + 1)  # a constant may have no code on its own line
    start, end = starts[node.lineno] + node.col_offset, starts[node.end_lineno] + node.end_col_offset
    return Edit(path, start, end, text if isinstance(node, ast.stmt) else f"({text})", tuple(lines))


def mutants_of(path: Path, tree: Path) -> dict[Name, list[Edit]]:
    """Of one file, whose paths are relative to ``tree``; a name may stand for several edits."""
    source = (tree / path).read_bytes()
    starts = [0, 0]  # of line 1 and on
    for line in source.split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    found: dict[Name, list[Edit]] = {}
    for function in functions_of(ast.parse(source)):
        for statement in statements_of(function):
            text = statement_text(statement)
            seen: Counter[tuple[str, str, str]] = Counter()
            for change in changes_of(statement):
                key = change.kind, source_of(change.node), source_of(change.replacement)
                name = Name(function.name, text, *key, ordinal=seen[key])
                seen[key] += 1
                found.setdefault(name, []).append(_edit(path, starts, statement, change))
    return found


def statements_in(path: Path) -> Iterator[tuple[str, str]]:
    """Function and text of each statement of a module's functions; those of the module itself have no function."""
    tree = ast.parse(path.read_bytes())
    yield from (("", statement_text(statement)) for statement in tree.body)
    for function in functions_of(tree):
        yield from ((function.name, statement_text(statement)) for statement in statements_of(function))


def python_files(tree: Path, packages: dict[str, str] = PACKAGES) -> list[Path]:
    """The modules of packages, relative to ``tree``."""
    return sorted(path.relative_to(tree) for folder in packages.values() for path in (tree / folder).rglob("*.py"))


def named_mutants(tree: Path) -> dict[Name, Edit]:
    """The mutants of a tree that a name tells from all others."""
    found: dict[Name, list[Edit]] = {}
    for path in python_files(tree):
        for name, edits in mutants_of(path, tree).items():
            found.setdefault(name, []).extend(edits)
    return {name: edits[0] for name, edits in found.items() if len(edits) == 1}


def find(name: Name, mutants: dict[Name, Edit]) -> Edit | None:
    """Where a mutant stands; in a changed statement or a renamed function, if only one there is the same mutation."""
    if name in mutants:
        return mutants[name]
    mutation = name.kind, name.before, name.after
    alike = [one for one in mutants if (one.kind, one.before, one.after) == mutation]
    for found in (
        [one for one in alike if one.function == name.function],
        [one for one in alike if (one.statement, one.ordinal) == (name.statement, name.ordinal)],
    ):
        if len(found) == 1:
            return mutants[found[0]]
    return None
