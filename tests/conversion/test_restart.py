"""The same command again, with nothing, something or everything changed in between."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.cli import STATE, contents, done, edit_json, refused, run, stamps, write_model

pytestmark = pytest.mark.slow

CHANGES = {
    "--method=int8": "options.method: int4 there, int8 now",
    "--numa=2": "options.numa: 1 there, 2 now",
    "--layout=layers": "options.layout: safetensors there, layers now",
    "--compat": "options.compat: False there, True now",
    "--no-mtp": "options.mtp: True there, False now",
    "--experts-only": "options.experts_only: False there, True now",
    "--max-shard-size=60kB": "options.max_shard_size: 5000000000 there, 60000 now",
}
STAGES: dict[str, tuple[str, ...]] = {"finished": (), "unfinished": ("--layers=0",)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("source") / "model", layers=2, inner=256)


@pytest.fixture
def own_model(tmp_path: Path) -> Path:
    """One that the test may change."""
    return write_model(tmp_path / "model", layers=2, inner=256)


@pytest.fixture(params=list(STAGES.values()), ids=list(STAGES))
def stage(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return request.param


# ---- changed settings ------------------------------------------------------------------


@pytest.mark.parametrize("change", CHANGES)
def test_changed_option_is_refused_and_overwrite_starts_again(
    model: Path, tmp_path: Path, stage: tuple[str, ...], change: str
) -> None:
    output, clean = tmp_path / "output", tmp_path / "clean"
    done(model, output, *stage)
    before = contents(output)
    refused(run(model, output, change), 2, str(output), CHANGES[change])
    assert contents(output) == before
    done(model, output, change, "--overwrite")
    done(model, clean, change)
    assert contents(output) == contents(clean)
    done(model, output, "--overwrite")  # and back
    done(model, tmp_path / "first")
    assert contents(output) == contents(tmp_path / "first")


def test_options_that_change_no_byte_may_change(model: Path, tmp_path: Path) -> None:
    done(model, tmp_path / "clean")
    done(model, tmp_path / "output", "--layers=0")
    done(model, tmp_path / "output", "--threads=1", "--no-verify", "--max-memory=4GB", "--json")
    assert contents(tmp_path / "output") == contents(tmp_path / "clean")


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


SOURCES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "one byte of a shard": ("model-00002-of-00003.safetensors", flip_last_byte, "mtime_ns"),
    "time of a shard": ("model-00001-of-00003.safetensors", touch, "mtime_ns: "),
    "config": ("config.json", lambda p: edit_json(p, lambda c: c.update(x=1)), "sha256: "),
}


@pytest.mark.parametrize("name", SOURCES)
def test_changed_source_is_refused(
    own_model: Path, tmp_path: Path, stage: tuple[str, ...], name: str
) -> None:
    file, change, difference = SOURCES[name]
    output = tmp_path / "output"
    done(own_model, output, *stage)
    change(own_model / file)
    refused(run(own_model, output), 2, f"source.files.{file}.", difference)
    done(own_model, output, "--overwrite")
    done(own_model, tmp_path / "clean")
    assert contents(output) == contents(tmp_path / "clean")


def test_a_run_by_the_first_search_is_refused(
    model: Path, tmp_path: Path, stage: tuple[str, ...]
) -> None:
    """A half-finished run of the older search is refused: scales would differ within one output."""
    output = tmp_path / "output"
    done(model, output, *stage)
    state = output / STATE / "run.json" if stage else output / "ktconv.json"
    edit_json(state, lambda content: content["options"].pop("search"))
    refused(run(model, output), 2, "begun by an earlier version of ktconv, whose search")
    done(model, output, "--overwrite")


def test_another_version_is_refused(model: Path, tmp_path: Path, stage: tuple[str, ...]) -> None:
    output = tmp_path / "output"
    done(model, output, *stage)
    state = output / STATE / "run.json" if stage else output / "ktconv.json"
    edit_json(state, lambda content: content.update(ktconv_version="0.0.1"))
    refused(run(model, output), 2, "ktconv_version: 0.0.1 there, ")
    done(model, output, "--overwrite")
    done(model, tmp_path / "clean")
    assert contents(output) == contents(tmp_path / "clean")


def test_overwrite_removes_files_that_the_new_source_lacks(
    own_model: Path, tmp_path: Path, stage: tuple[str, ...]
) -> None:
    output = tmp_path / "output"
    (own_model / "vocab.json").write_text("{}")
    (own_model / "additional_chat_templates").mkdir()
    (own_model / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    done(own_model, output, *stage)
    (own_model / "vocab.json").unlink()
    (own_model / "additional_chat_templates" / "tools.jinja").unlink()
    done(own_model, output, "--overwrite")
    done(own_model, tmp_path / "clean")
    assert contents(output) == contents(tmp_path / "clean")
    assert not (output / "additional_chat_templates").exists()


def test_overwrite_removes_a_shard_that_was_renamed_but_not_journaled(
    model: Path, tmp_path: Path
) -> None:
    output = tmp_path / "output"
    done(model, output, "--layers=0", "--max-shard-size=60kB")
    for record in (output / STATE).glob("*-*.json"):
        record.unlink()  # killed between rename and record
    (output / STATE / "model-00009-of-00011.safetensors.part").write_bytes(b"half")
    done(model, output, "--overwrite")
    done(model, tmp_path / "clean")
    assert contents(output) == contents(tmp_path / "clean")


def test_overwrite_killed_anywhere_can_be_repeated(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ktconv.conversion import output as output_module
    from ktconv.system.files import remove

    done(model, tmp_path / "clean", "--method=int8")
    for count in range(1, 100):
        output, left = tmp_path / str(count), [count]
        done(model, output)

        def stop_after(path: Path, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            remove(path)

        monkeypatch.setattr(output_module, "remove", stop_after)
        result = run(model, output, "--method=int8", "--overwrite")
        monkeypatch.setattr(output_module, "remove", remove)
        if result.exit_code == 0:
            break
        assert result.exit_code == 130
        index = output / "model.safetensors.index.json"
        assert not index.exists() or len(list(output.glob("*.safetensors"))) == 3
        done(model, output, "--method=int8", "--overwrite")
        assert contents(output) == contents(tmp_path / "clean")
    assert count > 8


# ---- a finished output -----------------------------------------------------------------


@pytest.mark.parametrize("options", [(), ("--layout=layers",), ("--experts-only",)])
def test_finished_output_is_left_alone(
    model: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    output = tmp_path / "output"
    done(model, output, *options)
    before = stamps(output)
    assert "nothing to do" in done(model, output, *options)
    assert "nothing to do" in done(model, output, *options, "--finalize")
    assert json.loads(done(model, output, *options, "--json"))["complete"] is True
    assert stamps(output) == before
    assert not (output / STATE).exists()


def truncate(path: Path) -> None:
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size - 1)


def overwrite_at(position: int, data: bytes) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with path.open("rb+") as file:
            file.seek(position)
            file.write(data)

    return damage


def replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "deleted": Path.unlink,
    "truncated": truncate,
    "empty": lambda path: path.write_bytes(b""),
    "header length of 2^64": overwrite_at(0, b"\xff" * 8),
    "header length of 0": overwrite_at(0, bytes(8)),
    "header": overwrite_at(100, b"\0"),
    "a directory": replace_by_directory,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("shard", ["model-00001-of-00003.safetensors"])
def test_damaged_shard_is_repaired_alone(
    model: Path, tmp_path: Path, stage: tuple[str, ...], shard: str, damage: str
) -> None:
    output = tmp_path / "output"
    done(model, tmp_path / "clean")
    done(model, output, *stage)
    before = stamps(output)
    DAMAGES[damage](output / shard)
    if damage == "a directory":
        refused(run(model, output), 3, "cannot rename", "Is a directory")
        return
    assert re.search("Converted layers? 0", done(model, output))
    assert contents(output) == contents(tmp_path / "clean")
    after = stamps(output)
    untouched = {p for p in before if p.endswith(".safetensors") and not p.endswith(shard)}
    assert untouched and {p: after[p] for p in untouched} == {p: before[p] for p in untouched}


@pytest.mark.parametrize("damage", ["deleted", "truncated"])
def test_damaged_folder_is_repaired_alone(model: Path, tmp_path: Path, damage: str) -> None:
    output = tmp_path / "output"
    done(model, tmp_path / "clean", "--layout=layers")
    done(model, output, "--layout=layers")
    before = stamps(output / "_layer_0")
    DAMAGES[damage](next((output / "_layer_1").rglob("*.kt")))
    assert "layer 1" in done(model, output, "--layout=layers")
    assert contents(output) == contents(tmp_path / "clean")
    assert stamps(output / "_layer_0") == before


@pytest.mark.parametrize("name", ["README.md", "config.json", "model.safetensors.index.json"])
def test_lost_small_file_is_written_again(model: Path, tmp_path: Path, name: str) -> None:
    output = tmp_path / "output"
    done(model, output)
    clean, before = contents(output), stamps(output)
    (output / name).unlink()
    assert "is complete" in done(model, output)
    assert contents(output) == clean
    shards = [path for path in before if path.endswith(".safetensors")]
    assert [stamps(output)[path] for path in shards] == [before[path] for path in shards]


def test_damaged_index_is_written_again_but_edited_config_is_kept(
    model: Path, tmp_path: Path
) -> None:
    output = tmp_path / "output"
    done(model, output)
    written = contents(output)
    (output / "config.json").write_text('{"edited": "by the user"}')
    before = contents(output)
    again = run(model, output)
    says = " ".join(again.stderr.split())
    assert "config.json differs from the file that was written, and stays as it is: to have" in says
    assert again.exit_code == 0 and "nothing to do" in again.stdout and contents(output) == before
    (output / "config.json").unlink()
    assert "differs" not in run(model, output).stderr
    assert contents(output)["config.json"] == written["config.json"]
    assert "differs" not in run(model, output).stderr
    truncate(output / "model.safetensors.index.json")
    done(model, output)
    index = "model.safetensors.index.json"
    assert contents(output)[index] == written[index]


# ---- damaged state ---------------------------------------------------------------------

DEEP = "[" * 200_000
RECORDS = {
    "truncated": '{"files": [{"name": "mod',
    "empty": "",
    "not text": "\udcff\udcfe",
    "a list": "[]",
    "no keys": "{}",
    "a number for files": '{"files": 3, "tensors": {}}',
    "strings for files": '{"files": ["a"], "tensors": {}}',
    "no files": '{"files": [], "tensors": {}}',
    "a number for a name": '{"files": [{"name": 1, "bytes": 2}], "tensors": {}}',
    "a path that leads out": '{"files": [{"name": "../../x", "bytes": 1}], "tensors": {}}',
    "a list for tensors": '{"files": [], "tensors": []}',
    "nested too deep": DEEP,
}


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_damaged_journal_record_means_the_unit_is_done_again(
    model: Path, tmp_path: Path, record: str
) -> None:
    output = tmp_path / "output"
    done(model, tmp_path / "clean")
    done(model, output, "--layers=0")
    path = output / STATE / "layer-00000.json"
    path.write_bytes(record.encode(errors="surrogateescape"))
    assert "layers 0-1" in done(model, output)
    assert contents(output) == contents(tmp_path / "clean")


@pytest.mark.parametrize(
    "about",
    ["3", "{}", '{"sha256": ""}', f'{{"sha256": "{"0" * 64}", "relative_rms_error": "big"}}'],
)
def test_damaged_tensor_record_means_the_unit_is_done_again(
    model: Path, tmp_path: Path, about: str
) -> None:
    output = tmp_path / "output"
    done(model, tmp_path / "clean")
    done(model, output, "--layers=0")
    name = "blk.0.ffn_gate_exps.0.numa.0.weight"
    edit_json(
        output / STATE / "layer-00000.json",
        lambda record: record["tensors"].update({name: json.loads(about)}),
    )
    assert "layers 0-1" in done(model, output)
    assert contents(output) == contents(tmp_path / "clean")


@pytest.mark.parametrize("text", ["", '{"schema": 1, "opt', "[]", "null", DEEP])
def test_damaged_run_record_is_refused(model: Path, tmp_path: Path, text: str) -> None:
    output = tmp_path / "output"
    done(model, output, "--layers=0")
    (output / STATE / "run.json").write_text(text)
    refused(run(model, output), 2, "run.json is damaged")
    done(model, output, "--overwrite")
    done(model, tmp_path / "clean")
    assert contents(output) == contents(tmp_path / "clean")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"units": []}', '{"units": 3}', DEEP])
def test_damaged_manifest_is_refused(model: Path, tmp_path: Path, text: str) -> None:
    output = tmp_path / "output"
    done(model, output)
    (output / "ktconv.json").write_text(text)
    before = contents(output)
    refused(run(model, output), 2, "ktconv.json is damaged")
    refused(run(model, output, "--overwrite"), 2, "ktconv.json is damaged")
    assert contents(output) == before


@pytest.mark.parametrize("units", ['{"layer-00000": 3}', '{"layer-00000": {"files": {}}}', "{}"])
def test_manifest_without_usable_units_means_all_is_done_again(
    model: Path, tmp_path: Path, units: str
) -> None:
    output = tmp_path / "output"
    done(model, output)
    clean = contents(output)
    edit_json(output / "ktconv.json", lambda content: content.update(units=json.loads(units)))
    done(model, output)
    assert contents(output) == clean


@pytest.mark.parametrize("name", ["..", ".", "", "../neighbour", "/", "../", ".ktconv/.."])
def test_names_in_a_manifest_never_lead_out_of_the_output(
    model: Path, tmp_path: Path, name: str
) -> None:
    output, neighbour = tmp_path / "output", tmp_path / "neighbour"
    done(model, output)
    neighbour.write_text("precious")

    def poison(content: dict[str, object]) -> None:
        content["files"] = [name, 3]
        content["units"]["layer-00000"]["files"].append({"name": name, "bytes": 1})  # type: ignore[index]

    edit_json(output / "ktconv.json", poison)
    run(model, output, "--overwrite")
    assert neighbour.read_text() == "precious"
    assert output.is_dir()


def test_overwrite_removes_a_link_but_not_what_it_points_to(model: Path, tmp_path: Path) -> None:
    output, elsewhere = tmp_path / "output", tmp_path / "elsewhere"
    done(model, output, "--layout=layers")
    (output / "_layer_1").rename(elsewhere)
    (output / "_layer_1").symlink_to(elsewhere)
    before = contents(elsewhere)
    done(model, output, "--overwrite")
    assert contents(elsewhere) == before
