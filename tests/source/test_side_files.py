"""Files beside the weights: what may lie under their names, and where their links may lead."""

from __future__ import annotations

import errno
import faulthandler
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from helpers.cli import contents, done, refused, run, write_model
from helpers.convert import convert
from helpers.corrupt import earlier_version

from ktconv.cli.app import app
from ktconv.errors import CheckpointError
from ktconv.quantize.packed import run as quantize_cpu
from ktconv.source import open_checkpoint
from ktconv.source.reading.reader import SourceReader
from ktconv.source.side_files import find_side_files, list_side_files
from ktconv.system.regular_files import MAX_SMALL_BYTES

NAMES = ["tokenizer.json", "config.json", "model.safetensors.index.json", "chat_template.jinja"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """With one file of each kind, in three shards, so with an index."""
    directory = write_model(tmp_path / "model", layers=1)
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    return directory


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "output"


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    """A read that waits for ever ends the test run instead of stopping it."""
    faulthandler.dump_traceback_later(600, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def ktconv(*words: object) -> Result:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


# ---- what lies under the name ------------------------------------------------------------


def pipe(path: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def circle(path: Path) -> None:
    path.symlink_to(path.name)


def folder(path: Path) -> None:
    path.mkdir()


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(MAX_SMALL_BYTES + 1)


ODD: dict[Callable[[Path], None], str] = {
    pipe: "is not a regular file",
    unix_socket: "is not a regular file",
    endless: "is not a regular file",
    dangling: "is a broken link to nowhere",
    circle: "is a broken link to",
    sparse: "more than the",
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("make", ODD)
def test_what_is_no_file_is_refused_by_name(
    make: Callable[[Path], None], name: str, model: Path, output: Path
) -> None:
    (model / name).unlink()
    make(model / name)
    for more in ((), ("--dry-run",)):
        refused(run(model, output, *more), 2, str(model / name), ODD[make])
    assert not output.exists()
    if name in ("config.json", "model.safetensors.index.json"):
        refused(ktconv("inspect", model), 2, str(model / name), ODD[make])


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_a_directory_under_the_name_of_a_file(name: str, model: Path, output: Path) -> None:
    (model / name).unlink()
    folder(model / name)
    refused(run(model, output), 2, f"{model / name} is a directory, not a regular file")


def test_folders_that_are_no_side_files(model: Path, output: Path) -> None:
    for name in ("LICENSES", "NOTICES", "onnx"):
        (model / name).mkdir()
    (model / "LICENSE").write_text("MIT")
    done(model, output)
    assert "LICENSE" in contents(output) and not (output / "LICENSES").exists()


def test_licences_by_any_name(model: Path, output: Path) -> None:
    names = ["LICENSE-MODEL", "License.txt", "LICENCE", "COPYING", "USE_POLICY.md", "Notice.txt"]
    for name in [*names, "USAGE_POLICY", "THIRD_PARTY_NOTICES.md"]:
        (model / name).write_text(f"This is {name}.")
    (model / "POLICY.md").write_text("a page")
    done(model, output)
    assert {*names, "USAGE_POLICY", "THIRD_PARTY_NOTICES.md"} <= contents(output).keys()
    assert not (output / "POLICY.md").exists()


def test_templates_that_are_no_folder(model: Path, output: Path) -> None:
    templates = model / "additional_chat_templates"
    templates.mkdir()
    (templates / "tool.jinja").write_text("{{ tools }}")
    assert Path("additional_chat_templates/tool.jinja") in list_side_files(model)
    (templates / "tool.jinja").unlink()
    templates.rmdir()
    templates.write_text("{{ tools }}")
    refused(run(model, output), 2, f"{templates} is not a directory")
    templates.unlink()
    dangling(templates)
    refused(run(model, output), 2, f"{templates} is a broken link")


def test_a_name_that_no_manifest_can_hold(model: Path, output: Path) -> None:
    Path(os.fsdecode(os.fsencode(model) + b"/bad\xff.json")).write_text("{}")
    refused(run(model, output), 2, "a name that is not UTF-8")
    assert not output.exists()


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_may_not_be_read(
    name: str, model: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first layer, and not as an output that cannot be written."""
    before = os.open

    def refuse(path: object, *args: object, **more: object) -> int:
        if path == model / name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return before(path, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    result = run(model, output)
    refused(result, 3, f"{model / name} cannot be read: Permission denied")
    assert "output" not in result.stderr
    assert not output.exists()


# ---- where links lead --------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_links_out_of_the_model_are_refused(
    name: str, model: Path, output: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_bytes((model / name).read_bytes())
    (model / name).unlink()
    (model / name).symlink_to(tmp_path / "secret")
    refused(run(model, output), 2, f"{model / name} is a link to {tmp_path / 'secret'}")
    assert not output.exists()


def test_a_folder_of_templates_elsewhere(model: Path, output: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/x.jinja").write_text("secret")
    (model / "additional_chat_templates").symlink_to(tmp_path / "elsewhere")
    refused(run(model, output), 2, "x.jinja is a link to", "which is outside of")


def test_links_inside_of_the_model(model: Path, output: Path, tmp_path: Path) -> None:
    (model / "kept").mkdir()
    (model / "tokenizer.json").rename(model / "kept/tokenizer")
    (model / "tokenizer.json").symlink_to("kept/tokenizer")
    (tmp_path / "other name").symlink_to(model)
    done(tmp_path / "other name", output)
    assert (output / "tokenizer.json").read_bytes() == (model / "kept/tokenizer").read_bytes()
    assert not (output / "tokenizer.json").is_symlink()


def hub(model: Path, repository: Path) -> Path:
    """The model as a snapshot of the hub's cache."""
    snapshot, blobs = repository / "snapshots" / "0123abc", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(model.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(number))
    return snapshot


def test_a_snapshot_links_to_the_blobs_of_its_repository_only(
    model: Path, output: Path, tmp_path: Path
) -> None:
    snapshot = hub(model, tmp_path / "models--org--name")
    done(snapshot, output, "--dry-run")
    other = tmp_path / "models--org--other" / "blobs"
    other.mkdir(parents=True)
    (other / "1").write_text("{}")
    (snapshot / "tokenizer.json").unlink()
    (snapshot / "tokenizer.json").symlink_to(other / "1")
    refused(run(snapshot, output), 2, f"tokenizer.json is a link to {other / '1'}")


def test_blobs_that_are_a_link(model: Path, output: Path, tmp_path: Path) -> None:
    """Made like a snapshot, to reach what lies elsewhere."""
    repository = tmp_path / "models--org--name"
    snapshot = hub(model, repository)
    (repository / "blobs").rename(tmp_path / "etc")
    (repository / "blobs").symlink_to(tmp_path / "etc")
    refused(run(snapshot, output), 2, "which is outside of")


def test_a_blob_that_was_not_downloaded(model: Path, output: Path, tmp_path: Path) -> None:
    snapshot = hub(model, tmp_path / "models--org--name")
    (snapshot / "tokenizer.json").resolve().unlink()
    refused(run(snapshot, output), 2, str(snapshot / "tokenizer.json"), "is a broken link")


def test_shards_may_be_links_to_anywhere(model: Path, output: Path, tmp_path: Path) -> None:
    """Weights on another disk are common, and nothing but a safetensors file passes for one."""
    (tmp_path / "disk").mkdir()
    for shard in model.glob("*.safetensors"):
        shard.rename(tmp_path / "disk" / shard.name)
        shard.symlink_to(tmp_path / "disk" / shard.name)
    done(model, output)


def test_a_file_exchanged_for_a_link_after_planning(
    model: Path, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checked again when it is copied, hours later."""
    (tmp_path / "secret").write_text("secret")
    request = quantize_cpu.Request(str(model), output)
    preflight = quantize_cpu.prepare(request)
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.json").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="which is outside of"):
        quantize_cpu.quantize_cpu(request, preflight=preflight)
    assert not (output / "tokenizer.json").exists()


# ---- outputs -----------------------------------------------------------------------------


@pytest.mark.parametrize("make", [pipe, endless, dangling])
def test_odd_files_of_an_output_are_named(
    make: Callable[[Path], None], model: Path, output: Path
) -> None:
    convert(model, output)
    (output / "ktconv.json").unlink()
    make(output / "ktconv.json")
    for words in (("verify", output), ("inspect", output), ("reshard", output, "x", "--numa=2")):
        refused(ktconv(*words), 2, str(output / "ktconv.json"), ODD[make])


def test_damage_that_only_a_failure_can_report(model: Path, output: Path) -> None:
    """Neither ends the verification before it has begun."""
    convert(model, output)
    (output / "additional_chat_templates").write_text("no folder")
    manifest = json.loads((output / "ktconv.json").read_text())
    manifest["side_files"]["x" * 300] = {"bytes": 0, "sha256": "0" * 64}
    (output / "ktconv.json").write_text(json.dumps(manifest))
    result = ktconv("verify", output, "--json")
    assert result.exit_code == 1, result.stderr
    names = {failure.get("file") for failure in json.loads(result.stdout)["failures"]}
    assert {"additional_chat_templates", "x" * 300} <= names


def test_a_manifest_that_may_not_be_read(
    model: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(model, output)
    before = os.open

    def refuse(path: object, *args: object, **more: object) -> int:
        if path == output / "ktconv.json":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return before(path, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    for words in (("verify", output), ("inspect", output)):
        refused(ktconv(*words), 3, f"{output / 'ktconv.json'} cannot be read: Permission denied")


def test_pipes_among_layer_folders(model: Path, output: Path) -> None:
    convert(model, output, layout="layers")
    file = next(output.glob("_layer_0/_numa_0/*_gate_0_*quant_.kt"))
    file.unlink()
    pipe(file)
    result = ktconv("verify", output)
    assert result.exit_code == 1 and f"{file.name} is not a regular file" in result.stdout
    result = ktconv("inspect", output)
    assert result.exit_code == 0 and file.name in result.stdout


def test_a_shard_exchanged_for_a_pipe_is_not_waited_for(model: Path) -> None:
    """Between the reading of headers and of weights."""
    checkpoint = open_checkpoint(model)
    shard = checkpoint.files[0]
    shard.unlink()
    pipe(shard)
    reader = SourceReader(checkpoint.files, checkpoint.sources)
    with pytest.raises(CheckpointError, match="is not a regular file"), reader.open(shard):
        pass


def test_a_pipe_put_there_while_a_file_is_opened(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its type is asked of the descriptor, and opening does not wait."""
    path, before = model / "tokenizer.json", os.open

    def exchange(name: object, *args: object, **more: object) -> int:
        if name == path:
            path.unlink()
            pipe(path)
        return before(name, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", exchange)
    found: list[BaseException] = []

    def look() -> None:
        try:
            find_side_files(model)
        except CheckpointError as error:
            found.append(error)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(60)
    assert found and "is not a regular file" in str(found[0])


@pytest.mark.parametrize("levels", [70, 300, 900])
@pytest.mark.parametrize("opening", ['{"text_config":', '{"a":', "["])
def test_a_config_of_many_levels(levels: int, opening: str, model: Path, output: Path) -> None:
    closing = "]" if opening == "[" else "}"
    text = '{"a": ' + opening * levels + "1" + closing * levels + "}"
    (model / "config.json").write_text(text)
    refused(run(model, output), 2, f"{model / 'config.json'} is nested too deeply to be read")


def test_an_output_of_an_earlier_version_is_still_complete(model: Path, output: Path) -> None:
    """Its manifest records no side files, and it is left as it is."""
    done(model, output)
    earlier_version(output)
    before = contents(output)
    assert "nothing to do" in done(model, output)
    assert contents(output) == before
    (output / "config.json").unlink()
    done(model, output)
    assert "side_files" in json.loads((output / "ktconv.json").read_text())


@pytest.mark.parametrize("make", [pipe, dangling])
def test_transformers_is_not_given_what_is_no_file(
    make: Callable[[Path], None], model: Path
) -> None:
    pytest.importorskip("transformers")
    from ktconv.model.load import load_config, load_tokenizer

    (model / "tokenizer.json").unlink()
    make(model / "tokenizer.json")
    for load in (load_config, load_tokenizer):
        with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
            load(model)
