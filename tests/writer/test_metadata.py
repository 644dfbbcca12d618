"""The index and the manifest as text, and what is read of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ktconv.conversion.records import ErrorSummary, describe_units, peak_rss
from ktconv.writer.manifest import (
    Manifest,
    read_manifest,
    read_run,
    write_manifest,
)
from ktconv.writer.metadata import INDEX, copy_sidecars, index_lines, read_index, write_index

CHECKSUM = {"blake3": "0" * 64}
RUN: dict[str, Any] = {
    "ktconv_version": "1.0", "options": {"numa": 2},
    "geometry": {"model_type": "some", "layers": {"3": {"experts": 2}}},
}  # fmt: skip
UNITS: dict[str, dict[str, Any]] = {
    "layer-00003": {
        "files": [{"name": "a", "bytes": 1}, {"name": "b", "bytes": 2}],
        "tensors": {"y": CHECKSUM, "x": CHECKSUM | {"relative_rms_error": 0.5}},
        "seconds": 1,
    },
    "other-00001": {"files": [], "tensors": {}},
}


def test_an_index(tmp_path: Path) -> None:
    places = [("model.b", "model-1"), ("model.a", "model-2")]
    text = b"".join(index_lines(places, 77))
    assert json.loads(text) == {"metadata": {"total_size": 77}, "weight_map": dict(places)}
    assert text.count(b"\n") == 7  # a tensor in each line
    write_index(places, 77, tmp_path, tmp_path)
    assert (tmp_path / INDEX).read_bytes() == text
    assert read_index(tmp_path) == json.loads(text)
    (tmp_path / INDEX).write_bytes(b"{")
    assert read_index(tmp_path) == {}
    (tmp_path / INDEX).unlink()
    assert read_index(tmp_path) is None


def test_side_files_are_copied_with_their_folders(tmp_path: Path) -> None:
    source, output = tmp_path / "source", tmp_path / "output"
    (source / "below").mkdir(parents=True)
    (source / "below/a.txt").write_bytes(b"abc")
    found = copy_sidecars([Path("below/a.txt")], source, output, tmp_path)
    assert (output / "below/a.txt").read_bytes() == b"abc"
    assert list(found) == ["below/a.txt"]
    assert found["below/a.txt"]["bytes"] == 3


def test_a_manifest(tmp_path: Path) -> None:
    write_manifest(RUN, UNITS.items(), tmp_path, tmp_path)
    text = (tmp_path / "ktconv.json").read_text()
    assert json.loads(text) == RUN | {"units": UNITS}
    assert list(json.loads(text)["units"]["layer-00003"]["tensors"]) == ["x", "y"]
    assert sum('"x"' in line or '"y"' in line for line in text.splitlines()) == 2
    found = read_manifest(tmp_path)
    assert found is not None
    assert (found.version, found.model_type, found.options) == ("1.0", "some", {"numa": 2})
    assert found.layers == {3: {"experts": 2}}
    assert found.units == UNITS and found.damaged_units == []
    assert [file["name"] for file in found.files] == ["a", "b"]
    assert found.tensors.keys() == {"x", "y"}
    assert not found.merged and found.resharded_from is None
    assert found.has_source and found.source_files == {} and found.tower is None


@pytest.mark.parametrize("written", ["by us", "by another tool", "without units"])
def test_how_an_output_was_made(written: str, tmp_path: Path) -> None:
    """Without its units, of which only those of our own writer are not parsed."""
    run = RUN | {"note": ',\n "units": {', "nested": {"units": {}}}
    if written == "by us":
        write_manifest(run, UNITS.items(), tmp_path, tmp_path)
        whole = (tmp_path / "ktconv.json").read_bytes()
        start = whole.index(b'\n "units"') + 10
        damaged = whole[:start] + b" {" + b"x" * 100  # is not looked at
        (tmp_path / "ktconv.json").write_bytes(damaged)
    elif written == "by another tool":
        (tmp_path / "ktconv.json").write_text(json.dumps({"units": UNITS, **run}, indent=4))
    else:
        (tmp_path / "ktconv.json").write_text(json.dumps(run))
    found = read_run(tmp_path)
    if written == "without units":
        assert found is None
        return
    assert found is not None and found.record | {"units": 0} == run | {"units": 0}
    assert found.layers == {3: {"experts": 2}}
    assert read_run(tmp_path / "nowhere") is None


def test_a_damaged_unit_leaves_the_others(tmp_path: Path) -> None:
    units = {"layer-00001": {"files": 1}, **UNITS}
    (tmp_path / "ktconv.json").write_text(json.dumps(RUN | {"units": units}))
    found = read_manifest(tmp_path)
    assert found is not None
    assert found.damaged_units == ["layer-00001"]
    assert found.units == UNITS


@pytest.mark.parametrize("content", [RUN, RUN | {"units": []}, {"units": {}}, []])
def test_a_manifest_of_another_form(content: object, tmp_path: Path) -> None:
    (tmp_path / "ktconv.json").write_text(json.dumps(content))
    assert read_manifest(tmp_path) is None


@pytest.mark.parametrize(
    ("source", "files"),
    [
        ({"files": {"a": {"bytes": 1}}}, {"a": {"bytes": 1}}),
        ({}, {}),
        ([], None),
        ({"files": []}, None),
        ({"files": {"a": {}, "b": 1}}, None),
    ],
)
def test_the_source_in_a_manifest(source: object, files: dict[str, Any] | None) -> None:
    manifest = Manifest(Path("ktconv.json"), RUN | {"source": source})
    assert manifest.has_source == (files is not None)
    assert manifest.source_files == (files or {})


def test_other_entries_of_a_manifest() -> None:
    record = {
        "merged_from": [], "resharded_from": {"numa": 1}, "files": ["a", 1, "b"], "none": 1,
        "source": {"tower": "vision"},
    }  # fmt: skip
    manifest = Manifest(Path("ktconv.json"), record)
    assert manifest.merged and manifest.resharded_from == {"numa": 1}
    assert manifest.names("files") == ["a", "b"] and manifest.names("none") == []
    assert manifest.tower == "vision"
    for source in ({"tower": 1}, 1):
        assert Manifest(Path("ktconv.json"), {"source": source}).tower is None
    assert Manifest(Path("ktconv.json"), {"resharded_from": 1}).resharded_from is None


def test_errors_of_units_in_any_order() -> None:
    units: list[dict[str, Any]] = [
        {"tensors": {"a": {"relative_rms_error": 0.25}, "b": {"relative_rms_error": 0.5}}},
        {"tensors": {"c": {"relative_rms_error": 0.75}, "scale": {}}},
        {"tensors": {"A": {"relative_rms_error": 0.75}}},
        {"tensors": {"scale": {}}},
    ]
    for order in (units, units[::-1]):
        summary = ErrorSummary()
        assert summary.mean is None and summary.worst is None
        for unit in order:
            summary.add(unit)
        assert summary.count == 4
        assert summary.mean == 0.5625
        assert summary.worst == ("A", 0.75)  # of equal ones the first by name


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["layer-00003", "layer-00004", "layer-00005"], "layers 3-5"),
        (["layer-00000", "other-00001"], "layer 0 and non-expert tensors"),
        (["other-00001", "other-00002"], "non-expert tensors"),
    ],
)
def test_units_in_words(keys: list[str], words: str) -> None:
    assert describe_units(keys) == words


def test_peak_memory_is_what_the_system_says() -> None:
    def kibibytes() -> int:
        return int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0])

    before, found, after = kibibytes(), peak_rss(), kibibytes()
    assert before * 1024 <= found <= after * 1024
