"""Names that are not UTF-8, and locales that know only ASCII: everything still works.

What is written holds valid UTF-8, the same in every locale, and the same command continues.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers.cli import write_model
from helpers.convert import all_files
from helpers.disk_calls import Commands

from ktconv.cli.app import app

pytestmark = [pytest.mark.slow, pytest.mark.process]

PLAIN_C = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
ASCII_OUT = {"PYTHONIOENCODING": "ascii"}
NAMES = {"bytes": b"bad\xff", "letters": "größe".encode()}
PLACES = {"UTF-8": {"PYTHONUTF8": "1"}, "C": PLAIN_C, "ASCII output": ASCII_OUT}
Ways = tuple[str, Commands]
Servers = Callable[[str], Commands]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """One interpreter per environment, which the commands are forked from."""
    started: dict[str, Commands] = {}

    def server(where: str) -> Commands:
        if where not in started:
            directory = tmp_path_factory.mktemp("streams")
            slow = ("torch", "transformers.conversion_mapping", "transformers.models.auto")
            modules = slow if where == "C" and find_spec("transformers") else ()
            started[where] = Commands(directory, "quick_limits", *modules, **PLACES[where])
        return started[where]

    yield server
    for commands in started.values():
        commands.close()


@pytest.fixture(params=["bytes, UTF-8", "bytes, C", "letters, ASCII output"])
def ways(request: pytest.FixtureRequest, servers: Servers) -> Ways:
    """A name and what runs commands in an environment."""
    name, where = request.param.split(", ")
    return os.fsdecode(NAMES[name]), servers(where)


def assert_utf8(directory: Path) -> None:
    """Every text that a conversion wrote, and no half of a surrogate pair in its JSON."""
    texts = [path for path in directory.rglob("*") if path.suffix in (".json", ".md", ".yaml")]
    assert texts
    for path in texts:
        text = path.read_bytes().decode()
        if path.suffix == ".json":
            json.dumps(json.loads(text), ensure_ascii=False).encode()


def done(where: Commands, *words: object, code: int = 0) -> str:
    """Runs commands in processes forked from one that started in a given environment."""
    result = where.run(words)
    assert "Traceback" not in result.stderr, result.stderr
    assert result.returncode == code, result.stderr
    return result.stdout


def document(where: Commands, *words: object) -> None:
    text = done(where, *words, "--json")
    assert text.isascii()
    json.dumps(json.loads(text), ensure_ascii=False).encode()


def test_commands_finish(ways: Ways, tmp_path: Path) -> None:
    name, where = ways
    model = write_model(tmp_path / name, layers=1, inner=256)
    out, folders = tmp_path / f"out-{name}", tmp_path / f"folders-{name}"
    one = ("--numa", "1")
    document(where, "inspect", model)
    done(where, "inspect", model)
    done(where, "quantize-cpu", model, out, *one, "--dry-run")
    done(where, "quantize-cpu", model, out, *one)
    assert_utf8(out)
    document(where, "inspect", out)
    assert "nothing to do" in done(where, "quantize-cpu", model, out, *one)
    done(where, "quantize-cpu", model, folders, *one, "--layout", "layers")
    done(where, "merge", folders, tmp_path / f"merged-{name}", "--source", model)
    assert_utf8(tmp_path / f"merged-{name}")
    done(where, "reshard", out, tmp_path / f"two-{name}", "--numa", "2")
    report = tmp_path / f"report-{name}.html"
    words = ("verify", out, "--source", model, "--level", "weights")
    done(where, *words, "--report", report)
    report.read_bytes().decode()
    document(where, *words)
    document(where, "verify", out, tmp_path / f"merged-{name}")


def test_bench_of_a_model(ways: Ways, tmp_path: Path) -> None:
    name, where = ways
    out = tmp_path / f"out-{name}"
    done(where, "quantize-cpu", write_model(tmp_path / "model", layers=1), out, "--numa", "1")
    once = ("--iters", "1", "--seconds", "0", "--tokens", "1", "--threads", "1")
    done(where, "bench", "--model", out, "--top-k", "2", *once)


@pytest.mark.parametrize("ways", ["bytes, C", "letters, ASCII output"], indirect=True)
def test_commands_that_use_transformers_end_in_a_sentence(
    ways: Ways, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    pytest.importorskip("transformers")
    name, where = ways
    model = write_model(tmp_path / name, layers=1, inner=256)
    out = tmp_path / f"out-{name}"
    done(where, "quantize-gpu", model, out)
    assert_utf8(out)
    assert "nothing to do" in done(where, "quantize-gpu", model, out)
    done(where, "verify", out, "--source", model, "--level", "weights")
    if "ASCII output" not in request.node.callspec.id:
        done(where, "stats", model, code=2)  # no model of transformers: a sentence, no traceback
    else:  # here, where transformers may be imported already
        told = CliRunner(charset="ascii").invoke(app, ["stats", str(model)])
        assert told.exit_code == 2 and "Traceback" not in told.output, told.output


@pytest.mark.parametrize("begins", ["C", "UTF-8"])
def test_another_locale_continues_the_run(begins: str, servers: Servers, tmp_path: Path) -> None:
    """Names of shards and side files are the same in the records of both."""
    first, then = servers(begins), servers("UTF-8" if begins == "C" else "C")
    model = write_model(tmp_path / "größe", layers=2, shards=1)
    (model / "model.safetensors").rename(model / "gewichte-größe.safetensors")
    (model / "vocab-größe.txt").write_text("a")
    out, whole = tmp_path / "out", tmp_path / "whole"
    words = (model, out, "--numa", "1")
    done(first, "quantize-cpu", *words, "--layers", "0")
    done(then, "quantize-cpu", *words)
    assert "nothing to do" in done(first, "quantize-cpu", *words)
    assert all(os.fsencode(path).decode() for path in out.iterdir())
    done(servers("UTF-8"), "quantize-cpu", model, whole, "--numa", "1")
    assert all_files(out) == all_files(whole)
    done(first, "quantize-cpu", *words, "--overwrite")
    assert all_files(out) == all_files(whole)


def test_an_index_in_an_ascii_locale(servers: Servers, tmp_path: Path) -> None:
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
    done(servers("C"), "quantize-cpu", model, tmp_path / "out", "--numa", "1")
    done(servers("UTF-8"), "verify", tmp_path / "out", "--source", model, "--level", "weights")
