"""Where the bytes of a shard lie: headers, alignment, sizes, grouping."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.convert import convert, read_header, read_model
from helpers.families import bf16, numbered, random_weights, simple_config, write_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from safetensors import deserialize

from ktconv.errors import UsageError
from ktconv.targets.packed.target import KTransformersTarget, Options
from ktconv.writer.shards import ALIGNMENT, Tensor, group, plan_shard

pytestmark = pytest.mark.slow

ITEMS = {"F64": 8, "F32": 4, "BF16": 2, "I8": 1, "F8_E4M3": 1}
METADATA = KTransformersTarget(Options()).metadata()


@st.composite
def tensors(draw: Any) -> list[Tensor]:
    names = draw(st.lists(st.text(max_size=40), unique=True, max_size=12))
    found = []
    for name in names:
        dtype = draw(st.sampled_from(sorted(ITEMS)))
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
        found.append(Tensor(name, dtype, shape, int(np.prod(shape, dtype=int)) * ITEMS[dtype]))
    return [tensor for tensor in found if tensor.name != "__metadata__"]


@given(tensors())
def test_plan_shard(content: list[Tensor]) -> None:
    """The planned header and offsets make a file that the safetensors library reads."""
    shard = plan_shard("name", content, METADATA)
    file = bytearray(shard.size)
    file[: len(shard.header)] = shard.header
    data = {}
    for number, tensor in enumerate(content):
        start = shard.offsets[tensor.name]
        assert start % ITEMS[tensor.dtype] == 0
        if tensor.nbytes % ALIGNMENT == 0:
            assert start % ALIGNMENT == 0
        data[tensor.name] = bytes([number + 1]) * tensor.nbytes
        file[start : start + tensor.nbytes] = data[tensor.name]
    assert len(shard.header) % ALIGNMENT == 0
    assert shard.size == len(shard.header) + shard.data_bytes
    assert shard.data_bytes == sum(tensor.nbytes for tensor in content)
    read = dict(deserialize(bytes(file)))
    assert read.keys() == data.keys()
    for tensor in content:
        view = read[tensor.name]
        assert (view["dtype"], tuple(view["shape"])) == (tensor.dtype, tensor.shape)
        assert bytes(view["data"]) == data[tensor.name]
    assert json.loads(shard.header[8:])["__metadata__"] == METADATA


@given(tensors(), st.integers(1, 20_000))
def test_group(content: list[Tensor], limit: int) -> None:
    """Everything once, in order; a file over the limit holds one tensor only."""
    groups = group(content, limit)
    assert [tensor for members in groups for tensor in members] == content
    for members in groups:
        assert members
        assert len(members) == 1 or plan_shard("", members, METADATA).size <= limit


def test_group_fills_shards() -> None:
    """Close to the limit, so that not more files come than needed."""
    content = [Tensor(f"blk.0.name.{number}", "I8", (10_000,), 10_000) for number in range(95)]
    groups = group(content, 200_000)
    assert len(groups) == 5
    assert max(plan_shard("", members, METADATA).size for members in groups) > 190_000


def test_group_counts_every_dimension() -> None:
    content = [Tensor(f"name.{number}", "I8", (1,) * 120, 1) for number in range(100)]
    groups = group(content, 20_000)
    assert max(plan_shard("", members, METADATA).size for members in groups) <= 20_000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    stored = numbered("model.layers.0.mlp.experts", random_weights(128, 128, 2))
    stored["model.embed_tokens.weight"] = bf16(np.ones((100, 128)))
    stored["model.norm.weight"] = bf16(np.ones(128))
    directory = tmp_path_factory.mktemp("shards") / "model"
    return write_checkpoint(directory, stored, simple_config(num_experts=2))


def test_max_shard_size_too_small(model: Path, tmp_path: Path) -> None:
    """Refused before anything is written, with the smallest size that works."""
    with pytest.raises(UsageError, match="--max-shard-size") as caught:
        convert(model, tmp_path / "out", max_shard_size=20_000)
    assert "embed_tokens.weight" in str(caught.value)
    assert not (tmp_path / "out").exists()
    size = int(str(caught.value.hint).rsplit(" ", 1)[1])
    convert(model, tmp_path / "out", max_shard_size=size)
    sizes = [shard.stat().st_size for shard in (tmp_path / "out").glob("*.safetensors")]
    assert max(sizes) == size


def test_several_shards_per_layer(model: Path, tmp_path: Path) -> None:
    """A layer over the limit is cut; its shards are still one unit."""
    report = convert(model, tmp_path / "out", max_shard_size=28_000)
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) == 4
    assert all(shard.stat().st_size <= 28_000 for shard in shards)
    assert list(report.converted) == ["layer-00000", "other-00001"]
    whole = tmp_path / "whole"
    convert(model, whole)
    assert read_model(whole) == read_model(tmp_path / "out")


def test_parts_lie_together(tmp_path: Path) -> None:
    """A NUMA node reads one stretch of the file, scales beside their weights."""
    stored = numbered("model.layers.0.mlp.experts", random_weights(128, 256, 3))
    config = simple_config(num_experts=3, moe_intermediate_size=256)
    write_checkpoint(tmp_path / "model", stored, config)
    convert(tmp_path / "model", tmp_path / "out", numa=2)
    _, header = read_header(tmp_path / "out" / "model-00001-of-00001.safetensors")
    del header["__metadata__"]
    ordered = sorted(header, key=lambda name: header[name]["data_offsets"])
    parts = [name.split(".")[5] for name in ordered]
    assert parts == sorted(parts)
    pairs = list(zip(ordered[::2], ordered[1::2], strict=True))
    assert all(a.rsplit(".", 1)[0] == b.rsplit(".", 1)[0] for a, b in pairs)
