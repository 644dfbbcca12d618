"""Small wrong changes of a source: what mutation testing tries, for Python and C."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change: bytes `start` to `end` of a file become `new`."""

    start: int
    end: int
    new: str

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.end :]

    def line(self, source: bytes) -> int:
        return source.count(b"\n", 0, self.start) + 1

    def described(self, source: bytes) -> str:
        """`old` -> `new`, with what is left and right of it in the line."""
        begin = source.rfind(b"\n", 0, self.start) + 1
        end = source.find(b"\n", self.end)
        before, old = source[begin : self.start], source[self.start : self.end]
        after = source[self.end : end if end >= 0 else len(source)]
        return f"{_short(before)[-50:]}[{_short(old)} -> {self.new}]{_short(after)[:40]}".strip()


def _short(text: bytes) -> str:
    return re.sub(r"\s+", " ", text.decode())


def mutants(path: str, source: bytes) -> list[Mutant]:
    """All mutants of a file, in order."""
    found = set(_of_python(source) if path.endswith(".py") else _of_c(source))
    return sorted(found, key=lambda one: (one.start, one.end, one.new))


# ---- both ----------------------------------------------------------------------------

COMPARISONS = {
    "<": ["<=", ">="], "<=": ["<", ">"], ">": [">=", "<="], ">=": [">", "<"], "==": ["!="],
    "!=": ["=="],
}  # fmt: skip
ARITHMETIC = {
    "+": ["-"], "-": ["+"], "*": ["+"], "/": ["*"], "%": ["/"], "<<": [">>"], ">>": ["<<"],
    "&": ["|"], "|": ["&"], "^": ["|"],
}  # fmt: skip


def _integers(value: int) -> list[str]:
    return [str(value + 1), str(value - 1)] if value > 0 else ["1"]


# ---- C -------------------------------------------------------------------------------

_C_TOKEN = re.compile(
    rb"""(?P<skip>/\*.*?\*/|//[^\n]*|^[ ]*\#(?:[^\n]*\\\n)*[^\n]*
               |"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')
    |(?P<name>[A-Za-z_]\w*)
    |(?P<number>0[xX][0-9a-fA-F.]+(?:[pP][+-]?\d+)?[uUlLfF]*
               |\d+(?:\.\d*)?(?:[eE][+-]?\d+)?[uUlLfF]*)
    |(?P<sign><<=|>>=|\.\.\.|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|[-+*/%&|^~!<>=?:;,.(){}\[\]])
    """,
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
_ASSIGNMENTS = {"+=": "-=", "-=": "+=", "|=": "&=", "&=": "|=", "<<=": ">>=", ">>=": "<<="}


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    start: int
    end: int


def _of_c(source: bytes) -> Iterator[Mutant]:
    tokens = [
        _Token(str(one.lastgroup), one[0].decode(), one.start(), one.end())
        for one in _C_TOKEN.finditer(source)
        if one.lastgroup != "skip"
    ]
    for at, token in enumerate(tokens):
        before = tokens[at - 1] if at else _Token("sign", ";", 0, 0)
        spaced = source[token.end : token.end + 1].isspace()  # no pointer, no sign of a number
        yield from _of_c_token(token, before, spaced)
        after = tokens[at + 1 : at + 6]
        if token.kind == "name" and [one.text for one in after[:1]] == ["("]:
            yield from _swapped(after)
        if token.text in ("if", "while"):
            yield from _condition(source, tokens, at + 1)
        if before.text in (";", "{", "}", ")", "else"):
            yield from _statement(tokens, at)


def _of_c_token(token: _Token, before: _Token, spaced: bool) -> Iterator[Mutant]:
    text = token.text
    operand = before.text in (")", "]") or before.kind in ("number", "name")
    new: list[str] = []
    if token.kind == "number":
        new = _c_numbers(text)
    elif text in COMPARISONS:
        new = COMPARISONS[text]
    elif text in ARITHMETIC and operand and spaced:
        new = ARITHMETIC[text]
    elif text in ("&&", "||"):
        new = ["||" if text == "&&" else "&&"]
    elif text in _ASSIGNMENTS:
        new = [_ASSIGNMENTS[text]]
    elif text in ("!", "~") or (text == "-" and not operand):
        new = [" "]
    elif text in ("break", "continue"):
        new = ["continue" if text == "break" else "break"]
    for one in new:
        yield Mutant(token.start, token.end, one)


def _c_numbers(text: str) -> list[str]:
    if re.fullmatch(r"\d+[uUlL]*", text):
        return _integers(int(text.rstrip("uUlL")))
    if re.fullmatch(r"0[xX][0-9a-fA-F]+[uUlL]*", text):
        return [f"({text} ^ 1)", f"({text} >> 1)"]
    return [f"(2 * {text})" if re.search("[1-9]", text.removeprefix("0x")) else f"({text} + 1)"]


def _swapped(after: list[_Token]) -> Iterator[Mutant]:
    """f(a, b, ...) with the first two names the other way round."""
    if len(after) == 5 and [one.text for one in (after[0], after[2])] == ["(", ","]:
        a, b = after[1], after[3]
        if a.kind == b.kind == "name" and a.text != b.text and after[4].text in (",", ")"):
            yield Mutant(a.start, b.end, f"{b.text}, {a.text}")


def _closing(tokens: list[_Token], at: int) -> int | None:
    """The bracket that closes the one at `at`."""
    depth = 0
    for number in range(at, len(tokens)):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(tokens[number].text, 0)
        if depth == 0:
            return number
    return None


def _condition(source: bytes, tokens: list[_Token], at: int) -> Iterator[Mutant]:
    closing = _closing(tokens, at)
    if closing is not None and tokens[at].text == "(":
        begin, end = tokens[at].end, tokens[closing].start
        yield Mutant(begin, end, f"!({source[begin:end].decode()})")


def _statement(tokens: list[_Token], at: int) -> Iterator[Mutant]:
    """A statement left out, or a value returned that is none."""
    first, depth, end = tokens[at], 0, at
    if first.kind != "name":
        return
    while end < len(tokens):
        text = tokens[end].text
        depth += (text in ("(", "[", "{")) - (text in (")", "]", "}"))
        if depth < 0 or (depth == 0 and text == ";"):
            break
        end += 1
    if end >= len(tokens) or tokens[end].text != ";":
        return
    second = tokens[at + 1]
    if first.text == "return":
        if end > at + 1 and [one.text for one in tokens[at + 1 : end]] != ["0"]:
            yield Mutant(first.start, tokens[end].end, "return 0;")
    elif second.text in ("(", "[", "=", ".", "->", "++") or second.text in _ASSIGNMENTS:
        yield Mutant(first.start, tokens[end].end, ";")


# ---- Python --------------------------------------------------------------------------

_PYTHON_SIGNS: dict[type[ast.AST], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%", ast.LShift: "<<",
    ast.RShift: ">>", ast.BitAnd: "&", ast.BitOr: "|", ast.Div: "/",
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
    ast.In: "in", ast.NotIn: "not in", ast.Is: "is", ast.IsNot: "is not",
    ast.And: "and", ast.Or: "or",
}  # fmt: skip
_PYTHON_NEW = {
    **COMPARISONS, **ARITHMETIC, "//": ["*"], "in": ["not in"], "not in": ["in"],
    "is": ["is not"], "is not": ["is"], "and": ["or"], "or": ["and"],
}  # fmt: skip


class _Python:
    def __init__(self, source: bytes) -> None:
        self._source = source
        self._lines = [0]
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def start(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        return self._lines[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        return self._lines[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)

    def whole(self, node: ast.expr | ast.stmt, new: str) -> Mutant:
        return Mutant(self.start(node), self.end(node), new)

    def text(self, node: ast.expr | ast.stmt) -> str:
        return self._source[self.start(node) : self.end(node)].decode()

    def walk(self, node: ast.AST) -> Iterator[ast.AST]:
        """Everything but annotations, docstrings, messages of exceptions and type variables."""
        yield node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "bases", "type_params"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not _is_text_alone(child):
                    yield from self.walk(child)

    def mutants(self, node: ast.AST) -> Iterator[Mutant]:
        if isinstance(node, ast.BinOp):
            yield from self._between(node.left, node.right, node.op)
        elif isinstance(node, ast.Compare):
            for left, sign, right in zip(
                [node.left, *node.comparators], node.ops, node.comparators, strict=False
            ):
                yield from self._between(left, right, sign)
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from self._between(left, right, node.op)
        elif isinstance(node, ast.UnaryOp):
            yield self.whole(node, self.text(node.operand))
        elif isinstance(node, ast.Constant):
            yield from self._constant(node)
        elif isinstance(node, (ast.If, ast.IfExp, ast.While)):
            yield self.whole(node.test, f"not ({self.text(node.test)})")
        elif isinstance(node, ast.comprehension):
            for test in node.ifs:
                yield self.whole(test, f"not ({self.text(test)})")
        elif isinstance(node, ast.Call):
            yield from self._call(node)
        elif isinstance(node, ast.AugAssign):
            yield self.whole(node, "pass")
        elif isinstance(node, (ast.Break, ast.Continue)):
            yield self.whole(node, "continue" if isinstance(node, ast.Break) else "break")
        elif isinstance(node, (ast.Return, ast.Assign)) and node.col_offset and node.value:
            if self.text(node.value) != "None":
                yield self.whole(node.value, "None")
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield self.whole(node, "pass")

    def _between(self, left: ast.expr, right: ast.expr, sign: ast.AST) -> Iterator[Mutant]:
        text = _PYTHON_SIGNS.get(type(sign), "")
        begin, end = self.end(left), self.start(right)
        pattern = rb"\s+".join(re.escape(one) for one in text.encode().split())
        if text and (found := re.search(pattern, self._source[begin:end])):
            for new in _PYTHON_NEW.get(text, []):
                yield Mutant(begin + found.start(), begin + found.end(), new)

    def _constant(self, node: ast.Constant) -> Iterator[Mutant]:
        value = node.value
        if isinstance(value, bool):
            yield self.whole(node, str(not value))
        elif isinstance(value, int):
            for new in _integers(value):
                yield self.whole(node, new)
        elif isinstance(value, float):
            yield self.whole(node, repr(2 * value + 1))
        elif isinstance(value, str) and self.text(node)[:1] in "\"'":
            yield self.whole(node, repr(value + "X"))
            if value:
                yield self.whole(node, "''")

    def _call(self, node: ast.Call) -> Iterator[Mutant]:
        for keyword in node.keywords:
            if keyword.arg:
                begin, end = self.start(keyword), self.end(keyword)
                if found := re.match(rb"\s*,", self._source[end:]):
                    yield Mutant(begin, end + found.end(), "")
                else:
                    yield Mutant(begin, end, "")
        if len(node.args) > 1:
            a, b = self.text(node.args[0]), self.text(node.args[1])
            starred = any(isinstance(one, ast.Starred) for one in node.args[:2])
            if a != b and not starred:
                yield Mutant(self.start(node.args[0]), self.end(node.args[1]), f"{b}, {a}")


def _is_text_alone(node: ast.AST) -> bool:
    """Docstrings and f-strings, which are messages; and what is raised."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    return isinstance(node, (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom))


def _of_python(source: bytes) -> Iterator[Mutant]:
    python = _Python(source)
    for node in python.walk(ast.parse(source)):
        yield from python.mutants(node)
