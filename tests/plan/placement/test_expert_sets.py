"""The file of --experts and --exclude-experts: what it says, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ktconv.errors import CheckpointError, KtconvError, UsageError
from ktconv.targets.expert_sets import (
    check_expert_set,
    expert_set,
    others,
    read_expert_set,
    set_of_record,
    write_expert_set,
)


def written(text: str | bytes, tmp_path: Path) -> Path:
    path = tmp_path / "hot.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_order_and_spaces_do_not_matter(tmp_path: Path) -> None:
    text = '{"experts": {"10": [2], "3": [17, 0, 5]},\n "schema": 1}'
    found = read_expert_set(written(text, tmp_path))
    assert found.layers == {3: (0, 5, 17), 10: (2,)}
    assert (found.of(3), found.of(4), found.count) == ((0, 5, 17), (), 4)
    again = tmp_path / "again.json"
    write_expert_set(found, again)
    assert read_expert_set(again) == found
    assert read_expert_set(again).sha256 == found.sha256
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".part"] == []
    other = expert_set({3: [0, 5, 17], 10: [3]})
    assert other.sha256 != found.sha256


def test_records_of_manifests() -> None:
    wrong: Any
    found = expert_set({3: [5, 0, 6, 7], 4: [1], 5: []})
    record = found.as_record()
    assert record == {"sha256": found.sha256, "layers": {"3": "0,5-7", "4": "1"}}
    assert set_of_record(record, "here") == found
    assert expert_set({}).as_record() == {}
    assert set_of_record({}, "here") == expert_set({})
    for wrong in ({"03": "1"}, {"x": "1"}, {"3": "1-"}, {"3": 7}, {"3": "0,5-8", "4": "1"}, [3]):
        with pytest.raises(CheckpointError, match="here does not contain a valid set of experts"):
            set_of_record(record | {"layers": wrong}, "here")
    for wrong in (None, [], {"layers": record["layers"]}):
        with pytest.raises(CheckpointError, match="here does not contain a valid set of experts"):
            set_of_record(wrong, "here")


def test_others() -> None:
    chosen = expert_set({3: [0, 2]})
    assert others(chosen, {3: 4, 4: 2}) == {3: (1, 3), 4: (0, 1)}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not valid JSON"),
        (b"\xff", "is not UTF-8"),
        ("[1]", "is not a JSON object but a list"),
        ('{"experts": {"3": [0]}}', "has no schema 1"),
        ('{"schema": true, "experts": {"3": [0]}}', "has no schema 1"),
        ('{"schema": 2, "experts": {"3": [0]}}', "has no schema 1"),
        ('{"schema": 1}', "has no object of experts by layer"),
        ('{"schema": 1, "experts": [[0]]}', "has no object of experts by layer"),
        ('{"schema": 1, "experts": {}}', "contains no expert"),
        ('{"schema": 1, "experts": {"3": [0]}, "note": ""}', "has 'note'"),
        ('{"schema": 1, "experts": {"3": [0], "3": [1]}}', "contains the key '3' twice"),
        ('{"schema": 1, "experts": {"three": [0]}}', "layer 'three' is not a number"),
        ('{"schema": 1, "experts": {"03": [0]}}', "layer '03' is not a number"),
        ('{"schema": 1, "experts": {"-1": [0]}}', "layer '-1' is not a number"),
        ('{"schema": 1, "experts": {"3": 0}}', "the experts of layer 3 are not a list"),
        ('{"schema": 1, "experts": {"3": []}}', "the list of layer 3 is empty"),
        ('{"schema": 1, "experts": {"3": [0, "1"]}}', "'1' of layer 3 is not an expert id"),
        ('{"schema": 1, "experts": {"3": [1.0]}}', "1.0 of layer 3 is not an expert id"),
        ('{"schema": 1, "experts": {"3": [true]}}', "True of layer 3 is not an expert id"),
        ('{"schema": 1, "experts": {"3": [-1]}}', "-1 of layer 3 is not an expert id"),
        ('{"schema": 1, "experts": {"3": [4, 1, 4]}}', "names expert 4 of layer 3 twice"),
        ('{"schema": 1, "kind": "router statistics", "layers": []}', "contains counts"),
        ('{"schema": 1, "experts": {"3": [0]}, "experts_in_layer": 8}', "no object of numbers"),
        (
            '{"schema": 1, "experts": {"3": [0]}, "experts_in_layer": {"3": true}}',
            "True is not how many experts layer 3 has",
        ),
        (
            '{"schema": 1, "experts": {"3": [0]}, "experts_in_layer": {"x": 8}}',
            "layer 'x' is not a number",
        ),
    ],
)
def test_expert_sets_that_are_refused(text: str | bytes, said: str, tmp_path: Path) -> None:
    with pytest.raises(KtconvError) as caught:
        read_expert_set(written(text, tmp_path))
    assert said in str(caught.value)
    assert "hot.json" in str(caught.value)
    assert caught.value.hint
    assert caught.value.exit_code == 2


def test_expert_set_without_a_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.json"):
        with pytest.raises(UsageError, match=r"--exclude-experts: .* is not a file"):
            read_expert_set(path, "--exclude-experts")


def test_a_set_of_a_model_with_other_experts(tmp_path: Path) -> None:
    """A set made before experts were dropped is refused: its ids now name other experts."""
    path = tmp_path / "hot.json"
    write_expert_set(expert_set({3: [0, 5]}, {3: 16, 4: 16}), path)
    assert json.loads(path.read_text())["experts_in_layer"] == {"3": 16, "4": 16}
    found = read_expert_set(path)
    assert found.sha256 == expert_set({3: [0, 5]}).sha256
    check_expert_set(found, {3: 16, 4: 16, 5: 8}, path)
    for counts in ({3: 12, 4: 16}, {3: 16, 4: 12}):
        with pytest.raises(UsageError, match=r"was made for 16 experts in layer \d, and this"):
            check_expert_set(found, counts, path)
    write_expert_set(expert_set({3: [1]}), path)  # replaces what ktconv wrote
    check_expert_set(read_expert_set(path), {3: 12}, path)  # files of earlier versions


def test_what_a_model_has() -> None:
    chosen = expert_set({3: [0, 15], 4: [2]})
    check_expert_set(chosen, {3: 16, 4: 3, 5: 16}, "hot.json")
    with pytest.raises(UsageError, match="layer 4, which is not an MoE layer") as caught:
        check_expert_set(chosen, {3: 16, 5: 16}, "hot.json")
    assert caught.value.hint == "MoE layers are 3,5"
    with pytest.raises(UsageError, match="expert 15 of layer 3, but it has 15") as caught:
        check_expert_set(chosen, {3: 15, 4: 3}, "hot.json")
    assert caught.value.hint == "experts are 0 to 14"
