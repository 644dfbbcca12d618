"""Names of non-expert tensors: the reference's where it is sound, whole components only."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
from helpers.paths import EXAMPLE

from ktconv.errors import CheckpointError
from ktconv.source import TensorRef, open_checkpoint
from ktconv.targets import renaming
from ktconv.targets.packed.target import KTransformersTarget, Options, make_plan
from ktconv.targets.renaming import output_name, rename_tensors


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lm_head.weight", "lm_head.weight"),
        ("model.embed_tokens.weight", "embed_tokens.weight"),
        ("model.norm.weight", "norm.weight"),
        ("model.layers.0.self_attn.q_proj.weight", "blk.0.self_attn.q_proj.weight"),
        ("model.layers.61.mlp.gate.weight", "blk.61.mlp.gate.weight"),
        ("model.layers.3.mlp.shared_experts.up.w", "blk.3.mlp.shared_experts.up.w"),
        ("language_model.model.layers.3.mlp.gate.weight", "blk.3.mlp.gate.weight"),
        ("model.language_model.layers.3.mlp.gate.weight", "blk.3.mlp.gate.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.language_model.norm.weight", "norm.weight"),
        # Substrings that the reference would have cut or replaced:
        ("model.visual.blocks.0.norm1.weight", "visual.blocks.0.norm1.weight"),
        ("model.vision_model.encoder.layers.0.w", "vision_model.encoder.layers.0.w"),
        ("model.vision_tower.model.layers.5.w", "vision_tower.model.layers.5.w"),
        ("model.layers.0.sub_model.layers.1.w", "blk.0.sub_model.layers.1.w"),
        ("mtp.layers.0.mlp.gate.weight", "mtp.layers.0.mlp.gate.weight"),
        ("mtp.fc.weight", "mtp.fc.weight"),
        ("remodel.layers.0.w", "remodel.layers.0.w"),
        ("model.layers.x.w", "layers.x.w"),
        ("modelx", "modelx"),
    ],
)  # fmt: skip
def test_output_name(name: str, expected: str) -> None:
    assert output_name(name) == expected


def tensor(name: str) -> TensorRef:
    return TensorRef(name, Path("model.safetensors"), "BF16", (1,), 8, 2)


def test_order_is_kept() -> None:
    tensors = [tensor("model.norm.weight"), tensor("lm_head.weight"), tensor("a")]
    assert rename_tensors(tensors) == [
        (tensors[0], "norm.weight"),
        (tensors[1], "lm_head.weight"),
        (tensors[2], "a"),
    ]


@pytest.mark.parametrize(
    ("first", "second", "name"),
    [
        ("model.language_model.norm.weight", "model.norm.weight", "norm.weight"),
        ("model.layers.0.w", "blk.0.w", "blk.0.w"),
        ("norm.weight", "model.norm.weight", "norm.weight"),
    ],
)
def test_collisions_are_refused(first: str, second: str, name: str) -> None:
    with pytest.raises(CheckpointError, match="would both become") as caught:
        rename_tensors([tensor(first), tensor(second)])
    assert all(word in str(caught.value) for word in (first, second, name))
    assert "--experts-only" in str(caught.value.hint)


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.ffn_gate_exps.0.numa.0.weight",  # would pass for an expert
        "model.layers.7.ffn_down_exps.3.numa.1.scale",
        "model.__metadata__",
        "model.",
    ],
)
def test_names_with_a_meaning_of_their_own_are_refused(name: str) -> None:
    tensor = TensorRef(name, Path("x"), "F32", (1,), 0, 4)
    with pytest.raises(CheckpointError, match="a name with a meaning of its own") as caught:
        rename_tensors([tensor])
    assert name in str(caught.value)
    assert "--experts-only" in str(caught.value.hint)


def test_planning_names_and_places_each_tensor_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a million tensors, doing it twice took half of the time before a conversion began."""
    checkpoint = open_checkpoint(EXAMPLE)
    named = Mock(wraps=renaming.output_name)
    placed = Mock(wraps=KTransformersTarget(Options()).copied)
    monkeypatch.setattr(renaming, "output_name", named)
    monkeypatch.setattr(KTransformersTarget, "copied", placed)
    make_plan(checkpoint, Options())
    once = [tensor.name for tensor in checkpoint.other_tensors]
    assert [call.args[0] for call in named.call_args_list] == once
    assert [call.args[0].name for call in placed.call_args_list] == once
