"""hf:// through huggingface_hub, from a hub on this machine: bytes, faults, refusals, secrets."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.cli import (
    contents,
    done,
    ktconv,
    ktconv_done,
    refused,
    run,
    write_model,
)
from helpers.faults import Fault, every_third, expect_retries
from helpers.hub_server import TOKEN, HubServer, Repository, serving
from helpers.stores import close_stores
from source.remote.conftest import killed, weights

from ktconv.errors import CheckpointError, ResourceError, SourceChangedError
from ktconv.source.remote import ahead, attempts
from ktconv.source.remote.attempts import fetch
from ktconv.source.remote.store import Store, open_store
from ktconv.source.remote.urls import parse_url
from ktconv.system.stores import transfer

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.network]

URL = "hf://org/model"


@pytest.fixture(scope="module")
def server() -> Iterator[HubServer]:
    with serving() as found:
        yield found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("hub") / "model", layers=2, inner=256)


@pytest.fixture
def hub(
    server: HubServer,
    model: Path,
    no_pauses: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Iterator[HubServer]:
    constants = pytest.importorskip("huggingface_hub.constants")
    url, storage = server.url, server.storage_url
    HubServer.__init__(server)
    server.url, server.storage_url = url, storage
    server.repositories["org/model"] = Repository(model)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-login"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 10)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(ahead, "PIECE_BYTES", 50_000)
    yield server
    close_stores()


FAULTS: dict[str, list[Fault | None]] = {
    "none": [None],
    "slow": [Fault("slow")],
    "reset": [Fault("reset")],
    "short": [Fault("short")],
    "busy and down": [Fault(429, {"Retry_After": "0"}), Fault(503)],
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_same_bytes_whatever_goes_wrong(
    hub: HubServer, local: Path, tmp_path: Path, name: str
) -> None:
    hub.fault, met = every_third(FAULTS[name])
    retries = transfer.retries
    done(URL, tmp_path / "out")
    assert weights(tmp_path / "out") == weights(local)
    assert all(one in met for one in FAULTS[name])
    expect_retries(name, met, transfer.retries - retries)


def test_requests_that_fail_all_the_same_say_why(
    hub: HubServer, tmp_path: Path, local: Path
) -> None:
    hub.fault = lambda number: Fault(503) if number > 8 else None
    said = refused(run(URL, tmp_path / "out"), 3, "the hub answered 503 for hf://org/model")
    assert "secret" not in said
    hub.fault = lambda _: None
    close_stores()
    done(URL, tmp_path / "out")
    assert weights(tmp_path / "out") == weights(local)


def test_a_server_that_ignores_ranges_is_refused(hub: HubServer, tmp_path: Path) -> None:
    """Never a whole shard for a header."""
    hub.fault, before = lambda _: Fault("whole"), transfer.nbytes
    refused(run(URL, tmp_path / "out"), 3, "the server sends whole files only")
    assert transfer.nbytes - before < 100_000


def test_another_range_than_asked_for_is_refused(hub: HubServer, tmp_path: Path) -> None:
    hub.fault = lambda _: Fault("other")
    refused(run(URL, tmp_path / "out"), 2, "sends other parts than it is asked for")
    assert "model.safetensors.index.json" not in contents(tmp_path / "out")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            "less",
            "99 bytes where 100 bytes were asked for, from 7 on of big.json, 2 times in a row",
        ),
        ("short", "the hub broke off its answers for hf://org/big again and again"),
        ("reset", "the hub broke off its answers for hf://org/big again and again"),
    ],
)
def test_answers_that_stay_short_are_called_that(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, said: str
) -> None:
    monkeypatch.setattr(attempts, "ATTEMPTS", 2)
    store = big_file(hub, tmp_path)
    hub.fault = lambda _: Fault(kind)
    with pytest.raises(ResourceError, match=said) as found:
        fetch(store, "big.json", 7, 107)
    assert hub.asked["big.json"] == 2
    assert "run the same command again" in str(found.value.hint)


def big_file(hub: HubServer, tmp_path: Path) -> Store:
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / "big.json").write_bytes(bytes(range(256)) * 20)
    hub.repositories["org/big"] = Repository(tmp_path / "big")
    store = open_store(parse_url("hf://org/big"))
    store.files()
    return store


def test_whole_files_have_the_digest_of_the_listing(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "ATTEMPTS", 2)
    store = big_file(hub, tmp_path)
    content = (tmp_path / "big" / "big.json").read_bytes()
    hub.fault = lambda number: Fault("flip") if number == 0 else None
    assert fetch(store, "big.json", 0, len(content)) == content
    hub.fault = lambda _: Fault("flip")
    with pytest.raises(CheckpointError, match=r"big/big.json does not have the SHA-256"):
        fetch(store, "big.json", 0, len(content))


def test_etags_are_compared_with_those_of_the_same_host(hub: HubServer, tmp_path: Path) -> None:
    """The hub's, and those of two hosts that send the bytes, are three."""
    store, storage = big_file(hub, tmp_path), hub.storage_url
    path = tmp_path / "big" / "big.json"
    hub.valid_for = 2
    try:
        for number in range(12):
            host = "localhost" if number % 3 else "127.0.0.1"
            hub.storage_url = storage.replace("127.0.0.1", host)
            assert fetch(store, "big.json", 1, 3) == bytes([1, 2])
        assert len(hub.signed) > 4
        os.utime(path, ns=(1, 1))  # another ETag of the host; the hub's is that of the bytes
        with pytest.raises(SourceChangedError, match=r"big/big.json changed while it was read"):
            fetch(store, "big.json", 1, 3)
    finally:
        hub.storage_url = storage


@pytest.mark.parametrize("how", ["other", "longer", "shorter"])
def test_a_file_that_changes_in_the_middle_is_noticed(
    hub: HubServer, model: Path, tmp_path: Path, how: str
) -> None:
    """Though the commit is the same."""
    other = tmp_path / "model"
    shutil.copytree(model, other)
    hub.repositories["org/model"] = Repository(other)
    target = max(other.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    content = target.read_bytes()
    changed = {"other": content[:-1] + b"x", "longer": content + b"x", "shorter": content[:2000]}

    def change(_: int) -> None:
        begun = any(name == target.name for name, _, _ in hub.ranges)  # so its ETag is known
        if begun and target.read_bytes() == content:
            target.write_bytes(changed[how])

    hub.fault = change
    said = refused(run(URL, tmp_path / "out"), 2, "changed while it was read")
    assert f"/{target.name} changed" in said and "secret" not in said
    assert "model.safetensors.index.json" not in contents(tmp_path / "out")


@pytest.mark.parametrize("begun", [False, True])
def test_a_run_that_is_killed_goes_on(
    hub: HubServer, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    """It is killed while a request for weights is answered; a layer that was there is kept."""
    if begun:
        done(URL, tmp_path / "out", "--layers=0")
    there = {path: path.stat() for path in (tmp_path / "out").glob("*.safetensors")}
    assert bool(there) == begun
    at = hub.asked["bytes"] + 5
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    killed(hub, at, URL, tmp_path / "out", local)
    close_stores()
    done(URL, tmp_path / "out")
    assert weights(tmp_path / "out") == weights(local)
    assert all(path.stat().st_ino == found.st_ino for path, found in there.items())


def test_signed_addresses_are_used_while_they_are_good(hub: HubServer, model: Path) -> None:
    hub.repositories["org/counted"] = Repository(model)
    store = open_store(parse_url("hf://org/counted"))
    file = max(store.files(), key=lambda one: one.nbytes)
    content = (model / file.name).read_bytes()
    assert [store.read(file.name, at, at + 7) for at in range(9)] == [
        content[at : at + 7] for at in range(9)
    ]
    assert len([path for path in hub.requests if "counted/resolve/" in path]) == 1
    hub.valid_for = 12
    assert [store.read(file.name, at, at + 7) for at in range(9)] == [
        content[at : at + 7] for at in range(9)
    ]
    assert len([path for path in hub.requests if "counted/resolve/" in path]) == 2


def test_all_bytes_are_of_one_commit(hub: HubServer, tmp_path: Path) -> None:
    commit = hub.repositories["org/model"].commit
    done(f"{URL}@main", tmp_path / "out")
    resolved = [path for path in hub.requests if "/resolve/" in path]
    assert resolved and all(f"/resolve/{commit}/" in path for path in resolved)
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"ktconv quantize-cpu hf://org/model@{commit} OUTPUT" in card
    manifest = json.loads((tmp_path / "out" / "ktconv.json").read_text())
    etags = {one.get("etag") for one in manifest["source"]["files"].values()}
    assert all(len(etag) in (40, 64) for etag in etags - {None}) and len(etags) > 2


def test_revisions(hub: HubServer, tmp_path: Path) -> None:
    hub.repositories["org/model"].revisions = ("main", "refs/pr/1", "team/fast")
    ktconv_done("inspect", f"{URL}@refs/pr/1")
    ktconv_done("inspect", f"{URL}@team%2Ffast")
    refused(ktconv("inspect", f"{URL}@v9"), 2, "has org/model, but no revision v9")


def test_a_folder_of_a_repository(hub: HubServer, model: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "whole" / "bf16", layers=1)
    hub.repositories["org/whole"] = Repository(tmp_path / "whole")
    there = json.loads(ktconv_done("inspect", tmp_path / "whole" / "bf16", "--json"))
    found = json.loads(ktconv_done("inspect", "hf://org/whole/bf16", "--json"))
    assert found["network_bytes"] > 0
    assert there == {name: found[name] for name in there} | {"path": there["path"]}


# ---- refusals --------------------------------------------------------------------------------


def test_gated_private_and_missing_repositories(
    hub: HubServer, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories["org/gated"] = Repository(model, gated=True)
    hub.repositories["org/private"] = Repository(model, private=True)
    refused(ktconv("inspect", "hf://org/gated"), 2, "org/gated is gated", "there is no token")
    refused(ktconv("inspect", "hf://org/private"), 2, "the hub has no repository org/private")
    result = ktconv("inspect", "hf://org/none")
    refused(result, 2, "the hub has no repository org/none that is public")
    assert "hf auth login" in result.stderr
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for name in ("gated", "private"):
        assert TOKEN not in ktconv_done("inspect", f"hf://org/{name}")
    result = ktconv("inspect", "hf://org/none")
    refused(result, 2, "that this token can see")
    monkeypatch.setenv("HF_TOKEN", "hf_anotherTokenThatIsSecretToo")
    close_stores()
    result = ktconv("inspect", "hf://org/gated")
    refused(result, 2, "org/gated is gated, and access is not granted.")
    assert "Secret" not in result.output


def test_the_token_never_reaches_the_other_host_or_an_output(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)  # the server checks the other host
    result = run(URL, tmp_path / "out")
    assert result.exit_code == 0 and hub.tokens == {TOKEN}
    assert TOKEN not in result.output and "secret" not in result.output
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert not any(TOKEN.encode() in path.read_bytes() for path in files)


def test_offline_and_out_of_reach(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(attempts, "ATTEMPTS", 2)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    result = run(URL, tmp_path / "out")
    refused(result, 3, "the hub cannot be reached for hf://org/model: Connection refused")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    from huggingface_hub.utils import close_session

    close_session()  # the library decides when a session is made
    try:
        result = run(URL, tmp_path / "out")
        refused(result, 2, "HF_HUB_OFFLINE forbids")
        assert "hf download org/model." in result.stderr
        result = ktconv("inspect", "org/model")
        refused(result, 2, "nor a model in the local")
        assert "hf download org/model;" in result.stderr
        assert "headers are read" not in result.stderr
    finally:
        close_session()
    assert not (tmp_path / "out").exists()


# ---- options, and models that are not in the cache ---------------------------------------------


def test_headers_are_read_without_being_told_to(hub: HubServer, tmp_path: Path) -> None:
    """inspect, plan and --dry-run; nothing else."""
    result = ktconv("inspect", "org/model", "--json")
    assert "headers are read from the hub" in result.stderr
    facts = json.loads(result.stdout)
    assert facts["path"].startswith("hf://org/model@") and facts["network_bytes"] > 0
    ktconv_done("plan", "org/model", "--json")
    plan = json.loads(
        ktconv_done("quantize-cpu", "org/model", tmp_path / "x", "--dry-run", "--json")
    )
    assert plan["bytes_to_transfer"] == plan["source_bytes"] and plan["requests_to_send"] > 0
    assert "at 1 Gbit/s" in ktconv_done("quantize-cpu", "org/model", tmp_path / "x", "--dry-run")
    result = run("org/model", tmp_path / "x")
    refused(result, 2, "org/model is neither a directory nor a model in the local")
    assert "hf download org/model;" in result.stderr and "hf://org/model." in result.stderr
    assert not (tmp_path / "x").exists()


def test_download_and_revision(hub: HubServer, tmp_path: Path, local: Path) -> None:
    hub.repositories["org/model"].revisions = ("main", "v1")
    done("org/model", tmp_path / "a", "--download", "--revision", "v1")
    assert weights(tmp_path / "a") == weights(local)
    assert any(path.endswith("/revision/v1") for path in hub.requests)
    result = run("org/model@v9:Q4", tmp_path / "x")
    assert "hf download org/model --revision v9 --include '*Q4*' '*.json'" in result.stderr
    done("org/model@v1", tmp_path / "b", "--download", "--json")
    words = ("verify", tmp_path / "a", "--source", "org/model", "--level=weights")
    assert "OK" in ktconv_done(*words, "--download")
    refused(ktconv(*words), 2, "neither a directory nor a model in the local")


def test_options_that_do_not_belong_together(hub: HubServer, tmp_path: Path, local: Path) -> None:
    for words, said in {
        ("org/model@v1", "--revision=v2"): "names a revision, and --revision another",
        (f"{URL}@v1", "--revision=v2"): "--revision does not go with hf://org/model@v1",
        ("s3://bucket/x", "--revision=v2"): "--revision does not go with s3://bucket/x",
        (str(local), "--revision=v2"): "--revision is for models of the hub",
        (str(local), "--download"): "--download is for models of the hub",
        ("org/model", f"--cache-dir={tmp_path}"): "--cache-dir is for sources",
    }.items():
        refused(run(words[0], tmp_path / "x", words[1]), 2, said)


def test_reports_have_the_network(hub: HubServer, tmp_path: Path) -> None:
    hub.fault = lambda number: Fault(503) if number == 3 else None
    result = ktconv("quantize-cpu", URL, tmp_path / "out", "--json", "--progress=json")
    report = json.loads(result.stdout)
    assert report["network_requests"] > 0 and report["network_retries"] > 0
    events = [json.loads(line) for line in result.stderr.splitlines()]
    [*_, last] = (one for one in events if one["event"] == "unit_finished")
    assert 0 < last["network_bytes"] <= report["network_bytes"] and last["network_retries"] > 0
    close_stores()
    result = ktconv("quantize-cpu", URL, tmp_path / "lines", "--progress=lines")
    assert "B/s, network " in result.stderr and " requests, " in result.stdout
