"""Names that are not UTF-8, and locales that know only ASCII: everything still works.

What is written holds valid UTF-8, the same in every locale, and the same command continues.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from helpers.cli import write_model
from helpers.convert import all_files, ktconv

PLAIN_C = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
ASCII_OUT = {"PYTHONIOENCODING": "ascii"}
NAMES = {"bytes": b"bad\xff", "letters": "größe".encode()}
Ways = tuple[str, dict[str, str]]


@pytest.fixture(params=["bytes, UTF-8", "bytes, C", "letters, C", "letters, ASCII output"])
def ways(request: pytest.FixtureRequest) -> tuple[str, dict[str, str]]:
    """A name and the environment of the command."""
    name, where = request.param.split(", ")
    changes = {"UTF-8": {"PYTHONUTF8": "1"}, "C": PLAIN_C, "ASCII output": ASCII_OUT}[where]
    return os.fsdecode(NAMES[name]), changes


def assert_utf8(directory: Path) -> None:
    """Every text that a conversion wrote, and no half of a surrogate pair in its JSON."""
    texts = [path for path in directory.rglob("*") if path.suffix in (".json", ".md", ".yaml")]
    assert texts
    for path in texts:
        text = path.read_bytes().decode()
        if path.suffix == ".json":
            json.dumps(json.loads(text), ensure_ascii=False).encode()


def done(changes: dict[str, str], *words: object, code: int = 0) -> str:
    result = ktconv(*words, **changes)
    assert "Traceback" not in result.stderr, result.stderr
    assert result.returncode == code, result.stderr
    return result.stdout


def document(changes: dict[str, str], *words: object) -> None:
    text = done(changes, *words, "--json")
    assert text.isascii()
    json.dumps(json.loads(text), ensure_ascii=False).encode()


def test_commands_finish(ways: Ways, tmp_path: Path) -> None:
    name, changes = ways
    model = write_model(tmp_path / name, layers=1, inner=256)
    out, folders = tmp_path / f"out-{name}", tmp_path / f"folders-{name}"
    one = ("--numa", "1")
    document(changes, "inspect", model)
    done(changes, "inspect", model)
    done(changes, "quantize-cpu", model, out, *one, "--dry-run")
    done(changes, "quantize-cpu", model, out, *one)
    assert_utf8(out)
    document(changes, "inspect", out)
    assert "nothing to do" in done(changes, "quantize-cpu", model, out, *one)
    done(changes, "quantize-cpu", model, folders, *one, "--layout", "layers")
    done(changes, "merge", folders, tmp_path / f"merged-{name}", "--source", model)
    assert_utf8(tmp_path / f"merged-{name}")
    done(changes, "reshard", out, tmp_path / f"two-{name}", "--numa", "2")
    report = tmp_path / f"report-{name}.html"
    words = ("verify", out, "--source", model, "--level", "weights")
    done(changes, *words, "--report", report)
    report.read_bytes().decode()
    document(changes, *words)
    document(changes, "verify", out, tmp_path / f"merged-{name}")


def test_bench_of_a_model(ways: Ways, tmp_path: Path) -> None:
    name, changes = ways
    out = tmp_path / f"out-{name}"
    done(changes, "quantize-cpu", write_model(tmp_path / "model", layers=1), out, "--numa", "1")
    done(changes, "bench", "--model", out, "--iters", "1", "--top-k", "2", "--seconds", "0")


def test_commands_that_use_transformers_end_in_a_sentence(ways: Ways, tmp_path: Path) -> None:
    pytest.importorskip("llmcompressor")
    name, changes = ways
    model = write_model(tmp_path / name, layers=1, inner=256)
    out = tmp_path / f"out-{name}"
    done(changes, "quantize-gpu", model, out)
    assert_utf8(out)
    assert "nothing to do" in done(changes, "quantize-gpu", model, out)
    done(changes, "verify", out, "--source", model, "--level", "weights")
    done(changes, "stats", model, code=2)  # the model has no attention: a sentence, no traceback


@pytest.mark.parametrize(("first", "then"), [(PLAIN_C, {}), ({}, PLAIN_C)], ids=["C", "UTF-8"])
def test_another_locale_continues_the_run(
    first: dict[str, str], then: dict[str, str], tmp_path: Path
) -> None:
    """Names of shards and side files are the same in the records of both."""
    model = write_model(tmp_path / "größe", layers=2, shards=1)
    (model / "model.safetensors").rename(model / "gewichte-größe.safetensors")
    (model / "vocab-größe.txt").write_text("a")
    out, whole = tmp_path / "out", tmp_path / "whole"
    words = (model, out, "--numa", "1")
    done(first, "quantize-cpu", *words, "--layers", "0")
    done(then, "quantize-cpu", *words)
    assert "nothing to do" in done(first, "quantize-cpu", *words)
    assert all(os.fsencode(path).decode() for path in out.iterdir())
    done({}, "quantize-cpu", model, whole, "--numa", "1")
    assert all_files(out) == all_files(whole)
    done(first, "quantize-cpu", *words, "--overwrite")
    assert all_files(out) == all_files(whole)


def test_an_index_in_an_ascii_locale(tmp_path: Path) -> None:
    """Names of shards come from a file in UTF-8, and are those of the system."""
    model = write_model(tmp_path / "model", layers=1, shards=2)
    index = model / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    for number, name in enumerate(sorted(set(content["weight_map"].values()))):
        (model / name).rename(model / f"größe-{number}.safetensors")
        renamed = {key: f"größe-{number}.safetensors" for key in content["weight_map"]
                   if content["weight_map"][key] == name}  # fmt: skip
        content["weight_map"].update(renamed)
    index.write_text(json.dumps(content))
    done(PLAIN_C, "quantize-cpu", model, tmp_path / "out", "--numa", "1")
    done({}, "verify", tmp_path / "out", "--source", model, "--level", "weights")
