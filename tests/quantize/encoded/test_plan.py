"""What a plan of encoded experts says before anything is written."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from plan.models import HIDDEN, OTHER_BYTES, write_model

from ktconv.conversion.plan import plan_checkpoint
from ktconv.errors import CheckpointError
from ktconv.source import open_checkpoint
from ktconv.targets.consumers import refuse_biases
from ktconv.targets.encoded.readers import TRANSFORMERS
from ktconv.targets.encoded.scheme import ROWS
from ktconv.targets.encoded.target import EncodedTarget, Options, Plan

EXPERTS_OF_0 = "model.layers.0.mlp.experts"  # in the source
LAYERS = 11  # the last one has a longer name
# Bytes of an element, by its dtype in headers.
WIDTH = {
    "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "BF16": 2, "F16": 2, "F32": 4, "I32": 4, "I64": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plan") / "model"
    return write_model(directory, (2,) * LAYERS, (256,) * LAYERS)


def planned(model: Path, scheme: str, group: int, **options: Any) -> Plan:
    checkpoint = open_checkpoint(model)
    chosen = Options(scheme=scheme, group_size=group, **options)
    return plan_checkpoint(checkpoint, EncodedTarget(chosen, checkpoint))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_sizes_are_those_of_the_headers(row: Any, model: Path) -> None:
    for group in row.groups:
        plan = planned(model, row.name, group, max_shard_size=300_000)
        total = sum(len(unit.shard_names) for unit in plan.units)
        names = [name for unit in plan.units for name in unit.shard_names]
        assert names == [f"model-{n:05d}-of-{total:05d}.safetensors" for n in range(1, total + 1)]
        for unit in plan.units:
            found = unit.shards
            assert unit.output_bytes == sum(shard.size for shard in found)
            assert unit.data_bytes == sum(tensor.nbytes for tensor in unit.tensors())
            for shard in found:
                header = json.loads(shard.header[8:])
                del header["__metadata__"]
                ends = [entry["data_offsets"] for entry in header.values()]
                assert max(end for _, end in ends) == shard.data_bytes
                for entry in header.values():
                    size = WIDTH[entry["dtype"]]
                    for dimension in entry["shape"]:
                        size *= dimension
                    begin, end = entry["data_offsets"]
                    assert end - begin == size
        weights = 3 * HIDDEN * 256 * 2
        assert [unit.source_bytes for unit in plan.layers] == [2 * weights] * LAYERS
        assert sum(unit.source_bytes for unit in plan.others) == OTHER_BYTES
        codes = weights * row.bits // 8
        assert all(codes <= unit.data_bytes < codes * 1.4 for unit in plan.layers)
        assert plan.target.has_index and "config.json" in plan.made_files
        assert row.name in plan.target.description
        kept = plan.target.module(plan.moe_layers[0], 1, "up") == f"{EXPERTS_OF_0}.1.up_proj"
        read = TRANSFORMERS.failure(row.name) is None
    assert plan.target.read_by_transformers(plan.moe_layers) == (read and kept)


def test_the_record_has_what_the_method_has() -> None:
    usual = {"method": "rtn", "mtp": True, "max_shard_size": 5_000_000_000}
    assert Options(scheme="awq", group_size=32).as_dict() == {
        "format": "awq", "scheme": "awq", "group_size": 32, **usual,
    }  # fmt: skip
    rare = Options(scheme="fp8", group_size=128, scale="search", experts_only=True, requantize=True)
    assert rare.as_dict() == {
        "format": "fp8-block", "scheme": "fp8", "group_size": 128, "scale": "search",
        "experts_only": True, "requantize": True, **usual,
    }  # fmt: skip


def test_facts_name_the_method_as_the_command_does(model: Path) -> None:
    cpu, gpu = planned(model, "awq", 32).target, planned(model, "W4A16", 64).target
    assert cpu.facts() == {"method": "awq", "group_size": 32}
    assert gpu.facts() == {"method": "rtn", "scheme": "W4A16", "group_size": 64}


def test_biases_are_named() -> None:
    """The first bias of the first layer that has any."""
    tensor = SimpleNamespace(name="model.layers.1.bias")
    biased = SimpleNamespace(bias=SimpleNamespace(tensor=tensor))
    plain = SimpleNamespace(bias=None)
    none: Any = SimpleNamespace(biased=False, experts=[{"gate": plain}])
    some: Any = SimpleNamespace(biased=True, experts=[{"gate": plain}, {"gate": biased}])
    refuse_biases([none, none], "why", "hint")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.bias: .* biases; why") as caught:
        refuse_biases([none, some], "why", "hint")
    assert caught.value.hint == "hint"
