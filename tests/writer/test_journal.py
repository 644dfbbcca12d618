"""Records on the disk: which are accepted, and how two of them differ."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ktconv.errors import OutputError, ResourceError
from ktconv.writer.journal import (
    Journal,
    changed,
    differences,
    encode,
    file_is_intact,
    is_run_record,
    is_unit_record,
    parse_record,
)

CHECKSUM = {"blake3": "0" * 64}
RUN: dict[str, Any] = {"options": {}, "geometry": {"layers": {"0": {}, "999999999": {}}}}
UNIT: dict[str, Any] = {
    "files": [{"name": "model-00001-of-00001.safetensors", "bytes": 64}],
    "tensors": {"t": CHECKSUM | {"relative_rms_error": 0.25}},
}


@pytest.mark.parametrize(
    ("data", "record"),
    [
        (b'{"a": 1}', {"a": 1}),
        (b'{"a": "\\ud83d\\ude00"}', {"a": "\U0001f600"}),  # a pair of surrogates is a character
        (b'{"a": "\\\\u0000"}', {"a": "\\u0000"}),  # a backslash, then letters
        ('{"a": "ü"}'.encode(), {"a": "ü"}),
        (b'{"a": "\\ud83d"}', None),
        (b'{"a": "\\u0000"}', None),
        (b'{"a": "\\\\\\u0000"}', None),
        (b"[1]", None),
        (b"null", None),
        (b'{"a": 1', None),
        (b'{"a": "\xff"}', None),
        (b"[" * 100_000, None),
        (b"", None),
    ],
)
def test_what_is_read_back(data: bytes, record: object) -> None:
    assert parse_record(data) == record


@pytest.mark.parametrize(
    "record",
    [
        None,
        [],
        {"geometry": RUN["geometry"]},
        {**RUN, "options": []},
        {"options": {}},
        {**RUN, "geometry": []},
        {**RUN, "geometry": {}},
        {**RUN, "geometry": {"layers": []}},
        {**RUN, "geometry": {"layers": {"x": {}}}},
        {**RUN, "geometry": {"layers": {"": {}}}},
        {**RUN, "geometry": {"layers": {"1000000000": {}}}},
        {**RUN, "geometry": {"layers": {"0": {}, "1": 1}}},
    ],
)
def test_a_run_record_of_another_form(record: object) -> None:
    assert is_run_record(RUN)
    assert is_run_record({**RUN, "geometry": {"layers": {}}})
    assert not is_run_record(record)


def _with_file(**changes: object) -> dict[str, Any]:
    return {**UNIT, "files": [{**UNIT["files"][0], **changes}]}


@pytest.mark.parametrize(
    "record",
    [
        None,
        [],
        {"files": []},
        {"tensors": {}},
        {**UNIT, "files": {}},
        {**UNIT, "files": [UNIT["files"][0], "name"]},
        {**UNIT, "files": [{"bytes": 1}]},
        {**UNIT, "files": [{"name": "name"}]},
        _with_file(name=1),
        _with_file(bytes="64"),
        _with_file(bytes=True),
        _with_file(bytes=64.0),
        _with_file(header_sha256=1),
        _with_file(name="/etc/name"),
        _with_file(name=".."),
        _with_file(name="a/../../b"),
        {**UNIT, "tensors": []},
        {**UNIT, "tensors": {"t": CHECKSUM, "u": 1}},
        {**UNIT, "tensors": {"t": {}}},
        {**UNIT, "tensors": {"t": {"blake3": "0" * 63}}},
        {**UNIT, "tensors": {"t": CHECKSUM | {"relative_rms_error": "small"}}},
        {**UNIT, "tensors": {"t": CHECKSUM | {"relative_rms_error": 1}}},
        {**UNIT, "tensors": {"t": CHECKSUM | {"relative_rms_error": float("nan")}}},
        {**UNIT, "tensors": {"t": CHECKSUM | {"relative_rms_error": float("inf")}}},
    ],
)
def test_a_unit_record_of_another_form(record: object) -> None:
    assert is_unit_record(UNIT)
    assert is_unit_record(_with_file(name="a/b..c", header_sha256="0"))
    assert is_unit_record({"files": [], "tensors": {"t": CHECKSUM}})
    assert not is_unit_record(record)


def test_records_of_a_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "out")
    journal.create()
    assert journal.read_run() is None
    assert journal.read_unit("layer-00003") is None
    assert journal.unit_keys() == []
    journal.write_run(RUN)
    for key in ("other-00001", "layer-00010", "layer-00003"):
        journal.write_unit(key, UNIT)
    assert journal.read_run() == RUN
    assert journal.read_unit("layer-00003") == UNIT
    assert journal.unit_keys() == ["layer-00003", "layer-00010", "other-00001"]
    assert sorted(path.name for path in (tmp_path / "out/.ktconv").iterdir()) == [
        "layer-00003.json", "layer-00010.json", "other-00001.json", "run.json",
    ]  # fmt: skip
    (journal.directory / "layer-00003.json").write_bytes(b"{}")
    assert journal.read_unit("layer-00003") is None
    for damaged in (b"", b"{}", b"[]"):
        journal.run_file.write_bytes(damaged)
        with pytest.raises(OutputError, match=r"run\.json is damaged"):
            journal.read_run()
    assert encode({"a": {"b": 1}}) == b'{\n "a": {\n  "b": 1\n }\n}\n'


def test_a_file_is_intact_with_its_size_and_header(tmp_path: Path) -> None:
    header = (8).to_bytes(8, "little") + b"{      }"
    content = header + bytes(16)
    path = tmp_path / "shard"
    path.write_bytes(content)
    sized = {"name": "shard", "bytes": 32}
    record = {**sized, "header_sha256": hashlib.sha256(header).hexdigest()}
    journal = Journal(tmp_path)
    assert file_is_intact(tmp_path, record)
    assert file_is_intact(tmp_path, sized)
    assert journal.unit_is_intact({"files": [sized, record]})
    assert not journal.unit_is_intact({"files": [sized, {**record, "bytes": 31}]})
    assert not file_is_intact(tmp_path, {**record, "name": "lost"})
    assert not file_is_intact(tmp_path, {**sized, "bytes": 31})
    assert not file_is_intact(tmp_path, {"name": "shard"})
    assert not file_is_intact(tmp_path, {**record, "header_sha256": "0" * 64})
    path.write_bytes(content[:-1] + b"x")  # the data is not looked at
    assert file_is_intact(tmp_path, record)
    path.write_bytes(content[:15] + b" " + content[16:])
    assert not file_is_intact(tmp_path, record)
    path.write_bytes(b"\xff" * 32)  # a length of 2^64 - 1
    assert not file_is_intact(tmp_path, record)


def test_differences_are_named_by_their_path() -> None:
    ours = {"options": {"numa": 1, "same": 0, "new": True}, "source": {"a": 1}, "version": "2"}
    there = {"options": {"numa": 2, "same": 0, "old": []}, "source": 5, "more": 1}
    assert differences(ours, there) == [
        "more: 1 there, not set now",
        "options.new: not set there, True now",
        "options.numa: 2 there, 1 now",
        "options.old: [] there, not set now",
        "source: 5 there, {'a': 1} now",
        "version: not set there, 2 now",
    ]
    assert changed(ours, there) == [one for one in differences(ours, there) if one[:4] != "more"]
    assert differences(ours, ours) == changed(ours, {**ours, "more": 1}) == []


@pytest.mark.parametrize(("length", "shown"), [(60, "x" * 60), (61, "x" * 57 + "...")])
def test_long_values_are_cut(length: int, shown: str) -> None:
    assert differences({"a": "x" * length}, {}) == [f"a: not set there, {shown} now"]


def test_json_numbers_beyond_floats_are_no_error(tmp_path: Path) -> None:
    """json.loads reads them as infinity, which no measurement is."""
    text = json.dumps(UNIT).replace("0.25", "1e999").encode()
    assert not is_unit_record(parse_record(text))


def test_directories_are_durable_before_a_run_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ktconv.writer import journal as module

    journal, synced = Journal(tmp_path / "out"), list[tuple[Path, bool]]()

    def sync_names(path: Path) -> None:
        synced.append((path, journal.run_file.exists()))

    monkeypatch.setattr(module, "sync_names", sync_names)
    journal.create()
    journal.write_run(RUN)
    assert synced == [(journal.directory, False)]
    assert journal.run_file.exists()


def test_a_unit_record_is_of_its_unit_and_run(tmp_path: Path) -> None:
    """Else another run's checksums, or changed ones, would end up in the manifest."""
    journal = Journal(tmp_path / "out")
    journal.create()
    journal.write_run(RUN)
    journal.write_unit("layer-00003", UNIT)
    path = journal.directory / "layer-00003.json"
    sealed = path.read_bytes()
    assert Journal(journal.output).read_unit("layer-00003") == UNIT

    (journal.directory / "layer-00004.json").write_bytes(sealed)
    assert journal.read_unit("layer-00004") is None  # of another unit
    for old, new in ((b"0" * 64, b"0" * 63 + b"1"), (b"0.25", b"0.125"), (b"64", b"65")):
        path.write_bytes(sealed.replace(old, new, 1))
        assert is_unit_record(json.loads(path.read_bytes()))
        assert journal.read_unit("layer-00003") is None
    path.write_bytes(encode(UNIT))
    assert journal.read_unit("layer-00003") is None  # without a seal

    path.write_bytes(sealed)
    journal.write_run({**RUN, "options": {"scale": "amax"}})
    assert journal.read_unit("layer-00003") is None  # of another run
    journal.write_unit("layer-00003", UNIT)
    assert journal.read_unit("layer-00003") == UNIT
    assert path.read_bytes() != sealed


def test_units_are_of_the_run_that_was_begun_before_its_record(tmp_path: Path) -> None:
    """As a run into a finished output writes them: it is killed with all records or without."""
    journal = Journal(tmp_path / "out")
    journal.create()
    journal.begin(RUN)
    journal.write_unit("layer-00003", UNIT)
    assert journal.read_unit("layer-00003") is None
    journal.write_run(RUN)
    assert journal.read_unit("layer-00003") == UNIT


def test_a_directory_in_which_nobody_may_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "out")
    journal.create()
    assert not journal.has_run()
    journal.write_run(RUN)
    assert journal.has_run()

    def refused(path: Path, **_: object) -> NoReturn:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "stat", refused)
    with pytest.raises(
        ResourceError, match=r"cannot read .*run\.json: permission denied"
    ) as raised:
        journal.has_run()
    assert raised.value.hint == "make it readable for this user"
