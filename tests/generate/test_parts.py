"""Text of tokens piece by piece, choosing tokens, and readers that are gone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.paths import EXAMPLE

from ktconv.errors import CheckpointError, UsageError
from ktconv.generate.request import Sampling

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.mark.parametrize("text", ["two  words\n\tand é, 語, 🙂.", "x", " a", "🙂🙂"])
def test_pieces_are_the_text(text: str) -> None:
    """Characters of several tokens come whole."""
    from ktconv.generate.prompt import TextStream
    from ktconv.model.load import load_tokenizer

    tokenizer = load_tokenizer(EXAMPLE)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    stream = TextStream(tokenizer)
    pieces = [stream.add(one) for one in ids]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join([*pieces, stream.end()]) == tokenizer.decode(ids)
    broken = TextStream(tokenizer)
    shown = "".join([*(broken.add(one) for one in ids[:-1]), broken.end()])
    assert shown == tokenizer.decode(ids[:-1])


def test_top_p_keeps_the_fewest_likeliest() -> None:
    from ktconv.generate.decoding import _Chooser

    logits = torch.log(torch.tensor([0.1, 0.5, 0.15, 0.25]))
    for top_p, kept in ((0.5, {1}), (0.6, {1, 3}), (0.8, {1, 2, 3}), (1.0, {0, 1, 2, 3})):
        choose = _Chooser(Sampling(1.0, top_p, 3))
        assert {choose(logits) for _ in range(200)} == kept


@pytest.mark.parametrize("sampling", [Sampling(1e-45), Sampling(5e-324), Sampling(1.0, 5e-324)])
def test_the_smallest_numbers_choose_the_likeliest(sampling: Sampling) -> None:
    from ktconv.generate.decoding import _Chooser

    choose = _Chooser(sampling)
    assert {choose(torch.tensor([3.0, -1e30, 9.0, 8.99])) for _ in range(20)} == {2}


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_outputs_that_are_not_finite_are_refused(wrong: float, temperature: float) -> None:
    from ktconv.generate.decoding import _Chooser

    with pytest.raises(CheckpointError, match="outputs are not finite"):
        _Chooser(Sampling(temperature))(torch.tensor([0.0, wrong, 1.0]))
    masked = torch.tensor([0.0, float("-inf"), 40.0])  # a token that the model never writes
    assert _Chooser(Sampling(temperature))(masked) == 2


@pytest.mark.parametrize(("given", "ends"), [(None, {7}), (3, {3}), ([3, 5], {3, 5}), ([], set())])
def test_end_tokens(given: object, ends: set[int]) -> None:
    assert end_tokens_of(given) == ends


@pytest.mark.parametrize("given", ["x", [[1, 2]], [1.0], {"a": 1}, True])
def test_end_tokens_that_are_no_ids(given: object) -> None:
    with pytest.raises(CheckpointError, match="end tokens of MODEL"):
        end_tokens_of(given)


@pytest.mark.parametrize(
    ("given", "strings"),
    [(None, ()), ("end", ("end",)), (["a", "b"], ("a", "b")), ([], ())],
)
def test_stop_strings(given: object, strings: tuple[str, ...]) -> None:
    assert stop_strings_of(given) == strings


@pytest.mark.parametrize("given", ["", [""], [7], 3, 0, True, {"a": 1}])
def test_stop_strings_that_are_none(given: object) -> None:
    with pytest.raises(CheckpointError, match=r"stop strings of MODEL .* not strings"):
        stop_strings_of(given)


def stop_strings_of(given: object) -> tuple[str, ...]:
    from ktconv.generate.decoding import stop_strings

    model = SimpleNamespace(generation_config=SimpleNamespace(stop_strings=given))
    return stop_strings(model, Path("MODEL"))


def end_tokens_of(given: object) -> frozenset[int]:
    from ktconv.generate.decoding import end_tokens

    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=given))
    return end_tokens(model, SimpleNamespace(eos_token_id=7), Path("MODEL"))


def test_prompts_that_are_no_text() -> None:
    """Bytes of the command line that are not UTF-8 come as surrogates."""
    from ktconv.generate.prompt import prompt_tokens
    from ktconv.model.load import load_tokenizer

    with pytest.raises(UsageError, match="the prompt has bytes that are not UTF-8"):
        prompt_tokens(load_tokenizer(EXAMPLE), "\udcff abc", None, EXAMPLE)


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}]
)
def test_numbers_that_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        Sampling(**wrong)  # type: ignore[arg-type]


@pytest.mark.process
def test_a_reader_that_is_gone_is_noticed() -> None:
    """Generating ends with it, instead of writing to nobody."""
    code = (
        "import sys, os\n"
        "from ktconv.cli.process import open_streams\n"
        "from ktconv.cli.output import print_piece\n"
        "open_streams(); sys.stdin.read()\n"
        "sys.stderr.write(str([print_piece('a'), print_piece('b')]))"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdin is not None and child.stdout is not None and child.stderr is not None
    child.stdout.close()
    child.stdin.close()
    assert child.stderr.read() == "[False, False]"
    child.wait()
    child.stderr.close()
