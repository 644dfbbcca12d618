"""What a plan says before anything is written: names, sizes and bytes of every unit."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from plan.models import HIDDEN, OTHER_BYTES, uneven, write_model

from ktconv.conversion.plan import LayerUnit
from ktconv.conversion.records import chosen_record, run_record
from ktconv.errors import CheckpointError, UsageError
from ktconv.source import open_checkpoint
from ktconv.targets.expert_sets import ExpertSet
from ktconv.targets.packed.target import (
    BY_WEIGHTS,
    CalibrationRecord,
    ImportanceRecord,
    Options,
    Plan,
    make_plan,
    options_of_record,
)

EXPERTS = (4, 4, 4, 4, 2, 4, 4, 4, 4, 4, 4, 4)  # layers 10 and 11 have longer names
INNER = (128,) * 7 + (256,) + (128,) * 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("plan") / "model", EXPERTS, INNER)


def planned(model: Path, **options: Any) -> Plan:
    return make_plan(open_checkpoint(model), Options(**options))


def matrix_bytes(unit: LayerUnit) -> int:
    """Of the source, which has two bytes a weight."""
    return 2 * 3 * HIDDEN * INNER[unit.layer.index] * len(unit.experts)


@pytest.mark.parametrize(
    ("options", "shards"),
    [
        ({}, 13),
        ({"method": "int8", "numa": 2, "max_shard_size": 200_000}, 25),
        ({"save_backward": True}, 25),
        ({"exclude_experts": ExpertSet({1: (0,), 2: (3,), 11: (0, 1)})}, 13),
        ({"experts_only": True}, 12),
    ],
    ids=str,
)
def test_sizes_are_those_of_the_headers(options: dict[str, Any], shards: int, model: Path) -> None:
    plan = planned(model, **options)
    names = [name for unit in plan.units for name in unit.shard_names]
    assert names == [f"model-{n:05d}-of-{shards:05d}.safetensors" for n in range(1, shards + 1)]
    for unit in plan.units:
        found = unit.shards
        assert [shard.name for shard in found] == unit.shard_names
        assert unit.output_bytes == sum(shard.size for shard in found)
        assert unit.data_bytes == sum(shard.data_bytes for shard in found)
        tensors = list(unit.tensors())
        assert unit.data_bytes == sum(tensor.nbytes for tensor in tensors)
        assert {tensor.name for tensor in tensors} == {
            name for shard in found for name in shard.offsets
        }
        headers = [json.loads(shard.header[8:]) for shard in found]
        assert sum(len(header) - 1 for header in headers) == len(tensors)
        assert all(header["__metadata__"]["ktconv_numa"] for header in headers)
    assert plan.output_bytes == sum(unit.output_bytes for unit in plan.units)
    assert plan.total_size == sum(unit.data_bytes for unit in plan.units)
    assert [unit.key for unit in plan.layers] == [f"layer-{n:05d}" for n in range(12)]
    assert [unit.key for unit in plan.others] == ["other-00001"][: not options.get("experts_only")]
    times = 2 if options.get("save_backward") else 1
    assert [unit.source_bytes for unit in plan.layers] == [
        times * matrix_bytes(unit) for unit in plan.layers
    ]
    others = 0 if options.get("experts_only") else OTHER_BYTES
    assert sum(unit.source_bytes for unit in plan.others) == others
    assert plan.source_bytes == sum(unit.source_bytes for unit in plan.units)


def test_sizes_of_folders(model: Path) -> None:
    plan = planned(model, method="int8", layout="layers", numa=2)
    assert plan.others == [] and "experts only" in plan.skipped[0]
    for unit in plan.layers:
        files = unit.folder_files
        assert unit.folder == f"_layer_{unit.layer.index}" and unit.shard_names == []
        assert unit.output_bytes == unit.data_bytes == sum(size for _, size in files.values())
        assert {tensor.name for tensor in unit.tensors()} == files.keys()
        assert len({path for path, _ in files.values()}) == len(files) > 0
        assert all(path.startswith(f"{unit.folder}/") for path, _ in files.values())
    assert plan.output_bytes == plan.total_size


def test_experts_that_are_left_out(model: Path) -> None:
    plan = planned(model, exclude_experts=ExpertSet({1: (0, 2), 11: (3,)}))
    chosen = {unit.layer.index: list(unit.experts) for unit in plan.layers}
    assert chosen == {n: list(range(EXPERTS[n])) for n in range(12)} | {1: [1, 3], 11: [0, 1, 2]}
    assert [unit.omitted for unit in plan.layers] == [0, 2] + [0] * 9 + [1]
    assert plan.skipped == ["3 experts of 2 layers: --exclude-experts"]
    assert "for ktconv's own runtime" in plan.notes[-1]
    with pytest.raises(UsageError, match="all 2 of the experts of layer 4"):
        planned(model, exclude_experts=ExpertSet({4: (0, 1)}))


def test_the_units_of_some_layers(model: Path) -> None:
    plan = planned(model)
    assert plan.layer_units(None) == plan.layers
    assert [unit.key for unit in plan.layer_units([11, 0])] == ["layer-00011", "layer-00000"]
    with pytest.raises(UsageError, match=r"names layer 12, but the last MoE layer is 11") as caught:
        plan.layer_units([3, 12])
    assert "0-11" in str(caught.value.hint)
    with pytest.raises(UsageError, match="names no MoE layer"):
        plan.layer_units([])


def test_every_layer_must_fit(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", (2, 2, 2), (256, 128, 256))
    with pytest.raises(UsageError, match="cannot split layer 1 into --numa 2") as caught:
        planned(model, numa=2)
    assert str(caught.value.hint).endswith(": 1")


def test_layers_for_multi_token_prediction(tmp_path: Path) -> None:
    model = uneven(tmp_path / "model")
    plan = planned(model)
    assert [layer.is_mtp for layer in plan.moe_layers] == [False, False, True]
    assert plan.skipped == []
    without = planned(model, mtp=False)
    assert [unit.key for unit in without.layers] == ["layer-00000", "layer-00001"]
    assert without.skipped == ["MTP layer 2: --no-mtp"]
    assert without.total_size < plan.total_size
    only = write_model(tmp_path / "only", (4,), (128,), mtp=1)
    with pytest.raises(UsageError, match="leaves no MoE layer"):
        planned(only, mtp=False)


def test_the_record_of_a_conversion(model: Path) -> None:
    """By which a later run knows whether it continues this one."""
    plan = planned(model, exclude_experts=ExpertSet({2: (1,)}))
    record = run_record(plan)
    assert record.keys() == {"schema", "ktconv_version", "options", "source", "geometry"}
    assert record["options"] == plan.target.options.as_dict()
    assert record["source"].keys() == {"files"}
    assert {"config.json", "model.safetensors"} <= record["source"]["files"].keys()
    geometry = record["geometry"]
    assert geometry["model_type"] == plan.checkpoint.config.model_type
    assert geometry["activation"] == plan.moe_layers[0].activation.as_record()
    assert list(geometry["layers"]) == [str(n) for n in range(12)]
    seventh = {
        "experts": 4, "hidden_size": HIDDEN, "intermediate_size": 256, "mtp": False,
        "encoding": plan.moe_layers[7].encoding, "source": "model.layers.7.mlp.experts",
    }  # fmt: skip
    assert geometry["layers"]["7"] == seventh
    assert geometry["layers"]["2"]["expert_ids"] == "0,2-3"
    named: Any = SimpleNamespace(mapped=None, tower="vision", pruning=None)
    assert chosen_record(named) == {"tower": "vision"}


RECORDS: tuple[dict[str, Any], ...] = (
    {},
    {"method": "int8", "numa": 3, "layout": "layers", "scale": "amax"},
    {"compat": True, "mtp": False, "experts_only": True, "max_shard_size": 7},
    {"exclude_experts": ExpertSet({1: (0, 2)}), "requantize": True},
    {"allow_activation_mismatch": True, "fold": "up-down"},
    {"importance": BY_WEIGHTS, "save_backward": True},
    {"importance": ImportanceRecord("name", "0" * 64, "ktconv")},
    {"calibrate": CalibrationRecord("name", "text", "a", "b", "c")},
)


@pytest.mark.parametrize("words", RECORDS, ids=str)
def test_recorded_options_are_read_back(words: dict[str, Any]) -> None:
    options = Options(**words)
    record = json.loads(json.dumps(options.as_dict()))
    assert options_of_record(record) == options
    assert options_of_record(record | {"of a later version": 1}) == options
    optional = {"exclude_experts", "requantize", "allow_activation_mismatch", "importance", "fold",
                "calibrate", "save_backward"}  # fmt: skip
    assert record.keys() & optional == words.keys() & optional


@pytest.mark.parametrize(
    "changes",
    [
        {"numa": "1"},
        {"numa": True},
        {"mtp": 1},
        {"scale": "nearest"},
        {"compat": True},
        {"fold": "down-up"},
        {"fold": "up-down", "compat": True, "scale": "amax"},
        {"fold": "up-down", "save_backward": True},
        {"importance": {"name": "a"}},
        {"importance": {"name": "a", "sha256": "b", "kind": "weights"}},
        {"importance": {"name": "a", "sha256": 1, "kind": "ktconv"}},
        {"importance": BY_WEIGHTS.as_dict(), "scale": "amax"},
        {"calibrate": {"name": "a"}},
        {"calibrate": dict.fromkeys(("name", "kind", "text", "text_sha256", "run"), "a"),
         "scale": "amax"},
        {"calibrate": dict.fromkeys(("name", "kind", "text", "text_sha256", "run"), "a"),
         "importance": BY_WEIGHTS.as_dict()},
    ],
    ids=str,
)  # fmt: skip
def test_options_that_no_conversion_records(changes: dict[str, Any]) -> None:
    record = Options().as_dict()
    assert options_of_record(record) == Options()
    assert options_of_record(record | changes) is None


def test_recorded_options_from_before_there_was_a_choice() -> None:
    record = Options().as_dict()
    del record["scale"]
    assert options_of_record(record) == Options(scale="amax")
    with pytest.raises(CheckpointError):
        options_of_record(record | {"exclude_experts": {"x": 1}})
