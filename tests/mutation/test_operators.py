"""Changes are of code, one place each, and in Python still Python."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ktconv
from mutation.operators import mutants

pytestmark = pytest.mark.slow

C = b"""/* a < b */
#define N 1
static int f(const char *text, int n) {
  if (n < 8 && text[0] != '<') return n + 1;
  g(n, text);
  return n ? -n : 0;
}
"""


def test_changes_of_c() -> None:
    found = {one.described(C) for one in mutants("f.c", C)}
    assert "if (n [< -> <=] 8 && text[0] != '<') return n + 1;" in found
    assert "if ([n < 8 && text[0] != '<' -> !(n < 8 && text[0] != '<')]) return n + 1;" in found
    assert "if (n < 8 [&& -> ||] text[0] != '<') return n + 1;" in found
    assert "[g(n, text); -> ;]" in found
    assert "g([n, text -> text, n]);" in found
    assert "[return n ? -n : 0; -> return 0;]" in found
    assert "return n ? [- ->  ]n : 0;" in found
    assert all(C[one.start : one.start + 1] not in b"'" for one in mutants("f.c", C))
    assert min(one.line(C) for one in mutants("f.c", C)) == 4  # no comments, macros, pointers
    assert all(one.applied(C) != C for one in mutants("f.c", C))


PYTHON = b'''"""A docstring < 1."""
def f(a: int = 1) -> bool:
    if a not in (2, 3) and not g(a, 5, key=4):
        raise ValueError("text", 6)
    a += 1
    return True
'''


def test_changes_of_python() -> None:
    found = {one.described(PYTHON) for one in mutants("f.py", PYTHON)}
    assert "if a [not in -> in] (2, 3) and not g(a, 5, key=4):" in found
    assert "if a not in (2, 3) [and -> or] not g(a, 5, key=4):" in found
    assert "if a not in (2, 3) and [not g(a, 5, key=4) -> g(a, 5, key=4)]:" in found
    assert "if a not in (2, 3) and not g([a, 5 -> 5, a], key=4):" in found
    assert "if a not in (2, 3) and not g(a, 5, [key=4 -> ]):" in found
    assert "[a += 1 -> pass]" in found
    assert "return [True -> False]" in found and "return [True -> None]" in found
    assert not any("raise" in one or "docstring" in one for one in found)


@pytest.mark.parametrize("name", ["conversion/plan.py", "writer/journal.py"])
def test_changed_python_is_python(name: str) -> None:
    source = (Path(ktconv.__file__).parent / name).read_bytes()
    found = mutants(name, source)
    assert len(found) > 100
    unchanged = ast.dump(ast.parse(source))
    trees = [ast.parse(one.applied(source)) for one in found]
    for tree in trees[::3]:  # to write a tree out takes longer than to make it
        assert ast.dump(tree) != unchanged
