"""Small errors that a program could contain: one changed place of one file each."""

import ast
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


def _table(pairs: str) -> dict[str, str]:
    return dict(pair.split(":") for pair in pairs.split())


OPERATORS = {
    **_table("<:<= <=:< >:>= >=:> ==:!= !=:== +:- -:+ *:/ /:* //:* %:// **:* @:* &:| |:& and:or or:and"),
    **{"is": "is not", "is not": "is", "in": "not in", "not in": "in"},
}
TOKEN = re.compile(r"\b(?:is not|not in|is|in|and|or)\b|\*\*|//|[<>=!]=|[-+*/%@&|<>]")
WORDS = _table(
    "support:train train:support query:train samples:uniform uniform:samples client:server online:fitted each_step:last "
    "zero:gradient difference:product personal:memory memory:personal"
)
"""Strings that name views, weightings, roles and options."""
NAMES = _table(
    "exact:first_order hessian_free:first_order maximum:minimum minimum:maximum max:min min:max any:all all:any argmin:argmax "
    "sum:mean mean:sum zeros:ones ones:zeros zeros_like:ones_like ones_like:zeros_like subtract:add add:sub sub:add floor:ceil "
    "ceil:floor PERSONAL:SHARED SHARED:BUFFER BUFFER:SHARED in_head:trainable head_leaves:body_leaves body_leaves:head_leaves"
)
"""Attributes and names."""
COMMUTATIVE = {"add", "maximum", "minimum", "multiply", "logical_or", "logical_and", "vdot", "union", "intersection", "merge"}
FIRST_STAYS = {"where", "_where", "map"}
"""Functions whose second and third arguments are exchanged instead, the branches of a choice and the trees of a map."""


@dataclass(frozen=True)
class Mutant:
    """Bytes `begin` to `end` of a file replaced by `new`.

    Attributes:
      source: the file as it is.
      kind: the operator that made it.
      id: changes with the file, so that a result never outlives the code that it is about.
    """

    path: str
    source: bytes
    begin: int
    end: int
    new: str
    kind: str
    id: str

    @property
    def broken(self) -> bytes:
        """The file with the error in it."""
        return self.source[: self.begin] + self.new.encode() + self.source[self.end :]

    @property
    def diff(self) -> list[str]:
        """The lines that change, with - and + before them."""
        begin, end = self.source.rfind(b"\n", 0, self.begin) + 1, (self.source + b"\n").find(b"\n", self.end)
        after = end + len(self.broken) - len(self.source)
        old, new = self.source[begin:end].decode().split("\n"), self.broken[begin:after].decode().split("\n")
        while old and new and old[0] == new[0]:
            old, new = old[1:], new[1:]
        while old and new and old[-1] == new[-1]:
            old, new = old[:-1], new[:-1]
        return [*(f"-{line}" for line in old), *(f"+{line}" for line in new)]

    def __str__(self) -> str:
        line = self.source[: self.begin].count(b"\n") + 1
        return "\n  ".join([f"{self.path}:{line}  {self.kind}", *self.diff])


def mutants_of(root: Path, path: str) -> list[Mutant]:
    """All mutants of a file, in the order of its lines."""
    source = (root / path).read_bytes()
    digest, found = hashlib.sha1(source).hexdigest(), []
    for begin, end, new, kind in sorted(set(_Finder(source).of(ast.parse(source)))):
        name = hashlib.sha1(f"{path} {digest} {begin} {end} {new}".encode()).hexdigest()[:12]
        mutant = Mutant(path, source, begin, end, new, kind, name)
        if mutant.broken != source and (kind not in MAY_BREAK_SYNTAX or _parses(mutant.broken)):
            found.append(mutant)
    return found


MAY_BREAK_SYNTAX = ("dropped keyword", "swapped arguments", "deleted statement")


def _parses(source: bytes) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


Edit = tuple[int, int, str, str]


class _Finder:
    """Walks over the code of a file; messages of errors, annotations, docstrings and declared reductions stay as they are."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        self.starts = [0, *(i + 1 for i, byte in enumerate(source) if byte == 10)]

    def at(self, node: ast.AST) -> tuple[int, int]:
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.AST) -> str:
        begin, end = self.at(node)
        return self.source[begin:end].decode()

    def of(self, node: ast.AST) -> Iterator[Edit]:
        if isinstance(node, (ast.Raise, ast.Import, ast.ImportFrom, ast.JoinedStr)):
            return
        if isinstance(node, ast.Assign) and any(getattr(t, "id", "") in ("REDUCES_TO", "__all__") for t in node.targets):
            return
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "tagged":
            return  # Any other key is as good.
        if isinstance(node, ast.keyword) and node.arg == "strict":
            return  # zip checks what holds anyhow.
        name = type(node).__name__.lower()
        visit = getattr(self, f"{name}_" if name in ("if", "while") else name, None)
        if visit is not None:
            yield from visit(node)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self.of(child)

    def operator(self, kind: str, left: ast.AST, right: ast.AST) -> Iterator[Edit]:
        """The operator between two operands, if nothing but parentheses is beside it."""
        begin, end = self.at(left)[1], self.at(right)[0]
        between = self.source[begin:end].decode()
        tokens = list(TOKEN.finditer(between))
        if len(tokens) == 1 and "#" not in between:
            yield begin + tokens[0].start(), begin + tokens[0].end(), OPERATORS[tokens[0][0]], kind

    def binop(self, node: ast.BinOp) -> Iterator[Edit]:
        yield from self.operator("arithmetic", node.left, node.right)

    def boolop(self, node: ast.BoolOp) -> Iterator[Edit]:
        yield from self.operator("condition", *node.values[:2])

    def compare(self, node: ast.Compare) -> Iterator[Edit]:
        for left, right in zip((node.left, *node.comparators), node.comparators, strict=False):
            yield from self.operator("comparison", left, right)

    def unaryop(self, node: ast.UnaryOp) -> Iterator[Edit]:
        begin = self.at(node)[0]
        length = len("not ") if isinstance(node.op, ast.Not) else 1
        yield begin, begin + length, "", "sign"

    def constant(self, node: ast.Constant) -> Iterator[Edit]:
        value, new = node.value, []
        if isinstance(value, bool):
            new = [not value]
        elif isinstance(value, int):
            new = [value + 1, *([value - 1] if value > 0 else [])]
        elif isinstance(value, float):
            new = [2 * value if value else 1.0]
        elif isinstance(value, str) and value in WORDS:
            new = [WORDS[value]]
        for other in new:
            yield *self.at(node), f'"{other}"' if isinstance(other, str) else repr(other), "constant"

    def name(self, node: ast.Name) -> Iterator[Edit]:
        if node.id in NAMES and isinstance(node.ctx, ast.Load):
            yield *self.at(node), NAMES[node.id], "name"

    def attribute(self, node: ast.Attribute) -> Iterator[Edit]:
        if node.attr in NAMES:
            end = self.at(node)[1]
            yield end - len(node.attr), end, NAMES[node.attr], "name"

    def call(self, node: ast.Call) -> Iterator[Edit]:
        name, arguments = getattr(node.func, "attr", getattr(node.func, "id", "")), node.args
        pair = arguments[1:3] if name in FIRST_STAYS else arguments[:2]
        if len(pair) == 2 and name not in COMMUTATIVE and all(map(_exchangeable, pair)):
            (begin, middle), (later, end) = self.at(pair[0]), self.at(pair[1])
            between = self.source[middle:later].decode()
            yield begin, end, self.text(pair[1]) + between + self.text(pair[0]), "swapped arguments"
        everything = sorted([*arguments, *node.keywords], key=lambda part: self.at(part)[0])
        for number, part in enumerate(everything):
            if isinstance(part, ast.keyword) and part.arg not in (None, "strict"):
                after = [self.at(other)[0] for other in everything[number + 1 :][:1]]
                begin = self.at(everything[number - 1])[1] if number else self.at(part)[0]
                yield begin, after[0] if after and not number else self.at(part)[1], "", "dropped keyword"

    def condition(self, node: ast.AST) -> Iterator[Edit]:
        yield *self.at(node), f"(not ({self.text(node)}))", "negated condition"

    def ifexp(self, node: ast.IfExp) -> Iterator[Edit]:
        yield from self.condition(node.test)

    def comprehension(self, node: ast.comprehension) -> Iterator[Edit]:
        for test in node.ifs:
            yield from self.condition(test)

    if_ = while_ = ifexp  # Python's own words need the underscore

    def functiondef(self, node: ast.FunctionDef) -> Iterator[Edit]:
        """Statements without which the function still has all its names."""
        bound = {a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
        for statement in node.body:
            again = isinstance(statement, ast.Assign) and all(
                isinstance(name, ast.Name) and name.id in bound for name in statement.targets
            )
            called = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
            if again or called or isinstance(statement, ast.AugAssign):
                yield *self.at(statement), "pass", "deleted statement"
            bound |= {
                name.id for name in ast.walk(statement) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
            }


def _exchangeable(argument: ast.expr) -> bool:
    """Whether an argument could be taken for another one: functions, strings and keys fail at once in another place."""
    if isinstance(argument, (ast.Lambda, ast.Starred, ast.GeneratorExp)):
        return False
    if isinstance(argument, ast.Constant):
        return not isinstance(argument.value, str)
    called = argument.func if isinstance(argument, ast.Call) else argument
    name = getattr(called, "attr", getattr(called, "id", ""))
    return name not in ("tagged", "fold_in", "partial", "task") and "key" not in name
