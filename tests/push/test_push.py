"""`ktconv push` against a hub on this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from helpers.cli import write_model
from helpers.convert import all_files, convert
from helpers.hub_uploads import READ_ONLY, TOKEN, Hub, Repository

from ktconv.cli.app import app
from ktconv.errors import KtconvError
from ktconv.push.command import push
from ktconv.push.content import content_of
from ktconv.push.hub import Request
from ktconv.verify.run import unwatched

NAME = "org/some-moe"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.network,
    # Of what the library asks of httpx.
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),
]


@pytest.fixture
def output(kept: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return Path(shutil.copytree(kept, tmp_path / "out"))


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [*map(str, words)])


def pushed(*words: object) -> dict[str, Any]:
    result = run("push", *words, "--json")
    assert result.exit_code == 0, result.output
    assert TOKEN not in result.output
    facts: dict[str, Any] = json.loads(result.stdout)
    return facts


def fails(*words: object, code: int = 2) -> str:
    """The error of a push, which has one sentence, and no secret."""
    result = run("push", *words)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output and result.stdout == ""
    for secret in (TOKEN, READ_ONLY, "secret-of-a-url"):
        assert secret not in result.output
    return result.stderr


def test_all_files_arrive(hub: Hub, kept: Path) -> None:
    facts = pushed(kept, NAME, "--private", "--message", "A first one")
    there = hub.repositories[NAME]
    assert there.private and there.commits == ["A first one"]
    assert there.branches["main"] == all_files(kept)
    assert facts["names"] == sorted(all_files(kept)) and facts["pushed"]
    assert facts["bytes"] == sum(map(len, all_files(kept).values()))
    assert facts["url"].startswith(f"{hub.url}/{NAME}/commit/")


def test_again_sends_nothing(hub: Hub, kept: Path) -> None:
    pushed(kept, NAME)
    stored = list(hub.stored)
    assert stored
    assert pushed(kept, NAME)["url"]
    assert hub.stored == stored and len(hub.repositories[NAME].commits) == 1


def test_an_interrupted_push_goes_on(hub: Hub, kept: Path) -> None:
    """What the hub has is not sent again, and nothing is visible until all of it is there."""
    hub.fail_after = 2
    assert "stopped: Error while uploading" in fails(kept, NAME, code=3)
    assert len(hub.stored) == 2 and hub.repositories[NAME].branches["main"] == {}
    hub.fail_after = None
    pushed(kept, NAME)
    assert hub.repositories[NAME].branches["main"] == all_files(kept)
    assert len(hub.stored) == len(set(hub.stored))


def test_the_first_interrupt_ends_an_upload(
    hub: Hub, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the library waits in threads of its own, for storage that does not answer."""
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    hub.released = threading.Event()
    words = [sys.executable, "-m", "ktconv", "push", str(kept), NAME]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not hub.asked("/store/") and time.monotonic() < deadline:
            time.sleep(0.05)
        assert hub.asked("/store/")
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=20)  # storage would hold it for 60 s
    finally:
        hub.released.set()
        process.kill()
        process.wait()
    assert process.returncode == 130 and said == ""
    assert "nterrupted" in errors and "Traceback" not in errors and TOKEN not in errors
    hub.released = None
    pushed(kept, NAME)
    assert hub.repositories[NAME].branches["main"] == all_files(kept)


def test_a_changed_card_is_all_that_is_sent(hub: Hub, output: Path) -> None:
    pushed(output, NAME)
    before = len(hub.stored)
    (output / "README.md").write_text((output / "README.md").read_text() + "\nMeasured by us.\n")
    pushed(output, NAME)
    assert len(hub.stored) == before + 1
    assert hub.repositories[NAME].branches["main"] == all_files(output)


def test_branch_and_pull_request(hub: Hub, output: Path) -> None:
    assert pushed(output, NAME, "--revision", "int4")["revision"] == "int4"
    there = hub.repositories[NAME]
    assert there.branches["main"] == {} and there.branches["int4"] == all_files(output)
    assert pushed(output, NAME, "--create-pr")["pull_request"] == f"{hub.url}/{NAME}/discussions/1"
    assert there.branches["main"] == {} and there.branches["refs/pr/1"] == all_files(output)
    assert "one of the two" in fails(output, NAME, "--create-pr", "--revision", "int4")


def test_only_what_the_manifest_names_is_sent(hub: Hub, output: Path) -> None:
    """Whatever lies beside it stays, and is named."""
    ours = all_files(output)
    strays = ["id_rsa", "credentials", "notes.txt", "sub/id_ed25519", "core.12345", ".env"]
    strays += ["modeling_evil.py", ".git/config", "extra.safetensors", "model.safetensors.part"]
    strays += ["a[b]*.json", "ours/a", "ours/b/c"]
    for name in strays:
        (output / name).parent.mkdir(exist_ok=True)
        (output / name).write_text("hf_token")
    (output / "elsewhere").symlink_to("/etc")
    (output / "hostname").symlink_to("/etc/hostname")
    os.mkfifo(output / "pipe")
    facts = pushed(output, NAME, "--dry-run")
    assert not hub.requests
    assert facts["names"] == sorted(ours)
    tops = {name if "/" not in name else name.split("/")[0] + "/" for name in strays}
    assert set(facts["not_sent"]) == tops | {"elsewhere/", "hostname", "pipe"}
    text = run("push", output, NAME, "--dry-run").stdout
    assert "Not sent, since ktconv.json does not name them: " in text and ".git/" in text
    pushed(output, NAME)
    assert hub.repositories[NAME].branches["main"] == ours


def test_strays_in_layer_folders_stay(hub: Hub, tmp_path: Path) -> None:
    output = tmp_path / "out"
    convert(write_model(tmp_path / "model", layers=1), output, layout="layers")
    ours = all_files(output)
    [part] = output.glob("_layer_*/_numa_0")
    (part / "INT4_gate_99_16Byte_quant_.kt").write_bytes(bytes(16))
    (part / ".secret").write_text("x")
    facts = pushed(output, NAME)
    assert {Path(name).name for name in facts["not_sent"]} == {
        "INT4_gate_99_16Byte_quant_.kt", ".secret",
    }  # fmt: skip
    assert hub.repositories[NAME].branches["main"] == ours


@pytest.mark.parametrize("kind", ["layers", "quantized"])
def test_other_outputs(kind: str, hub: Hub, tmp_path: Path) -> None:
    if kind == "layers":
        convert(write_model(tmp_path / "model", layers=1), tmp_path / "out", layout="layers")
        output = tmp_path / "out"
    else:
        from ktconv.merge import Request as MergeRequest
        from ktconv.merge import merge

        convert(write_model(tmp_path / "model", layers=1), tmp_path / "folders", layout="layers")
        output = tmp_path / "merged"
        merge(MergeRequest(tmp_path / "folders", output))
    pushed(output, NAME)
    assert hub.repositories[NAME].branches["main"] == all_files(output)


# ---- refusals ------------------------------------------------------------------------------


def _unfinished(output: Path) -> None:
    (output / ".ktconv").mkdir()


def _no_manifest(output: Path) -> None:
    (output / "ktconv.json").unlink()


def _damaged_manifest(output: Path) -> None:
    (output / "ktconv.json").write_text("{")


def _missing_shard(output: Path) -> None:
    sorted(output.glob("*.safetensors"))[0].unlink()


def _short_shard(output: Path) -> None:
    shard = sorted(output.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-1])


def _flipped_weight(output: Path) -> None:
    """A bit of the last byte, which is of a tensor and not of the header."""
    shard = sorted(output.glob("*.safetensors"))[-1]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


def _changed_config(output: Path) -> None:
    config = output / "config.json"
    config.write_text(config.read_text().replace("{", "{ ", 1))


def _wrong_index(output: Path) -> None:
    index = output / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("-00001-", "-00002-", 1))


def _wrong_total(output: Path) -> None:
    index = output / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"total_size": ', '"total_size": 1', 1))


def _unrecorded_tensor(output: Path) -> None:
    manifest = output / "ktconv.json"
    record = json.loads(manifest.read_text())
    unit = next(iter(record["units"].values()))
    unit["tensors"].popitem()
    manifest.write_text(json.dumps(record))


def _no_records_of_side_files(output: Path) -> None:
    manifest = output / "ktconv.json"
    record = json.loads(manifest.read_text())
    del record["side_files"]
    manifest.write_text(json.dumps(record))


def _linked_card(output: Path) -> None:
    (output / "README.md").unlink()
    (output / "README.md").symlink_to("/etc/hostname")


def _missing_card(output: Path) -> None:
    (output / "README.md").unlink()


def _missing_index(output: Path) -> None:
    (output / "model.safetensors.index.json").unlink()


def _missing_config(output: Path) -> None:
    (output / "config.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_unfinished, "is not finished"),
        (_no_manifest, "has no ktconv.json"),
        (_damaged_manifest, "ktconv.json is damaged"),
        (_missing_shard, ".safetensors is missing"),
        (_short_shard, ".safetensors is not as it was written"),
        (_missing_config, "has no config.json"),
        (_flipped_weight, "differs from the checksum in the manifest"),
        (_changed_config, "config.json differs from the file that was written"),
        (_wrong_index, "does not describe the tensors next to it"),
        (_wrong_total, "does not describe the tensors next to it"),
        (_unrecorded_tensor, "has no checksum in"),
        (_no_records_of_side_files, "has no checksums of the files next to the weights"),
        (_linked_card, "README.md is a link to /etc/hostname, which is outside of"),
        (_missing_card, "README.md does not exist"),
        (_missing_index, "index.json does not exist"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_outputs_that_are_not_sent(spoil: Any, said: str, hub: Hub, output: Path) -> None:
    spoil(output)
    assert said in fails(output, NAME)
    assert said in fails(output, NAME, "--dry-run")
    assert not hub.requests


@pytest.mark.parametrize("spoil", [_flipped_weight, _changed_config, _wrong_index])
def test_the_way_out_of_damage(spoil: Any, hub: Hub, tmp_path: Path) -> None:
    """The same command alone would say that there is nothing to do."""
    model, output = write_model(tmp_path / "model", layers=1), tmp_path / "out"
    words = ("quantize-cpu", model, output, "--numa", 1)
    assert run(*words).exit_code == 0
    spoil(output)
    assert "convert again with --overwrite" in fails(output, NAME, "--dry-run")
    assert run(*words, "--overwrite").exit_code == 0
    pushed(output, NAME, "--dry-run")


def test_paths_that_are_no_output(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "does not exist" in fails(tmp_path / "nothing", NAME)
    assert "is a file" in fails(tmp_path / "file", NAME)
    assert "has no ktconv.json" in fails(tmp_path, NAME)
    assert not hub.requests


def test_a_shard_on_another_disk(hub: Hub, output: Path, tmp_path: Path) -> None:
    """Weights may be links: their content is known."""
    shard = sorted(output.glob("*.safetensors"))[0]
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    pushed(output, NAME)
    there = hub.repositories[NAME].branches["main"]
    assert there[shard.name] == (tmp_path / "elsewhere").read_bytes()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("some-moe", "give org/name"),
        ("a/b/c", "give org/name"),
        ("datasets/org/name", "not a model repository"),
        ("org/na me", "give org/name"),
        ("org/na--me", "give org/name"),
        ("org/name.git", "give org/name"),
        ("https://huggingface.co/org/name", "give org/name"),
        ("org/" + "x" * 96, "give org/name"),
    ],
)
def test_names_that_the_hub_does_not_allow(name: str, said: str, hub: Hub, kept: Path) -> None:
    assert said in fails(kept, name)
    assert not hub.requests


@pytest.mark.parametrize(
    "name",
    [
        *("../../main", "a..b", "/main", "main/", "a//b", ".hidden", "a/.b", "-main", "a.lock"),
        *("a b", "a\tb", "a~1", "a^", "a:b", "a?", "a*", "a[b", "a\\b", "a@{1}", "@", "main.", "ü"),
        *("refs/heads/main", "refs/pr/", "refs/pr/x", "refs/pr/1/../2", "x" * 201),
        *("0123456789abcdef" * 2 + "01234567", "0123456789abcdef" * 4),
    ],
)
def test_names_that_no_branch_has(name: str, hub: Hub, kept: Path) -> None:
    for dry_run in ([], ["--dry-run"]):
        said = fails(kept, NAME, f"--revision={name}", *dry_run)
        assert "cannot be a branch" in said or "only a branch can be pushed to" in said
        assert "single dots" in said or "cannot be a branch" not in said  # ".." lost a dot there
    assert not hub.requests


@pytest.mark.parametrize("name", ["int4", "v1.0", "a/b_c-d", "refs/pr/12", "0123456"])
def test_names_that_branches_have(name: str, hub: Hub, kept: Path) -> None:
    assert pushed(kept, NAME, "--revision", name, "--dry-run")["revision"] == name


def test_tokens(hub: Hub, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", READ_ONLY)
    message = fails(kept, NAME)
    assert f"may not write to {NAME}" in message and "hf auth login" in message
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "does not accept the token" in fails(kept, NAME)
    monkeypatch.delenv("HF_TOKEN")
    asked = len(hub.requests)
    assert "needs a token of the hub" in fails(kept, NAME)
    assert len(hub.requests) == asked and not hub.repositories


def test_private_is_not_taken_for_public(hub: Hub, kept: Path) -> None:
    hub.repositories[NAME] = Repository(private=False)
    assert "everybody can read it" in fails(kept, NAME, "--private")
    assert not hub.stored and hub.repositories[NAME].branches["main"] == {}
    hub.repositories[NAME].private = True
    pushed(kept, NAME, "--private")


def test_offline(hub: Hub, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in fails(kept, NAME)


def test_a_dry_run_needs_no_package(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert f"to {NAME} (main)" in run("push", kept, NAME, "--dry-run").stdout
    assert "ktconv[hub]" in fails(kept, NAME)


@pytest.mark.parametrize(
    ("path", "status", "said", "code"),
    [
        ("create", 403, "may not write to org/some-moe (not allowed)", 2),
        ("create", 409, "has no 'url'", 3),
        ("/commit/", 409, "a conflict for org/some-moe: not allowed with [token]", 3),
        ("/commit/", 400, "refuses this content for org/some-moe: not allowed", 2),
        ("/commit/", 412, "answered 412", 3),
        ("preupload", 404, "the hub has no", 2),
        ("/store/", 403, "stopped: Error while uploading", 3),
    ],
)
def test_refusals(path: str, status: int, said: str, code: int, hub: Hub, kept: Path) -> None:
    hub.refused[path] = (status, f"not allowed with {TOKEN}" if code == 3 else "not allowed")
    assert said in fails(kept, NAME, code=code)


def test_a_hub_that_is_not_there(hub: Hub, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        said = f"the hub cannot be reached for {NAME}: Connection refused."
        assert said in fails(kept, NAME, code=3)


def test_a_card_that_the_hub_does_not_allow(hub: Hub, output: Path) -> None:
    """As those of earlier versions: found before anything is sent."""
    card = output / "README.md"
    card.write_text(card.read_text().replace("---\n", "---\nbase_model: model\n", 1))
    message = fails(output, NAME)
    assert (
        'refuses this content for org/some-moe: Invalid metadata in README.md. - "base' in message
    )
    assert not hub.stored


def test_errors_as_json(hub: Hub, tmp_path: Path) -> None:
    result = run("push", tmp_path, NAME, "--json")
    assert json.loads(result.stdout)["error"]["exit_code"] == result.exit_code == 2


def test_the_library(hub: Hub, kept: Path) -> None:
    done = push(Request(kept, NAME))
    assert done.sent and done.content == content_of(kept, unwatched)
    with pytest.raises(KtconvError):
        push(Request(kept, "name"))


def test_a_process_of_its_own_logs_no_token(hub: Hub, kept: Path, tmp_path: Path) -> None:
    """With the library's own debug output on, of which each line is a note."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(tmp_path / "hf"),
        "HF_TOKEN": TOKEN,
        "HF_DEBUG": "1",
        "HF_HUB_VERBOSITY": "debug",
    }
    command = [sys.executable, "-m", "ktconv", "push", str(kept), NAME, "--progress=json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert TOKEN not in done.stdout + done.stderr
    events = [json.loads(line)["event"] for line in done.stderr.splitlines()]
    assert events.count("note") > 1 and events[-1] == "finished"
    assert hub.repositories[NAME].branches["main"] == all_files(kept)


def all_shards(output: Path) -> list[dict[str, Any]]:
    """The records of an output's files with weights."""
    units = json.loads((output / "ktconv.json").read_text())["units"]
    return [file for unit in units.values() for file in unit["files"]]


def test_progress(hub: Hub, kept: Path) -> None:
    result = run("push", kept, NAME, "--progress=json", "--json")
    facts = json.loads(result.stdout)
    *found, last = (json.loads(line) for line in result.stderr.splitlines())
    *reading, first = (one for one in found if one["event"] != "note")  # notes: of libraries
    assert first["event"] == "started"
    shards = {file["name"] for file in all_shards(kept)}
    assert reading[0]["event"] == "started" and set(reading[0]["units"]) == shards
    assert {one["unit"] for one in reading if one["event"] == "unit_finished"} == shards
    assert reading[-1]["done_bytes"] == reading[-1]["total_bytes"] == reading[0]["bytes"]
    assert (first["units"], first["bytes"]) == (facts["names"], facts["bytes"])
    assert last == {"schema": 1, "event": "finished", "exit_code": 0}
    result = run("push", kept, "name", "--progress=json")
    assert json.loads(result.stderr)["event"] == "failed" and result.exit_code == 2
    said = re.compile(r"^Sending \d+ files, ", re.MULTILINE)
    assert said.search(run("push", kept, NAME, "--progress=lines").stderr)
    assert not said.search(run("push", kept, NAME, "--progress=none").stderr)


# ---- the end of conversions ----------------------------------------------------------------


def test_conversions_end_with_the_commands(hub: Hub, tmp_path: Path) -> None:
    model, output = write_model(tmp_path / "model", layers=1), tmp_path / "a model"
    words = ("quantize-cpu", model, output, "--numa", "1")
    text = run(*words).stdout
    assert f"ktconv push '{output}' USER/a-model\n" in text
    assert text.endswith(f"hf upload USER/a-model '{output}' .\n")
    facts = json.loads(run(*words, "--json").stdout)
    assert facts["upload"] == f"hf upload USER/a-model '{output}' ."
    assert facts["push"] == f"ktconv push '{output}' USER/a-model"
