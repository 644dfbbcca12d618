"""Which files of an output directory belong to a conversion, and what is there as planned."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from helpers.convert import convert
from plan.models import write_model

from ktconv.conversion.output import OutputState
from ktconv.errors import OutputError
from ktconv.source import open_checkpoint
from ktconv.targets.packed.target import Options, Plan, make_plan
from ktconv.writer.journal import Journal

SHARD = "model-00001-of-00003.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("state") / "model", (2, 2), (128, 128))


@pytest.fixture(scope="module")
def plan(model: Path) -> Plan:
    return make_plan(open_checkpoint(model), Options())


def state_of(plan: Plan, output: Path) -> OutputState:
    return OutputState(plan, Journal(output))


def test_what_is_kept_of_a_run_that_failed(plan: Plan, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "out")
    journal.create()
    state = state_of(plan, journal.output)
    assert state.nothing_is_kept()
    (journal.output / SHARD).write_bytes(b"")
    assert state.nothing_is_kept()  # no record says that it is ours
    journal.write_run({})
    assert not state.nothing_is_kept()
    (journal.output / SHARD).unlink()
    assert state.nothing_is_kept()
    journal.run_file.unlink()
    journal.write_unit("layer-00000", {})
    assert state.nothing_is_kept()
    (journal.output / SHARD).write_bytes(b"")
    assert not state.nothing_is_kept()


def test_files_of_others_are_refused(model: Path, plan: Plan, tmp_path: Path) -> None:
    output = tmp_path / "out"
    state = state_of(plan, output)
    state.refuse_foreign_files()  # nothing is there
    output.mkdir()
    (output / ".hidden").touch()
    state.refuse_foreign_files()
    for name in (SHARD, "notes.txt"):  # nothing says who wrote these
        (output / name).touch()
        with pytest.raises(OutputError, match=f"contains {name}, which") as caught:
            state.refuse_foreign_files()
        assert caught.value.hint == "choose an empty directory, or move it elsewhere"
        (output / name).unlink()
    convert(model, output, numa=1)
    state.refuse_foreign_files()
    (output / "notes.txt").touch()
    with pytest.raises(OutputError, match=r"contains notes\.txt, which"):
        state.refuse_foreign_files()
    (output / "notes.txt").unlink()
    manifest = json.loads((output / "ktconv.json").read_text())
    manifest["files"].remove("config.json")
    (output / "ktconv.json").write_text(json.dumps(manifest))
    with pytest.raises(OutputError, match=r"contains config\.json, which"):  # planned since then
        state.refuse_foreign_files()
    (output / "ktconv.json").write_text("{}")
    with pytest.raises(OutputError, match=r"ktconv\.json is damaged"):
        state.refuse_foreign_files()
    with pytest.raises(OutputError, match="is a file"):
        state_of(plan, output / "ktconv.json").refuse_foreign_files()


def test_names_of_an_earlier_run_are_its_own(plan: Plan, tmp_path: Path) -> None:
    """Those in records, if they can be names of files in the directory."""
    output = tmp_path / "out"
    journal = Journal(output)
    journal.create()
    names = ["old.safetensors", 1, "a/b", "../c", "a/../c", "..", ".", "", ".ktconv", "/", "a//c"]
    journal.run_file.write_text(json.dumps({"files": names}))
    journal.write_unit(
        "layer-00000", {"files": [{"name": "_layer_0/x", "bytes": 1}], "tensors": {}}
    )
    for name in ("old.safetensors", "_layer_0/x", "a/b", "a/c", SHARD, "c", "kept/b"):
        (output / name).parent.mkdir(exist_ok=True)
        (output / name).touch()
    (tmp_path / "c").touch()
    state = state_of(plan, output)
    with pytest.raises(OutputError, match="contains a/c, which"):
        state.refuse_foreign_files()
    (output / "ktconv.json").touch()
    state.remove_earlier_run()
    assert sorted(path.name for path in output.iterdir()) == [".ktconv", "a", "c", "kept", SHARD]
    assert [path.name for path in (output / "a").iterdir()] == ["c"]
    assert (tmp_path / "c").exists()
    assert [path.name for path in journal.directory.iterdir()] == []


def test_files_of_others_in_folders_are_refused(model: Path, tmp_path: Path) -> None:
    """Also in those of layers, and of chat templates; --overwrite removes what a run wrote."""
    source = shutil.copytree(model, tmp_path / "model")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").touch()
    output, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "x.kt").touch()
    convert(source, output, numa=1, layout="layers")
    plan = make_plan(open_checkpoint(source), Options(layout="layers"))
    state = state_of(plan, output)
    state.refuse_foreign_files()
    ours = {path for path in output.rglob("*") if not path.is_dir()}
    layer = next(output.glob("_layer_*"))
    for mine in (
        layer / "notes.txt",
        layer / "_numa_0" / "x.kt",
        layer / ".hidden",
        output / "additional_chat_templates" / "mine.jinja",
    ):
        mine.touch()
        with pytest.raises(OutputError, match=f"contains {mine.relative_to(output)}, which"):
            state.refuse_foreign_files()
        mine.unlink()
    link = layer / "_numa_1"
    link.symlink_to(elsewhere)
    with pytest.raises(OutputError, match=f"contains {link.relative_to(output)}, which"):
        state.refuse_foreign_files()
    mine.touch()  # after the refusal
    Journal(output).create()
    state.remove_earlier_run()
    assert not any(map(os.path.lexists, ours))
    kept = {path for path in output.rglob("*") if path.is_symlink() or not path.is_dir()}
    assert kept == {mine, link} and link.is_symlink() and (elsewhere / "x.kt").exists()


def test_a_folder_without_a_record_is_of_a_killed_run(model: Path, tmp_path: Path) -> None:
    """A kill between the final name of a unit and its line in the journal."""
    output = tmp_path / "out"
    convert(model, output, numa=1, layout="layers")
    manifest = json.loads((output / "ktconv.json").read_text())
    key, record = next(iter(manifest["units"].items()))
    folder = record["files"][0]["name"].split("/")[0]
    manifest["units"][key] = None
    (output / "ktconv.json").write_text(json.dumps(manifest))
    state = state_of(make_plan(open_checkpoint(model), Options(layout="layers")), output)
    (output / folder / "notes.txt").touch()
    with pytest.raises(OutputError, match=f"contains {folder}/notes.txt, which"):
        state.refuse_foreign_files()
    (output / folder / "notes.txt").unlink()
    state.refuse_foreign_files()
    Journal(output).create()
    state.remove_earlier_run()
    assert [path.name for path in output.iterdir()] == [".ktconv"]


def test_units_that_are_there_as_planned(model: Path, plan: Plan, tmp_path: Path) -> None:
    output = tmp_path / "out"
    state = state_of(plan, output)
    assert state.pending(plan.units) == plan.units
    assert not state.final_files_present()
    convert(model, output, numa=1)
    assert state.pending(plan.units) == [] and state.final_files_present()
    shard = output / plan.layers[1].shard_names[0]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    assert state.pending(plan.units) == [plan.layers[1]]
    shard.write_bytes(b"x" + whole[1:])
    assert state.pending(plan.units) == [plan.layers[1]]
    shard.write_bytes(whole)
    assert state.pending(plan.units) == []
    index = output / "model.safetensors.index.json"
    text = index.read_bytes()
    for wrong in (text + b" ", text[:-1], text.replace(b"total_size", b"total_sizf"), b""):
        index.write_bytes(wrong)
        assert not state.final_files_present()
    index.write_bytes(text)
    assert state.final_files_present()
    for name in ("README.md", "config.json"):
        content = (output / name).read_bytes()
        (output / name).unlink()
        assert not state.final_files_present()
        (output / name).write_bytes(content + b" ")  # edited
        assert state.final_files_present()
