"""Names of encoded experts: the model's own where the reader knows them, else the reader's."""

from __future__ import annotations

import pytest

from ktconv.families.family import NUMBERED_W, USUAL, Matrices
from ktconv.source import MoELayer, Projection
from ktconv.source.gguf.hub_names import ExpertNames
from ktconv.targets.encoded import naming
from ktconv.targets.encoded.naming import Naming


def layer(prefix: str, matrices: Matrices = USUAL) -> MoELayer:
    """Layer 3 of a model that calls its experts so."""
    return MoELayer(
        3, "", False, 0, 0, "bf16", [], hub_names=ExpertNames(f"{prefix}.experts", matrices)
    )


def names(of: Naming, found: MoELayer) -> list[str]:
    order: tuple[Projection, ...] = ("gate", "up", "down")
    return [of.module(found, 5, proj) for proj in order]


# What readers call the experts of other models.
OTHERWISE = {
    "MLP": ["model.layers.3.mlp.experts.5.gate_proj", "model.layers.3.mlp.experts.5.up_proj",
            "model.layers.3.mlp.experts.5.down_proj"],
    "THREE": ["model.layers.3.mlp.experts.5.gate_proj", "model.layers.3.mlp.experts.5.up_proj",
              "model.layers.3.mlp.experts.5.down_proj"],
    "V4": [f"layers.3.ffn.experts.5.w{n}" for n in (1, 3, 2)],
    "M3": [f"model.layers.3.block_sparse_moe.experts.5.w{n}" for n in (1, 3, 2)],
    "BLK": ["blk.3.ffn_gate_exps.5", "blk.3.ffn_up_exps.5", "blk.3.ffn_down_exps.5"],
}  # fmt: skip
KEPT = {
    "MLP": [(f"{model}.layers.3.mlp", USUAL)
            for model in ("model", "model.language_model", "language_model.model")],
    "THREE": [
        *((f"{model}layers.3.mlp", USUAL)
          for model in ("", "model.", "model.language_model.", "language_model.model.")),
        ("layers.3", NUMBERED_W), ("model.layers.3.block_sparse_moe", NUMBERED_W),
    ],
    "V4": [("layers.3.ffn", NUMBERED_W), ("model.layers.3.ffn", NUMBERED_W)],
    "M3": [(f"{model}layers.3.block_sparse_moe", NUMBERED_W)
           for model in ("", "model.", "language_model.", "language_model.model.")],
    "BLK": [],
}  # fmt: skip


@pytest.mark.parametrize("of", OTHERWISE)
def test_own_names_stay_where_the_reader_knows_them(of: str) -> None:
    rules: Naming = getattr(naming, of)
    for prefix, matrices in KEPT[of]:
        found = layer(prefix, matrices)
        assert rules.keeps(found), prefix
        assert names(rules, found) == names(naming.OWN, found), prefix
    other = NUMBERED_W if of == "MLP" else USUAL
    for found in (
        layer("model.layers.3.feed_forward"), layer("model.layers.4.mlp"),
        layer("model.layers.4.block_sparse_moe", NUMBERED_W), layer("other.layers.3.mlp", other),
        layer("model.layers.3.ffn"), layer("model.layers.3.mlp.more"),
    ):  # fmt: skip
        assert not rules.keeps(found), found.hub_names
        assert names(rules, found) == OTHERWISE[of]


def test_models_keep_their_own_names_where_no_reader_has_some() -> None:
    found = layer("any.where", NUMBERED_W)
    assert naming.OWN.keeps(found)
    assert names(naming.OWN, found) == [f"any.where.experts.5.w{n}" for n in (1, 3, 2)]
