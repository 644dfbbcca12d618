"""Object stores and web servers as sources: bytes, faults, refusals, secrets."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
from helpers.paths import ROOT
from helpers.stores import close_stores
from helpers.web_server import WebServer, serving
from source.remote.conftest import killed, weights

from ktconv.errors import KtconvError
from ktconv.source.gguf.parts import part_names
from ktconv.source.remote import ahead, attempts
from ktconv.source.remote.attempts import fetch
from ktconv.source.remote.filesystem import GcsStore
from ktconv.source.remote.store import Store, open_store
from ktconv.source.remote.urls import parse_url
from ktconv.system.stores import transfer

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.network]

pytest.importorskip("aiohttp")
pytest.importorskip("fsspec")
pytest.importorskip("tenacity")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("web") / "model", layers=2, inner=256)


@pytest.fixture(autouse=True)
def _quick(no_pauses: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ahead, "PIECE_BYTES", 50_000)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    before = set(threading.enumerate())
    yield
    close_stores()
    for thread in set(threading.enumerate()) - before:
        if thread.name == "ktconv-fetch":  # or the next test counts what it still receives
            thread.join(20)


@pytest.fixture
def web(model: Path) -> Iterator[WebServer]:
    with serving(model) as found:
        yield found


def opened(url: str) -> Store:
    return open_store(parse_url(url))


# ---- web servers -----------------------------------------------------------------------------

FAULTS: dict[str, list[Fault | None]] = {
    "none": [None],
    "slow": [Fault("slow")],
    "reset": [Fault("reset")],
    "short": [Fault("short")],
    "busy and down": [Fault(429), Fault(503)],
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_same_bytes_whatever_goes_wrong(
    web: WebServer, local: Path, tmp_path: Path, name: str
) -> None:
    web.fault, met = every_third(FAULTS[name])
    retries = transfer.retries
    done(f"{web.url}/", tmp_path / "out")
    assert weights(tmp_path / "out") == weights(local)
    assert all(one in met for one in FAULTS[name])
    expect_retries(name, met, transfer.retries - retries)


def test_without_a_listing_names_come_from_the_index(
    web: WebServer, model: Path, local: Path, tmp_path: Path
) -> None:
    web.listing = False
    done(web.url, tmp_path / "out")
    assert weights(tmp_path / "out") == weights(local)
    names = {file.name for file in opened(web.url).files()}
    assert {path.name for path in model.glob("*.safetensors")} <= names
    assert {"config.json", "model.safetensors.index.json"} <= names


def test_listings_with_folders_odd_names_and_empty_files(tmp_path: Path) -> None:
    (tmp_path / "a" / "b c").mkdir(parents=True)
    for name, data in {"x#1.json": b"{}", "a/empty": b"", "a/b c/ü%.bin": b"123"}.items():
        (tmp_path / name).write_bytes(data)
    with serving(tmp_path) as web:
        store = opened(web.url)
        files = {file.name: file.nbytes for file in store.files()}
        assert files == {"x#1.json": 2, "a/empty": 0, "a/b c/ü%.bin": 3}
        assert fetch(store, "a/b c/ü%.bin", 1, 3) == b"23"
        assert set(store.state(["a/empty", "none"])) == {"a/empty"}


def test_of_gguf_models_without_a_listing_all_parts_are_asked_for(tmp_path: Path) -> None:
    parts = list(part_names("m-Q4-00002-of-00003.gguf"))
    assert parts == [f"m-Q4-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    for name in parts:
        (tmp_path / name).write_bytes(b"GGUF")
    with serving(tmp_path) as web:
        web.listing = False
        assert {file.name for file in opened(f"{web.url}/{parts[1]}").files()} == set(parts)


def test_without_etags_sizes_must_do(web: WebServer, local: Path, tmp_path: Path) -> None:
    """And nothing is kept: it could be of another state."""
    web.dated = False
    done(web.url, tmp_path / "out", "--cache-dir", tmp_path / "cache")
    assert weights(tmp_path / "out") == weights(local)
    assert not list((tmp_path / "cache").rglob("*.data"))


def test_dry_runs_know_what_is_in_the_cache(web: WebServer, tmp_path: Path) -> None:
    cache = "--cache-dir", tmp_path / "cache"
    words = ("quantize-cpu", web.url, tmp_path / "out", "--dry-run", *cache)
    plan = json.loads(ktconv_done(*words, "--json"))
    assert plan["bytes_in_cache"] < plan["bytes_to_transfer"]  # what was beside headers
    whole = plan["bytes_in_cache"] + plan["bytes_to_transfer"]
    assert whole == plan["source_bytes"]
    done(web.url, tmp_path / "a", "--layers=1", *cache)
    close_stores()
    plan = json.loads(ktconv_done(*words, "--json"))
    assert 0 < plan["bytes_to_transfer"] < whole
    assert plan["bytes_in_cache"] + plan["bytes_to_transfer"] == whole
    done(web.url, tmp_path / "a", *cache)
    close_stores()
    plan = json.loads(ktconv_done(*words, "--json"))
    assert (plan["bytes_to_transfer"], plan["requests_to_send"]) == (0, 0)
    assert "more are in the cache" in ktconv_done(*words)


@pytest.mark.parametrize("cache", ["out", "out/cache", "."])
def test_a_cache_in_the_output_is_refused(web: WebServer, tmp_path: Path, cache: str) -> None:
    result = run(web.url, tmp_path / "out", "--cache-dir", tmp_path / cache)
    refused(result, 2, "are one directory, or one is in the other")
    assert not (tmp_path / "out").exists() and not web.sent


def test_a_second_command_transfers_nothing(web: WebServer, tmp_path: Path) -> None:
    cache = "--cache-dir", tmp_path / "cache"
    first = run(web.url, tmp_path / "out", *cache)
    assert first.exit_code == 0 and "cache keeps what is read; it has 0 B" in first.stderr
    close_stores()
    before = transfer.nbytes
    words = "verify", tmp_path / "out", "--source", web.url, "--level=weights"
    second = ktconv(*words, *cache)
    assert second.exit_code == 0 and "cache keeps what is read; it has 1" in second.stderr
    assert transfer.nbytes == before


@pytest.mark.parametrize("dated", [True, False])
def test_a_change_in_the_middle_is_noticed(model: Path, tmp_path: Path, dated: bool) -> None:
    """By the ETag; by the size where the server has neither ETag nor date."""
    other = tmp_path / "model"
    other.mkdir()
    for path in model.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    target = sorted(other.glob("*.safetensors"))[-1]
    with serving(other) as web:
        web.dated = dated
        size = target.stat().st_size

        def change(number: int) -> None:
            weights = any(stop - start > 20_000 for _, start, stop in web.sent)  # behind headers
            if weights and target.stat().st_size == size:
                with target.open("ab") as stream:
                    stream.write(b"x")

        web.fault = change
        said = refused(run(web.url, tmp_path / "out"), 2, "changed while it was read")
        assert target.name in said
    assert "model.safetensors.index.json" not in contents(tmp_path / "out")


def test_a_server_that_ignores_ranges_is_refused(web: WebServer, tmp_path: Path) -> None:
    web.fault = lambda _: Fault("whole")
    before = transfer.nbytes
    refused(run(web.url, tmp_path / "out"), 2, "the server sends whole files only")
    assert transfer.nbytes - before < 400_000 and not (tmp_path / "out").exists()


def test_another_range_than_asked_for_is_refused(web: WebServer, tmp_path: Path) -> None:
    web.fault = lambda _: Fault("other")
    refused(run(web.url, tmp_path / "out"), 2, "sends other parts than it is asked for")
    assert "model.safetensors.index.json" not in contents(tmp_path / "out")


def test_urls_need_not_be_quoted(web: WebServer, model: Path) -> None:
    web.folder = model.parent
    (model.parent / "my mödel").symlink_to(model)
    web.query = "sig=a%20b%2F"
    for name, query in (("my mödel", "sig=a b%2F"), ("my%20m%C3%B6del", "sig=a%20b%2F")):
        files = {file.name for file in opened(f"{web.url}/{name}/?{query}").files()}
        assert files == {path.name for path in model.iterdir()}


def test_signatures_and_passwords_work_and_are_not_shown(
    web: WebServer, local: Path, tmp_path: Path
) -> None:
    web.query, web.authorization = "sig=verysecret", "Basic dXNlcjp2ZXJ5c2VjcmV0"
    host = web.url.removeprefix("http://")
    url = f"http://user:verysecret@{host}/?sig=verysecret"
    result = run(url, tmp_path / "out")
    assert result.exit_code == 0 and "verysecret" not in result.output
    assert weights(tmp_path / "out") == weights(local)
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert [path.name for path in files if b"verysecret" in path.read_bytes()] == []
    close_stores()
    web.fault = lambda _: Fault(403)
    result = run(url, tmp_path / "other")
    refused(result, 2, f"does not let us read http://{host}")
    assert "verysecret" not in result.output and "signature may have expired" in result.stderr
    web.fault = lambda _: Fault(400)
    result = run(url, tmp_path / "other")
    refused(result, 2, f"the server answered 400 for http://{host}")
    assert "verysecret" not in result.output


def test_proxies_and_netrc_are_those_of_the_system(
    web: WebServer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is the proxy: it gets whole URLs of a host that there is not."""
    web.authorization = "Basic dXNlcjp2ZXJ5c2VjcmV0"
    (tmp_path / "netrc").write_text("machine host.invalid login user password verysecret")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("http_proxy", web.url)
    files = {file.name for file in opened("http://host.invalid/").files()}
    assert files == {path.name for path in model.iterdir()}


def test_a_run_goes_on_with_a_new_signature(web: WebServer, local: Path, tmp_path: Path) -> None:
    web.query = "sig=first"
    done(f"{web.url}/?sig=first", tmp_path / "out", "--layers=1")
    close_stores()
    web.query = "sig=second"
    done(f"{web.url}/?sig=second", tmp_path / "out")
    assert weights(tmp_path / "out") == weights(local)


@pytest.mark.parametrize("at", [12, 20])
def test_a_run_that_is_killed_goes_on(web: WebServer, local: Path, tmp_path: Path, at: int) -> None:
    """It is killed while a request is answered; what it wrote and read is of use."""
    more = "--cache-dir", tmp_path / "cache"
    killed(web, at, web.url, tmp_path / "out", local, *more)
    done(web.url, tmp_path / "out", *more)
    assert weights(tmp_path / "out") == weights(local)


def test_the_streaming_pass_reads_the_same_way(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    example = ROOT / "docs" / "example" / "tiny-moe"
    words = "--max-tokens=64", "--json"
    there = json.loads(ktconv_done("stats", example, *words))
    with serving(example) as web:
        web.fault = lambda number: Fault("reset") if number % 4 == 1 else None
        found = json.loads(ktconv_done("stats", web.url, *words))
    assert found["layers"] == there["layers"]


def test_what_is_not_there_is_said(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(ktconv("inspect", f"{web.url}/none"), 2, f"{web.url}/none contains no files")
    web.fault = lambda _: Fault(500)
    refused(ktconv("inspect", web.url), 3, "the server answered 500", "again and again")
    monkeypatch.setattr(attempts, "LONGEST_PAUSE", 300.0)  # what never answered is not waited for
    monkeypatch.setattr(attempts, "FIRST_PAUSE", 300.0)
    said = refused(ktconv("inspect", "http://127.0.0.1:1/model"), 3, "cannot be reached")
    assert "http://127.0.0.1:1/model" in said
    refused(ktconv("inspect", "http://[::1/model"), 2, "http://[::1/model is not a URL")
    refused(ktconv("inspect", "https://host:99999/x"), 2, "Port out of range")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for package in ("fsspec", "s3fs", "gcsfs"):
        monkeypatch.setitem(sys.modules, package, None)
    for url in ("s3://bucket/m", "gs://bucket/m", "https://host/m"):
        result = ktconv("inspect", url)
        refused(result, 2, "which is not installed")
        assert "pip install 'ktconv[remote]'" in result.stderr


# ---- S3 --------------------------------------------------------------------------------------


class Faulty:
    """A WSGI application, with faults of requests for ranges. `fault` gets their number."""

    def __init__(self, app: Any) -> None:
        self.app, self.number = app, 0
        self.fault: Callable[[int], str | None] = lambda _: None

    def __call__(self, environ: Any, start: Any) -> Any:
        kind = None
        if "HTTP_RANGE" in environ:
            kind, self.number = self.fault(self.number), self.number + 1
        if kind == "other":
            first, last = (int(one) for one in environ["HTTP_RANGE"][6:].split("-"))
            shift = min(first, 1)
            environ["HTTP_RANGE"] = f"bytes={first - shift}-{last - shift}"
            return self.app(environ, start)
        if kind == "short":
            return [b"".join(self.app(environ, start))[:-1]]
        if kind is not None:
            code = "SlowDown" if kind.startswith("503") else "Other"
            start(kind, [("Content-Type", "application/xml")])
            return [f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()]
        return self.app(environ, start)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[tuple[str, Faulty]]:
    """An S3 of this machine."""
    moto = pytest.importorskip("moto.server")
    serving = pytest.importorskip("werkzeug.serving")
    app = Faulty(moto.DomainDispatcherApplication(moto.create_backend_app))
    server = serving.make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", app
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def uploaded(endpoint: tuple[str, Faulty], model: Path) -> Iterator[Any]:
    """A file system with the model in s3://bucket/models/model."""
    s3fs = pytest.importorskip("s3fs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", endpoint[0])
        patch.setenv("AWS_ACCESS_KEY_ID", "name")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "verysecret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_MAX_ATTEMPTS", "1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("AWS_CONFIG_FILE", os.devnull)
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
        found = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
        found.mkdir("bucket")
        for path in model.iterdir():
            found.pipe(f"bucket/models/model/{path.name}", path.read_bytes())
        yield found


@pytest.fixture
def bucket(uploaded: Any, endpoint: tuple[str, Faulty]) -> Iterator[Any]:
    """`uploaded`, without the faults of one test in the next."""
    yield uploaded
    endpoint[1].fault = lambda _: None


S3 = "s3://bucket/models/model"


def test_s3_gives_the_same_bytes(bucket: Any, model: Path, local: Path, tmp_path: Path) -> None:
    before = transfer.requests
    done(S3, tmp_path / "out")
    assert weights(tmp_path / "out") == weights(local) and transfer.requests > before
    manifest = json.loads((tmp_path / "out" / "ktconv.json").read_text())
    assert all("mtime_ns" not in one for one in manifest["source"]["files"].values())
    assert "verysecret" not in (tmp_path / "out" / "ktconv.json").read_text()
    found = json.loads(
        ktconv_done("verify", tmp_path / "out", "--source", S3, "--level=weights", "--json")
    )
    assert found["source"] == S3
    ktconv_done("quantize-gpu", model, tmp_path / "local-gpu", "--scheme=W4A16")
    ktconv_done("quantize-gpu", S3, tmp_path / "gpu", "--scheme=W4A16")
    assert weights(tmp_path / "gpu") == weights(tmp_path / "local-gpu")


S3_FAULTS = "503 Slow Down", "429 Too Many Requests", "500 Error", "short"


def test_faults_of_s3(
    bucket: Any, endpoint: tuple[str, Faulty], local: Path, tmp_path: Path
) -> None:
    """Each in turn, of every third request."""
    met: list[str] = []

    def fault(number: int) -> str | None:
        if number % 3 != 1:
            return None
        met.append(S3_FAULTS[number // 3 % 4])
        return met[-1]

    endpoint[1].number, endpoint[1].fault = 0, fault
    retries = transfer.retries
    done(S3, tmp_path / "out")
    assert weights(tmp_path / "out") == weights(local)
    assert set(met) == set(S3_FAULTS) and transfer.retries - retries == len(met)


def test_s3_must_send_the_range_that_was_asked_for(
    bucket: Any, endpoint: tuple[str, Faulty], tmp_path: Path
) -> None:
    endpoint[1].fault = lambda _: "other"
    refused(run(S3, tmp_path / "out"), 2, "sends other parts than it is asked for")
    assert "model.safetensors.index.json" not in contents(tmp_path / "out")


def test_s3_reads_one_version(bucket: Any) -> None:
    store = opened(S3)
    store.files()
    assert len(fetch(store, "config.json", 1, 5)) == 4
    whole = bucket.cat("bucket/models/model/config.json")
    bucket.pipe("bucket/models/model/config.json", b"{} other")
    try:
        with pytest.raises(KtconvError, match=f"{S3}/config.json changed while it was read"):
            fetch(store, "config.json", 1, 5)
        now = store.state(["config.json", "none"])
        assert set(now) == {"config.json"} and now["config.json"].nbytes == 8
    finally:
        bucket.pipe("bucket/models/model/config.json", whole)


def test_s3_says_what_is_wrong(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(ktconv("inspect", "s3://nobucket/m"), 2, "there is no bucket nobucket")
    refused(ktconv("inspect", "s3://No_Bucket!/m"), 2, "No_Bucket! cannot be the name of a bucket")
    with monkeypatch.context() as patch:
        patch.setenv("AWS_PROFILE", "nobody")
        refused(ktconv("inspect", S3), 2, "profile (nobody) could not be found")
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", "nonsense")
        refused(ktconv("inspect", S3), 2, "Invalid endpoint: nonsense")
    refused(ktconv("inspect", "s3://bucket/none"), 2, "s3://bucket/none contains no files")
    monkeypatch.setattr(attempts, "ATTEMPTS", 2)
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        refused(ktconv("inspect", S3), 3, f"the server cannot be reached for {S3}")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    result = ktconv("inspect", S3)
    refused(result, 2, f"there are no credentials to read {S3}")
    assert "FSSPEC_S3_ANON" in result.stderr


def test_which_errors_of_s3_are_tried_again(bucket: Any) -> None:
    from botocore.exceptions import ClientError, EndpointConnectionError
    from s3fs.errors import translate_boto_error

    def answered(code: str, status: int) -> BaseException:
        facts: Any = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
        return translate_boto_error(ClientError(facts, "GetObject"))

    store = opened(S3)
    for code, status in (("SlowDown", 503), ("InternalError", 500), ("RequestTimeout", 400)):
        assert store.transient(answered(code, status))
    for code, status in (("AccessDenied", 403), ("NoSuchKey", 404), ("ExpiredToken", 400)):
        assert not store.transient(answered(code, status))
    assert store.transient(EndpointConnectionError(endpoint_url="x"))
    said = store.explain(answered("AccessDenied", 403))
    assert said is not None and "AWS_PROFILE" in str(said.hint)
    assert "does not let us read" in str(said) and store.explain(AssertionError()) is None


# ---- Google Cloud Storage --------------------------------------------------------------------


def test_gcs(model: Path, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gcsfs")
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon"})
    with serving(model.parent, as_gcs=True) as web:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", web.url)
        done("gs://bucket/model", tmp_path / "out")
        assert weights(tmp_path / "out") == weights(local)
        store = opened("gs://bucket/model")
        assert {file.name for file in store.files()} == {path.name for path in model.iterdir()}
        now = store.state(["config.json", "none"])
        assert set(now) == {"config.json"}
        os.utime(model / "config.json", ns=(1, 1))  # another generation
        assert store.state(["config.json"]) != now
        with pytest.raises(KtconvError, match="changed while it was read"):
            fetch(store, "config.json", 0, 3)
        refused(ktconv("inspect", "gs://bucket/none"), 2, "gs://bucket/none")
        close_stores()
        web.fault = lambda _: Fault("other")
        result = run("gs://bucket/model", tmp_path / "other")
        refused(result, 2, "sends other parts than it is asked for")


def test_which_errors_of_gcs_are_tried_again() -> None:
    retry = pytest.importorskip("gcsfs.retry")
    store = object.__new__(GcsStore)  # errors are told apart without a server
    store.url = parse_url("gs://bucket/model")
    assert store.transient(TimeoutError()) and store.transient(ConnectionResetError())
    for error, words in {
        retry.HttpError({"code": 401, "message": "no"}): "does not let us read gs://bucket/model",
        OSError("Forbidden: b/x"): "does not let us read gs://bucket/model",
        retry.HttpError({"code": 503, "message": "no"}): "answered 503 for gs://bucket/model",
        FileNotFoundError("x"): "gs://bucket/model is not there",
    }.items():
        assert not store.transient(error) and words in str(store.explain(error))
