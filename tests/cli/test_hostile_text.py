"""Strings from files, names and arguments never reach the terminal raw.

Whatever a checkpoint calls its tensors, files or model, stdout and stderr hold no control
character, no mark that reorders a line, and no line break that is not ktconv's own.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import edit_json, write_model
from helpers.harmless import assert_harmless, assert_safe, run
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from ktconv.cli.bar import BarObserver
from ktconv.cli.exits import errors_shown
from ktconv.cli.output import notify, print_result, print_text
from ktconv.errors import CheckpointError
from ktconv.system.text import path_text, printable, valid_unicode

HOSTILE = "a\x1b[31mred\x07\r\nError: forged\x85\u2028\u202egnp.exe\u2066\x7f\x9b2J\U000e0041[red]z"
SHOWN = (
    r"a\u001b[31mred\u0007\u000d\u000aError: forged\u0085\u2028\u202egnp.exe\u2066\u007f\u009b2J"
    r"\U000e0041[red]z"
)
SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
INDEX = "model.safetensors.index.json"
ANY_TEXT = st.text(st.characters(), min_size=1, max_size=20)  # surrogates too
FILE_NAMES = st.binary(min_size=1, max_size=20).filter(lambda name: not set(name) & set(b"\0/"))
Edit = Callable[[dict[str, Any]], None]


# ---- the border ------------------------------------------------------------------------


@given(ANY_TEXT)
def test_printable_is_one_harmless_line(text: str) -> None:
    shown = printable(text)
    assert_harmless(shown)
    assert "\n" not in shown
    assert printable(shown) == shown
    shown.encode()


@pytest.mark.parametrize("text", ["", "model.layers.0", "größe 模型 [red] \\x1b", "1 − 2"])
def test_printable_leaves_text_alone(text: str) -> None:
    assert printable(text) == text


def test_printable_shows_what_was_there() -> None:
    assert printable(HOSTILE) == SHOWN
    assert printable(os.fsdecode(b"bad\xff")) == r"bad\xff"
    assert printable("a\tb\nc", keep="\t\n") == "a\tb\nc"


@pytest.mark.parametrize(
    ("name", "text"),
    [(b"plain", "plain"), ("größe".encode(), "größe"), (b"bad\xff", r"bad\xff")],
)
def test_path_text_is_valid_unicode(name: bytes, text: str) -> None:
    assert path_text(Path(os.fsdecode(name))) == text


@given(ANY_TEXT)
def test_whatever_is_printed_is_harmless(text: str) -> None:
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        print_text(text)
        print_result(False, {}, lambda: [text, text])
        notify(text)
        with pytest.raises(BaseException, match="2"), errors_shown():  # click's Exit(2)
            raise CheckpointError(text, text)
    assert_harmless(out.getvalue())
    assert_harmless(err.getvalue())
    assert out.getvalue().count("\n") == text.count("\n") + 3
    assert err.getvalue().count("\n") == 3


@given(ANY_TEXT)
def test_json_is_valid_and_says_the_same(text: str) -> None:
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        print_result(True, {text: [text], "path": text}, list)
    assert out.getvalue().isascii()
    found = json.loads(out.getvalue())
    assert found["path"] == valid_unicode(text)
    assert found[valid_unicode(text)] == [valid_unicode(text)]
    json.dumps(found, ensure_ascii=False).encode()
    if not any(unicodedata.category(character) == "Cs" for character in text):
        assert found["path"] == text


@pytest.mark.parametrize("as_json", [True, False])
def test_an_ascii_stdout_gets_escapes(as_json: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    print_result(as_json, {"path": "größe"}, lambda: ["größe"])
    text = raw.getvalue().decode("ascii")
    assert json.loads(text)["path"] == "größe" if as_json else text == "gr\\xf6\\xdfe\n"


def test_a_progress_bar_shows_names_as_they_are() -> None:
    """Neither rich's markup nor control characters of a name are obeyed."""
    observer = BarObserver({HOSTILE: 10})
    out = io.StringIO()
    observer._bar.live.console = Console(file=out, width=400)
    observer.begin([HOSTILE])
    observer.unit_started(HOSTILE)
    observer._bar.live.console.print(observer._bar.get_renderable())
    assert_harmless(out.getvalue())
    assert SHOWN in out.getvalue()


# ---- whole commands --------------------------------------------------------------------


def edit_header(path: Path, change: Edit) -> None:
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    change(header)
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data[end:])


def rename_tensor(model: Path, old: str, new: str) -> None:
    weight_map = json.loads((model / INDEX).read_text())["weight_map"]
    edit_header(model / weight_map[old], lambda header: header.update({new: header.pop(old)}))
    edit_json(
        model / INDEX, lambda index: index["weight_map"].update({new: index["weight_map"].pop(old)})
    )


def named_model_type(model: Path) -> None:
    edit_json(model / "config.json", lambda config: config.update(model_type=HOSTILE))


def named_expert(model: Path) -> None:
    prefix = "model.layers.0.mlp.experts."
    rename_tensor(model, f"{prefix}0.gate_proj.weight", f"{prefix}99{HOSTILE}.gate_proj.weight")


def named_stack(model: Path) -> None:
    rename_tensor(model, "model.embed_tokens.weight", f"{HOSTILE}.experts.1.weight")


def named_shard(model: Path) -> None:
    edit_json(
        model / INDEX,
        lambda index: index["weight_map"].update(
            {"model.embed_tokens.weight": HOSTILE + ".safetensors"}
        ),
    )


def named_tensor_elsewhere(model: Path) -> None:
    rename_tensor(model, "model.embed_tokens.weight", HOSTILE)
    there = json.loads((model / INDEX).read_text())["weight_map"][HOSTILE]
    other = next(shard for shard in SHARDS if shard != there)
    edit_json(model / INDEX, lambda index: index["weight_map"].update({HOSTILE: other}))


def named_base(model: Path) -> None:
    for path in (model / INDEX, *model.glob("*.safetensors")):
        path.unlink()
    text = json.dumps({"peft_type": "LORA", "base_model_name_or_path": HOSTILE})
    (model / "adapter_config.json").write_text(text)


def named_unread_shard(model: Path) -> None:
    shutil.copy(model / SHARDS[0], model / f"{HOSTILE}.safetensors")


def named_side_file(model: Path) -> None:
    (model / f"vocab{HOSTILE}.txt").write_text("")


def named_size(model: Path) -> None:
    edit_json(model / "config.json", lambda config: config.update(hidden_size=HOSTILE))


@pytest.mark.parametrize(
    "spoil",
    [
        named_model_type, named_expert, named_stack, named_shard, named_tensor_elsewhere,
        named_base, named_unread_shard, named_side_file, named_size,
    ],
)  # fmt: skip
def test_no_string_of_a_checkpoint_reaches_the_terminal_raw(
    spoil: Callable[[Path], None], tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model", layers=1)
    spoil(model)
    shown = ""
    for words in (("inspect",), ("quantize-cpu", "--dry-run"), ("quantize-cpu",)):
        target = () if words == ("inspect",) else (tmp_path / "out",)
        result = run(words[0], model, *target, *words[1:])
        assert_safe(result)
        shown += result.output
    assert "1b[31m" in shown
    if (tmp_path / "out").exists():
        commands: list[tuple[object, ...]] = [
            ("verify", tmp_path / "out", "--source", model),
            ("inspect", tmp_path / "out"),
        ]
        for command in commands:
            more = ["--level", "weights"] if command[0] == "verify" else []
            assert_safe(run(*command, *more))


@settings(max_examples=15, deadline=None)
@given(name=FILE_NAMES)
def test_no_path_reaches_the_terminal_raw(name: bytes) -> None:
    path = os.fsdecode(b"./" + name)
    for words in (
        ("inspect", path),
        ("quantize-cpu", path, path + "-out"),
        ("quantize-gpu", path, path + "-out"),
        ("merge", path, path + "-out"),
        ("reshard", path, path + "-out", "--numa", "2"),
        ("verify", path),
        ("verify", path, path),
        ("verify", "docs", "--report", path),
        ("stats", path),
        ("bench", "--model", path),
    ):
        assert_safe(run(*words))


@pytest.mark.parametrize(
    "words",
    [
        (HOSTILE,),
        (f"--{HOSTILE}",),
        ("inspect", "docs", HOSTILE),
        ("inspect", "docs", f"--{HOSTILE}"),
        ("quantize-cpu", "a", "b", "--method", HOSTILE),
        ("bench", "--format", HOSTILE),
    ],
)
def test_usage_errors_escape_what_was_written(words: tuple[str, ...]) -> None:
    result = run(*words)
    assert_safe(result, code=2)
    assert "1b[31m" in result.stderr
    assert "Traceback" not in result.stderr
