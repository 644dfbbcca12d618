"""Options that name files to write: none of them can harm a model, an output or another file."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers.cli import contents, edit_json, ktconv, ktconv_done, refused, write_model
from helpers.paths import ROOT

from ktconv.cli.app import app
from ktconv.targets.expert_sets import expert_set, write_expert_set

pytestmark = pytest.mark.slow

COMMANDS: dict[str, Any] = dict(app.commands)
# Files and directories that commands read.
READ = {
    "bench": {"--compare"},
    "compare": {"outputs", "--config", "--map", "--text"},
    "generate": {"output", "--config", "--prompt-file"},
    "inspect": {"--config", "--map"},
    "merge": {"layers_dir", "--config", "--map"},
    "plan": {"--load", "--config", "--map"},
    "prune": {"--scores"},
    "push": {"output"},
    "quantize-cpu": {
        "--recipe", "--config", "--map", "--calibrate", "--experts", "--exclude-experts",
        "--from-list", "--with",
    },
    "quantize-gpu": {"--config", "--map", "--experts", "--exclude-experts"},
    "reshard": {"packed", "--config", "--map", "--importance"},
    "stats": {"--config", "--text"},
    "verify": {"output", "other", "--config", "--map", "--importance", "--calibrate", "--text",
               "--with"},
}  # fmt: skip
# Directories that commands fill, by rules of their own: an OUTPUT, a cache, scratch space.
FILLED = {
    "compare": {"--cache-dir"},
    "generate": {"--cache-dir"},
    "merge": {"output"},
    "prune": {"output"},
    "quantize-cpu": {"output", "--cache-dir", "--ray-scratch"},
    "quantize-gpu": {"output", "--cache-dir", "--ray-scratch"},
    "reshard": {"output"},
    "stats": {"--cache-dir"},
    "verify": {"--cache-dir"},
}


class Written(NamedTuple):
    """How an option that writes a file is used; MODEL, OUTPUT and COUNTS are replaced."""

    command: str
    option: str
    ending: str
    words: tuple[str, ...]
    sources: tuple[str, ...] = ("MODEL",)  # directories that the command is given


FILES = (
    Written("plan", "--write", ".json", ("plan", "MODEL", "--hot", "2")),
    Written("plan", "--plot", ".png", ("plan", "MODEL")),
    Written("stats", "--write", ".json", ("stats", "COUNTS", "--hot", "1"), ()),
    Written("stats", "--placement", ".pt", ("stats", "COUNTS"), ()),
    Written("stats", "--trace", ".safetensors", ("stats", "MODEL")),
    Written("stats", "--importance", ".safetensors", ("stats", "MODEL")),
    Written("stats", "--scores", ".json", ("stats", "MODEL")),
    Written("prune", "--write", ".json", ("prune", "MODEL", "--scores", "COUNTS", "--keep", "2")),
    Written(
        "quantize-cpu", "--write-recipe", ".toml",
        ("quantize-cpu", "MODEL", "OTHER", "--target-bits", "5", "--dry-run"), ("MODEL",),
    ),
    Written("verify", "--report", ".html", ("verify", "OUTPUT", "--source", "MODEL"),
            ("MODEL", "OUTPUT")),
    Written("compare", "--report", ".html", ("compare", "OUTPUT", "--source", "MODEL"),
            ("MODEL", "OUTPUT")),
    Written("compare", "--plot", ".svg", ("compare", "OUTPUT", "--source", "MODEL"),
            ("MODEL", "OUTPUT")),
    Written("bench", "--plot", ".pdf", ("bench", "--model", "OUTPUT"), ("OUTPUT",)),
)  # fmt: skip
DIRECTORIES = {"stats": {"--hessian", "--work-dir"}, "verify": {"--work-dir"}}
IDS = [f"{one.command} {one.option}" for one in FILES]


def paths_of(command: Any) -> set[str]:
    """Options and arguments whose values are paths."""
    hints = inspect.get_annotations(inspect.unwrap(command.callback), eval_str=True)
    return {
        next((name for name in param.opts if name.startswith("--")), param.name)
        for param in command.params
        if "Path" in str(hints.get(param.name))
    }


def test_every_path_is_read_or_written_by_rules() -> None:
    """A new option that names a path must be put into one of the tables above; one that writes a
    file is then tried below."""
    for name, command in COMMANDS.items():
        written = {one.option for one in FILES if one.command == name}
        written |= DIRECTORIES.get(name, set())
        known = READ.get(name, set()) | FILLED.get(name, set()) | written
        assert not paths_of(command) - known, name
        assert not written - paths_of(command), name


def test_files_that_options_name_are_written_in_one_way() -> None:
    """Modules that write files by themselves: a new one has to use `WrittenFile`, or is part of an
    output, a cache or a state."""
    ways = re.compile(r"write_durably\(|write_described\(|ShardStaging\(|\.write_(bytes|text)\(|"
                      r"savefig\(|\.open\(.?[\"'][wxa]|open\([^)]*,\s*[\"'][wxa]")  # fmt: skip
    found = {
        path.relative_to(ROOT / "src/ktconv").as_posix()
        for path in (ROOT / "src/ktconv").rglob("*.py")
        if ways.search(path.read_text())
    }
    assert found == {
        "cli/completion.py",  # below the home directory, where shells look
        "conversion/run.py",  # README.md of an output
        "distributed/conversion.py",  # a file that nodes look for
        "distributed/units.py",  # likewise
        "model/streamed/parts.py",  # config.json, in a temporary directory
        "model/streamed/states.py",  # of a pass
        "source/remote/mirror.py",  # a cache
        "stats/hessian.py",  # a directory, which `check_written_directory` checks
        "stats/importance.py",  # of `importance_file`
        "system/files.py",
        "train/adapters.py",  # a directory that a program names
        "verify/unpruned.py",  # of a pass
        "verify/card.py",  # README.md of an output
        "writer/journal.py", "writer/manifest.py", "writer/metadata.py",
        "writer/option_files.py", "writer/pictures.py",
    }  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, an output, and counts."""
    root = tmp_path_factory.mktemp("made")
    write_model(root / "model", layers=1)
    edit_json(root / "model/config.json", lambda config: config.update(num_experts_per_tok=2))
    ktconv_done("quantize-cpu", root / "model", root / "output", "--numa=1", "--threads=2")
    (root / "hot.json").write_text("kept by hand")
    counts = {
        "schema": 1, "kind": "router statistics", "num_hidden_layers": 1, "model": "m",
        "tokens": 4, "text": None, "model_type": "qwen3_moe",
        "layers": [{"layer": 0, "tokens": 4, "experts": 4, "counts": [3, 2, 2, 1]}],
    }  # fmt: skip
    (root / "counts.json").write_text(json.dumps(counts))
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "r", symlinks=True)
    return tmp_path / "r"


def ask(one: Written, root: Path, path: Path) -> Any:
    named = {
        "MODEL": root / "model", "OUTPUT": root / "output", "OTHER": root / "new",
        "COUNTS": root / "counts.json",
    }  # fmt: skip
    return ktconv(*(named.get(word, word) for word in one.words), one.option, path)


def in_a_model(root: Path, ending: str) -> Path:
    return root / "model" / f"new{ending}"


def in_an_output(root: Path, ending: str) -> Path:
    return root / "output" / f"new{ending}"


def in_a_folder_of_a_model(root: Path, ending: str) -> Path:
    (root / "model/folder").mkdir()
    return root / "model/folder" / f"new{ending}"


def behind_a_link_to_a_folder(root: Path, ending: str) -> Path:
    (root / "link").symlink_to("model")
    return root / "link" / f"new{ending}"


def a_link_to_config(root: Path, ending: str) -> Path:
    (root / f"link{ending}").symlink_to(root / "model/config.json")
    return root / f"link{ending}"


def a_link_into_the_model(root: Path, ending: str) -> Path:
    (root / f"link{ending}").symlink_to(root / "model" / f"new{ending}")
    return root / f"link{ending}"


def a_link_out_of_the_model(root: Path, ending: str) -> Path:
    (root / "model" / f"link{ending}").symlink_to(root / f"new{ending}")
    return root / "model" / f"link{ending}"


def another_name_of_a_shard(root: Path, ending: str) -> Path:
    shard = next((root / "model").glob("*.safetensors"))
    os.link(shard, root / f"same{ending}")
    return root / f"same{ending}"


def a_file_of_the_user(root: Path, ending: str) -> Path:
    (root / f"mine{ending}").write_text('{"experts": "my own"}')
    return root / f"mine{ending}"


def an_empty_file(root: Path, ending: str) -> Path:
    (root / f"empty{ending}").touch()
    return root / f"empty{ending}"


PLACES = (
    in_a_model, in_an_output, in_a_folder_of_a_model, behind_a_link_to_a_folder, a_link_to_config,
    a_link_into_the_model, a_link_out_of_the_model, another_name_of_a_shard, a_file_of_the_user,
    an_empty_file,
)  # fmt: skip


@pytest.mark.parametrize("place", PLACES, ids=lambda one: one.__name__)
@pytest.mark.parametrize("one", FILES, ids=IDS)
def test_places_that_nothing_is_written_to(
    one: Written, place: Callable[[Path, str], Path], root: Path
) -> None:
    if one.option == "--plot":
        pytest.importorskip("matplotlib")
    path = place(root, one.ending)
    before = contents(root)
    said = refused(ask(one, root, path), 2, one.option)
    assert "nothing may be added" in said or "exists, and is not" in said
    assert contents(root) == before


@pytest.mark.parametrize("name", ["config.json", "ktconv.json"])
def test_what_was_destroyed(name: str, root: Path) -> None:
    """Options without an ending of their own could name any file."""
    for words in (
        ("plan", root / "model", "--hot", "2"),
        ("stats", root / "counts.json", "--hot", "1"),
    ):
        before = contents(root)
        for directory in ("model", "output"):
            refused(ktconv(*words, "--hot", 1, "--write", root / directory / name), 2, "--write")
        assert contents(root) == before
    recipe = ("--target-bits", "5", "--dry-run", "--write-recipe", root / "model" / name)
    refused(ktconv("quantize-cpu", root / "model", root / "new", *recipe), 2, "--write-recipe")
    assert contents(root) == before


def test_a_directory_that_is_named_needs_no_marks(root: Path) -> None:
    """Packed weights of another tool are shards alone."""
    for path in (root / "output").iterdir():
        if path.suffix != ".safetensors":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    refused(
        ktconv("verify", root / "output", "--report", root / "output/new.html"), 2,
        "to which nothing may be added",
    )  # fmt: skip


@pytest.mark.parametrize(("option", "command"), [
    (option, command) for command, options in DIRECTORIES.items() for option in sorted(options)
])  # fmt: skip
def test_directories_in_a_model(option: str, command: str, root: Path) -> None:
    pytest.importorskip("transformers")
    words = {
        "stats": ("stats", root / "model", "--dry-run"),
        "verify": ("verify", root / "output", "--source", root / "model", "--level", "model"),
    }[command]
    before = contents(root)
    for place in ("model/new", "output", "output/new/below"):
        refused(ktconv(*words, option, root / place), 2, "nothing may be added")
    assert contents(root) == before


def test_two_options_with_one_file(root: Path) -> None:
    pytest.importorskip("transformers")
    path = root / "x.safetensors"
    (root / "folder").symlink_to(".")
    same = root / "folder/x.safetensors"
    words = ("stats", root / "model", "--trace", path, "--importance", same)
    refused(ktconv(*words), 2, "--trace and --importance are both")
    assert not path.exists()


def test_a_file_that_is_read(root: Path) -> None:
    write_expert_set(expert_set({0: [1]}), root / "set.json")
    words = ("verify", root / "output", "--source", root / "model")
    (root / "words.html").write_text('<meta name="generator" content="ktconv"> a text')
    said = ktconv(*words, "--text", root / "words.html", "--report", root / "words.html")
    refused(said, 2, "is a file that this command reads")


# ---- what is written ---------------------------------------------------------------------


def test_its_own_earlier_file_is_replaced(root: Path) -> None:
    write = root / "set.json"
    for hot in (1, 2):
        ktconv_done("plan", root / "model", "--hot", hot, "--write", write)
        assert sum(map(len, json.loads(write.read_text())["experts"].values())) == hot
    write.write_text(json.dumps(json.loads(write.read_text())))  # by hand: the same set
    refused(ktconv("plan", root / "model", "--hot", 1, "--write", write), 2, "exists, and is not")


def test_a_link_to_its_own_file(root: Path) -> None:
    """The file is replaced where it is, and the link stays."""
    (root / "sets").mkdir()
    (root / "link.json").symlink_to(root / "sets/set.json")
    for hot in (1, 2):
        ktconv_done("plan", root / "model", "--hot", hot, "--write", root / "link.json")
    assert (root / "link.json").is_symlink()
    assert len(json.loads((root / "sets/set.json").read_text())["experts"]["0"]) == 2


def test_a_staged_name_that_is_a_link_or_another_name(root: Path) -> None:
    """What is at the temporary name is not written through."""
    for make in (os.symlink, os.link):
        make(root / "model/config.json", root / "set.json.ktconv.part")
        before = contents(root / "model")
        ktconv_done("plan", root / "model", "--hot", 1, "--write", root / "set.json")
        assert contents(root / "model") == before and not (root / "set.json.ktconv.part").exists()


def test_reports_and_pictures_are_known_again(root: Path) -> None:
    words = ("verify", root / "output", "--report", root / "r.html")
    for _ in range(2):
        ktconv_done(*words)
    pytest.importorskip("matplotlib")
    for ending in (".png", ".svg", ".pdf"):
        for _ in range(2):
            ktconv_done("plan", root / "model", "--ep", 2, "--plot", root / f"p{ending}")


def test_edited_recipes_stay(root: Path) -> None:
    recipe = root / "r.toml"
    words = (
        "quantize-cpu", root / "model", root / "new", "--target-bits", 6, "--dry-run",
        "--write-recipe", recipe,
    )  # fmt: skip
    for _ in range(2):
        ktconv_done(*words)
    recipe.write_text(recipe.read_text().replace("method", "method ", 1))
    before = recipe.read_bytes()
    refused(ktconv(*words), 2, "is not a recipe as ktconv wrote it")
    assert recipe.read_bytes() == before


def test_dry_runs_write_nothing_else(root: Path) -> None:
    before = contents(root)
    model, new = root / "model", root / "new"
    for words in (
        ("quantize-cpu", model, new), ("quantize-cpu", model, new, "--estimate"),
        ("quantize-cpu", model, new, "--method", "rawint4", "--overwrite"),
        ("quantize-cpu", model, root / "output", "--method", "int8", "--overwrite", "--numa=1"),
        ("quantize-gpu", model, new, "--scheme", "FP8_DYNAMIC"),
    ):  # fmt: skip
        ktconv_done(*words, "--dry-run")
        assert contents(root) == before
    ktconv_done(
        "quantize-cpu",
        model,
        new,
        "--target-bits",
        6,
        "--dry-run",
        "--write-recipe",
        root / "r.toml",
    )
    assert contents(root).keys() - before.keys() == {"r.toml"}
