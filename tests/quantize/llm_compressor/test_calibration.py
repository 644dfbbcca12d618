"""Calibration samples from files and datasets; everything that can be wrong with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ktconv.errors import CheckpointError, UsageError
from ktconv.quantize.llm_compressor.gptq.calibration import load_tokenizer, read_samples
from ktconv.targets.encoded.target import Calibration

pytestmark = pytest.mark.torch


class Letters:
    """A tokenizer: a token per letter, a special one in front."""

    chat_template: str | None = None

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, Any]:
        return {"input_ids": [1] * add_special_tokens + [ord(letter) for letter in text]}

    def apply_chat_template(self, messages: Sequence[Any], tokenize: bool) -> str:
        assert tokenize is False
        return "".join(f"<{message['role']}>{message['content']}" for message in messages)


class Chatting(Letters):
    chat_template = "of course"


def text_of(ids: Sequence[int]) -> str:
    return "".join(chr(number) for number in ids)


def lines(path: Path, *records: object) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_a_text_is_cut_into_windows_without_gap_or_overlap(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("abcdefghijklmnopqrstuvwxyz")
    found = read_samples(Calibration(str(path), max_seq_len=5), Letters())
    assert sorted(map(text_of, found.ids)) == ["abcde", "fghij", "klmno", "pqrst", "uvwxy"]
    assert found.tokens == found.facts["tokens"] == 25
    assert (found.facts["samples"], found.facts["samples_wanted"]) == (5, 512)


def test_a_text_shorter_than_a_window_is_one_sample(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("abc")
    assert list(map(text_of, read_samples(Calibration(str(path)), Letters()).ids)) == ["abc"]


def test_the_seed_decides_which_samples_and_their_order(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("".join(chr(97 + i % 26) for i in range(1000)))

    def drawn(seed: int) -> list[str]:
        settings = Calibration(str(path), samples=20, max_seq_len=7, seed=seed)
        return list(map(text_of, read_samples(settings, Letters()).ids))

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)
    assert len(drawn(3)) == 20


def test_records_with_text_have_special_tokens_and_are_cut_off(tmp_path: Path) -> None:
    dataset = lines(tmp_path / "texts.jsonl", {"text": "abcdef"}, {"text": "xy", "id": 7})
    found = read_samples(Calibration(dataset, max_seq_len=4), Letters())
    assert sorted(map(text_of, found.ids)) == ["\1abc", "\1xy"]


def test_records_with_messages_go_through_the_chat_template(tmp_path: Path) -> None:
    talk = [{"role": "u", "content": "Hi"}, {"role": "a", "content": "Ho"}]
    dataset = lines(tmp_path / "talks.jsonl", {"messages": talk, "text": "not this"})
    found = read_samples(Calibration(dataset), Chatting())
    assert list(map(text_of, found.ids)) == ["<u>Hi<a>Ho"]


def test_records_without_a_token_are_replaced_by_others(tmp_path: Path) -> None:
    empty = [{"text": ""}] * 20
    dataset = lines(tmp_path / "texts.jsonl", *empty, {"text": "abc"}, *empty, {"text": "def"})
    found = read_samples(Calibration(dataset, samples=2), Letters())
    assert sorted(map(text_of, found.ids)) == ["\1abc", "\1def"]


def test_another_file_is_told_from_this_one(tmp_path: Path) -> None:
    dataset = lines(tmp_path / "texts.jsonl", {"text": "abc"})
    before = read_samples(Calibration(dataset), Letters()).facts
    lines(tmp_path / "texts.jsonl", {"text": "abd"})
    assert read_samples(Calibration(dataset), Letters()).facts["sha256"] != before["sha256"]


def test_names_go_to_datasets(tmp_path: Path) -> None:
    """A folder is a dataset too, and needs no network."""
    pytest.importorskip("datasets")
    folder = tmp_path / "texts"
    folder.mkdir()
    lines(folder / "train.jsonl", {"text": "abc"}, {"text": "def"})
    found = read_samples(Calibration(str(folder)), Letters())
    assert sorted(map(text_of, found.ids)) == ["\1abc", "\1def"]
    assert found.facts["split"] == "train"
    with pytest.raises(UsageError, match=r"split nosuch.* cannot be loaded"):
        read_samples(Calibration(str(folder), split="nosuch"), Letters())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "is empty"),
        ("a.jsonl", b"\n \n", "is empty"),
        ("a.jsonl", b'{"text": "abc"\n', "line 1 is not JSON"),
        ("a.jsonl", b'{"prompt": "abc"}\n', "line 1 has neither text nor messages"),
        ("a.jsonl", b'"abc"\n', "line 1 has neither text nor messages"),
        ("a.jsonl", b'{"text": 5}\n', "line 1 has neither text nor messages"),
        ("a.jsonl", b'{"text": ""}\n', "contains no usable text"),
        ("a.jsonl", b'{"text": "\xff"}\n', "line 1 is not UTF-8"),
        ("a.jsonl", b'{"messages": [{"role": "u", "content": "x"}]}\n', "no chat template"),
        ("a.txt", b"", "contains no usable text"),
        ("a.txt", b"x", "contains no usable text"),
        ("a.txt", b" \n\n ", "contains no usable text"),
        ("a.jsonl", b'{"text": " \\n "}\n', "contains no usable text"),
        ("a.txt", b"\xff\xfe\x00", "is not UTF-8"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message) as raised:
        read_samples(Calibration(str(path)), Letters())
    assert str(path) in str(raised.value)


def test_messages_that_the_template_cannot_render_are_named(tmp_path: Path) -> None:
    dataset = lines(tmp_path / "talks.jsonl", {"messages": ["Hi"]})
    with pytest.raises(UsageError, match=r"cannot render .*line 1"):
        read_samples(Calibration(dataset), Chatting())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Calibration("no/such.txt"), "does not exist"),
        (Calibration("no/such.jsonl"), "does not exist"),
        (Calibration("folder.txt"), "is a directory"),
        (Calibration(__file__), "is neither .jsonl nor .txt"),
        (Calibration("a.txt", samples=0), "--samples 0"),
        (Calibration("a.txt", max_seq_len=1), "--max-seq-len 1"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    settings: Calibration, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.txt").mkdir()
    with pytest.raises(UsageError, match=message):
        read_samples(settings, Letters())


def test_a_model_without_tokenizer_is_named(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(CheckpointError, match="contains no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_tokenizer(tmp_path)
