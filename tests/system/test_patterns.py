"""Patterns of names against Python's own `re`, and in bounded time."""

from __future__ import annotations

import itertools
import random
import re
import time
from contextlib import suppress

import pytest

from ktconv.system import patterns as module
from ktconv.system.patterns import PatternError, Patterns

pytestmark = pytest.mark.slow

NAME = "model.layers.12.mlp.experts.7.gate_proj"
NAMES = (
    NAME,
    "model.layers.1.self_attn.q_proj",
    "lm_head",
    "model.layers.1.mlp.gate",
    "q_proj",
    "",
    "a.b_c-d.0",
)
# As they are in configs of adapters.
USUAL = (
    "q_proj", "self_attn.q_proj", r"layers\.1\.self_attn\.q_proj",
    "^model.layers.1.self_attn.q_proj", "^layers.1.self_attn.q_proj",
    ".*self_attn.*(q|k|v|o)_proj$",
    "gate_proj|up_proj|down_proj",
    r".*\.experts\.\d+\.(gate|up|down)_proj", "(?!.*experts).*proj", "^(?!.*mlp).*$", "layer.*",
    r"model\.layers\.(0|1|2|1[0-9])\..*", "layers.[0-9]+.mlp.gate", "q.proj",
    "a.b_c.d.0", r"a\.b_c\-d\.0",
    "mlp", "", ".*", ".", "lm_head$", "^lm_head", r"\w+", "[^.]+", "x{0}lm_head", "l{1,2}m_.{4}",
    "(?:lm|LM)_(?P<end>head)", r"gate\b", r"(?<=experts\.)7\.gate_proj", r"(?<!0\.)7\.gate_proj",
    "lm_head{", "[]l]m_head", "[l-m]+_h[^x-z]*", r"[\w]+d", "(lm_)+?head??", "(a|)lm_head",
)  # fmt: skip


def by_re(patterns: list[str], name: str) -> str | None:
    """PEFT's rule in PEFT's words."""
    return next((one for one in patterns if re.match(rf"(.*\.)?({one})$", name)), None)


@pytest.mark.parametrize("pattern", USUAL)
def test_usual_patterns(pattern: str) -> None:
    for name in NAMES:
        assert Patterns([pattern]).first(name) == by_re([pattern], name), name


def test_the_first_of_many_counts() -> None:
    draw = random.Random(0)
    for _ in range(200):
        some = draw.sample(USUAL, 8)
        assert [Patterns(some).first(name) for name in NAMES] == [by_re(some, n) for n in NAMES]


def drawn(draw: random.Random, depth: int = 0) -> str:
    """A pattern of all that is known."""
    kinds = ["a", "b", r"\.", ".", "[ab]", "[^a.]", r"\w", r"\W", "^", "$", r"\b", "_", "-", "{"]
    found = []
    for _ in range(draw.randint(0 if depth else 1, 4)):
        if depth < 3 and draw.random() < 0.4:
            start = draw.choice(["(", "(?:", "(?=", "(?!", f"(?P<n{draw.randrange(10**9)}>"])
            one = f"{start}{'|'.join(drawn(draw, depth + 1) for _ in range(draw.randint(1, 3)))})"
        else:
            one = draw.choice(kinds)
        if one not in ("^", "$", r"\b", "{") and draw.random() < 0.4:
            one += draw.choice(["*", "+", "?", "{2}", "{1,2}", "{,2}", "{1,}", "*?", "+?"])
        found.append(one)
    return "".join(found)


def test_drawn_patterns() -> None:
    """The same answers as `re` for whatever is drawn, and for all short names."""
    draw = random.Random(1)
    names = ["", "a", "b", ".", "a.b", "ab", "ba.a", "aab_b", "b.a.ab", "a-.b", "{a", "ab.{"]
    compared = 0
    for _ in range(1500):
        pattern = drawn(draw)
        if pattern.count("{2}") > 8:
            continue  # too long, written out
        ours, theirs = Patterns([pattern]), re.compile(rf"(.*\.)?({pattern})$")
        for name in names:
            found = theirs.match(name) is not None
            assert (ours.first(name) is not None) == found, (pattern, name)
            compared += found
    assert compared > 1500


@pytest.mark.parametrize(
    "bomb",
    ["(x+x+)+y", "(x*)*y", "((((x*)*)*)*)*y", "(x|x)*y", "(x|xx)+y", "(.*.*.*.*.*)*=",
     "(x+){1000}y", "(x{1,1000}){1,1000}y", "(?=(x+x+)+y)x", "^(([a-z])+.)+[A-Z]([a-z])+$",
     "(" * 30 + "x" + ")*" * 30],
)  # fmt: skip
def test_bombs(bomb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer or a refusal in the time that is allowed."""
    monkeypatch.setattr(module, "MAX_SECONDS", 0.2)
    patterns = Patterns([bomb])
    started = time.process_time()
    with suppress(PatternError):
        assert patterns.first("model." + "x" * 200) in (None, bomb)
    assert time.process_time() - started < 10


def test_two_hundred_thousand_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are looked up; others are refused, before any is tried and while they are."""
    names = [f"model.layers.{n}.experts.{n}.q_proj" for n in range(200_000)]
    patterns = Patterns(names)
    assert patterns.first("base.model.layers.199999.experts.199999.q_proj") == names[-1]
    assert patterns.first("base.model.layers.7.experts.8.q_proj") is None
    assert patterns._seconds > 0
    with pytest.raises(PatternError, match="too many or too long"):
        Patterns(f"(x+x+)+{n}" for n in range(200_000))
    with pytest.raises(PatternError, match="too many or too long"):
        Patterns(["((((a|b?){1000}){1000}){1000}){1000}y"])
    monkeypatch.setattr(module, "MAX_SECONDS", 0.2)
    many = Patterns(f"(x+x+)+{n:04}" for n in range(2_000))
    with pytest.raises(PatternError, match="take too long"):
        for n in range(100):
            many.first("x" * 200 + str(n))
    with pytest.raises(PatternError, match="take too long"):
        Patterns(["(x|xx)+y"]).first("x" * 200)


def test_the_time_is_for_all_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that goes on after the first refusal, as for lists of exclusions, waits once."""
    monkeypatch.setattr(module, "MAX_SECONDS", 0.2)
    patterns, started = Patterns(["(x|xx)+y"]), time.thread_time()
    for n in range(50):
        with pytest.raises(PatternError, match="take too long"):
            patterns.first("x" * 200 + str(n))
    assert time.thread_time() - started < 5


def test_the_time_of_other_threads_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()  # a second of theirs whenever somebody looks
    monkeypatch.setattr(time, "process_time", lambda: float(next(clock)))
    patterns = Patterns([r"layers\.\d+\.q_proj"])
    assert all(patterns.first(f"layers.{n}.q_proj") for n in range(20))


@pytest.mark.parametrize(
    "text", ["(", ")", "a)", "[a", "*", "a**", "a|*", "x{2,1}", "(?P<>a)", "\\", "[b-a]"]
)
def test_what_is_no_regular_expression(text: str) -> None:
    with pytest.raises(re.error):
        re.compile(f"({text})")
    with pytest.raises(PatternError, match="which is no regular expression"):
        Patterns([text])


@pytest.mark.parametrize(
    "text", [r"(a|b)_\3", "a*?b", "(?P<n>a)(?P=n)", "(" * 50 + "a" + ")" * 50, r"\x61", "a{e<=1}"]
)
def test_what_re_knows(text: str) -> None:
    """References, characters by number, and braces that repeat nothing."""
    for name in ("a", "x.aa", "a_a", "a_b", "aab", "b", ""):
        assert Patterns([text]).first(name) == by_re([text], name), name


@pytest.mark.parametrize(
    "text",
    [
        "(?R)",
        "(a)(?1)",
        r"\p{L}+",
        r"\X",
        "(?e)a",
        "(?|a|b)",
        "(?<n>a)",
        "(?<=a+)b",
        "a{0,99999999999}",
    ],
)
def test_what_only_regex_knows(text: str) -> None:
    """PEFT cannot read it either; (?R) would take all memory."""
    with pytest.raises((re.error, OverflowError)):
        re.compile(f"({text})")
    with pytest.raises(PatternError, match="which is no regular expression"):
        Patterns([text])


@pytest.mark.parametrize("text", [r"a\\{e<=1}", "[[:alpha:]]+", "[[:alpha:]", "[:a]+", r"\[:a"])
@pytest.mark.filterwarnings("ignore:Possible nested set:FutureWarning")
def test_what_regex_reads_otherwise(text: str) -> None:
    for name in ("a", "b", "a\\", "a\\{e<=1}", "h]", "[:]]", ":a", "[:a", "[", ""):
        assert Patterns([text]).first(name) == by_re([text], name), name


def test_too_many_groups_in_one_another() -> None:
    with pytest.raises(PatternError, match="too many groups in one"):
        Patterns(["(" * 5000 + ")" * 5000])
