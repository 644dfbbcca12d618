"""What a source lacks beside its experts is a failure by name; all levels run nevertheless."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.cli import ktconv
from helpers.convert import convert
from helpers.families import (
    Raw,
    Tensor,
    bf16,
    numbered,
    random_weights,
    simple_config,
    write_checkpoint,
)

from ktconv.errors import CheckpointError
from ktconv.source.reading.reader import SourceReader
from ktconv.verify import Request, Result, prepare, verify

# The AMX level runs too, where it is emulated.
pytestmark = [pytest.mark.usefixtures("tiles", "no_transformers"), pytest.mark.slow]
HIDDEN, EXPERTS = 128, 4
BLOCK = "model.layers.1.mlp"
Changes = Mapping[str, Tensor | None]  # None: without that tensor


def ones(*shape: int) -> Raw:
    return bf16(np.ones(shape, np.float32))


def tensors_of(layer: int) -> dict[str, Tensor]:
    prefix = f"model.layers.{layer}"
    shared = f"{prefix}.mlp.shared_experts"
    rng = np.random.default_rng(layer)
    return numbered(f"{prefix}.mlp.experts", random_weights(seed=layer)) | {
        f"{prefix}.mlp.gate.weight": bf16(rng.standard_normal((EXPERTS, HIDDEN))),
        f"{prefix}.mlp.gate.e_score_correction_bias": rng.random(EXPERTS, np.float32),
        f"{prefix}.post_attention_layernorm.weight": ones(HIDDEN),
        f"{shared}.gate_proj.weight": ones(64, HIDDEN),
        f"{shared}.up_proj.weight": ones(64, HIDDEN),
        f"{shared}.down_proj.weight": ones(HIDDEN, 64),
    }


def write(directory: Path, changes: Changes, **config: Any) -> Path:
    """Two layers of the DeepSeek-V3 family, and what is changed in them."""
    tensors: dict[str, Tensor | None] = {**tensors_of(0), **tensors_of(1), **changes}
    settings: dict[str, Any] = {
        "model_type": "deepseek_v3",
        "num_experts": None,
        "n_routed_experts": EXPERTS,
        "num_hidden_layers": 2,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
    }
    there = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return write_checkpoint(directory, there, simple_config(**(settings | config)))


def verified(tmp_path: Path, changes: Changes, **config: Any) -> Result:
    model = write(tmp_path / "model", changes, **config)
    convert(model, tmp_path / "out", method="int8")
    return verify(Request(tmp_path / "out", str(model), tokens=6, threads=1))


def rows_of(result: Result) -> list[Mapping[str, Any]]:
    """Both layers, with kernels that are right."""
    assert result.facts["weights"]["passed"] and result.facts["structure"]["passed"]
    rows: list[Mapping[str, Any]] = result.facts["layers"]["layers"]
    assert [row["layer"] for row in rows] == [0, 1]
    assert all(0 < error < 0.005 for row in rows for error in row["kernel_error"].values())
    return rows


FAULTS: list[tuple[str, Tensor | None, str, str]] = [
    (f"{BLOCK}.gate.e_score_correction_bias", None, "router", "has no correction bias: none of"),
    (f"{BLOCK}.gate.weight", ones(EXPERTS * HIDDEN), "router", "has shape [512], not [4, 128]."),
    (
        f"{BLOCK}.shared_experts.up_proj.weight",
        None,
        "shared expert",
        "the shared expert of layer 1 has no model.layers.1.mlp.shared_experts.up_proj.weight.",
    ),
]


@pytest.mark.parametrize(("name", "tensor", "check", "says"), FAULTS)
def test_a_fault_of_the_source(
    name: str, tensor: Tensor | None, check: str, says: str, tmp_path: Path
) -> None:
    result = verified(tmp_path, {name: tensor})
    (failure,) = result.failures
    assert (failure.level, failure.check, failure.layer) == ("layers", check, 1)
    assert says in failure.message
    sound, other = rows_of(result)
    assert sound["routing"] == "router" and sound["quantization_error_with_shared"] is not None
    assert other["routing"] == ("random" if check == "router" else "router")
    assert (other["quantization_error_with_shared"] is None) == (check == "shared expert")


REFUSED: list[tuple[str, Tensor, str]] = [
    (
        f"{BLOCK}.gate.e_score_correction_bias",
        np.ones(EXPERTS + 1, np.float32),
        "[5], expected [4] or [1, 4]",
    ),
    (f"{BLOCK}.gate.weight", ones(EXPERTS, 64), "[4, 64], expected [4, 128]"),
    ("model.layers.1.post_attention_layernorm.weight", ones(64), "[64], expected [128]"),
    (
        f"{BLOCK}.shared_experts.down_proj.weight",
        ones(64, HIDDEN),
        "[64, 128], expected [128, 64]",
    ),
    (
        f"{BLOCK}.shared_expert_gate.weight",
        ones(2, HIDDEN),
        "[2, 128], expected [1, 128] or [128]",
    ),
]


@pytest.mark.parametrize(("name", "tensor", "says"), REFUSED)
def test_a_fault_that_headers_show(name: str, tensor: Tensor, says: str, tmp_path: Path) -> None:
    """Of a source that has become another one since: nothing is read."""
    convert(write(tmp_path / "model", {}), tmp_path / "out", method="int8")
    changed = write(tmp_path / "changed", {name: tensor})
    with pytest.raises(CheckpointError, match=re.escape(f"{name} has shape {says}")):
        verify(Request(tmp_path / "out", str(changed), threads=1))


def test_groups_that_cannot_be_are_refused_with_the_source(tmp_path: Path) -> None:
    convert(write(tmp_path / "model", {}), tmp_path / "out", method="int8")
    changed = write(tmp_path / "changed", {}, n_group=3)
    with pytest.raises(CheckpointError, match="4 experts cannot be routed to by 1 of 3 groups"):
        verify(Request(tmp_path / "out", str(changed), threads=1))


def test_the_command_fails_and_shows_every_level(tmp_path: Path) -> None:
    """It once read everything for 9 seconds, and ended with one sentence and exit code 2."""
    name = f"{BLOCK}.gate.e_score_correction_bias"
    model = write(tmp_path / "model", {name: None})
    convert(model, tmp_path / "out", method="int8")
    words = ("verify", tmp_path / "out", "--source", model, "--tokens", 2, "--threads", 1)
    done = ktconv(*words)
    assert done.exit_code == 1 and "layers, router: the router" in done.stdout
    assert "weights    ok" in done.stdout and "layers     FAILED: 2 layers" in done.stdout
    facts = json.loads(ktconv(*words, "--json").stdout)
    assert facts["weights"]["passed"] and not facts["layers"]["passed"]
    assert facts["failures"][0]["tensor"] == f"{BLOCK}.gate.weight"


def test_a_sound_source(tmp_path: Path) -> None:
    result = verified(tmp_path, {})
    assert result.passed, result.failures
    assert {row["routing"] for row in rows_of(result)} == {"router"}


def test_a_shared_expert_of_another_spelling(tmp_path: Path) -> None:
    """Hy4 shares two of three names with others; what is missing is missing under all of them."""
    shared = f"{BLOCK}.shared_experts"
    changes: Changes = {f"{shared}.gate_proj.weight": None}
    (failure,) = verified(tmp_path / "missing", changes).failures
    assert f"has no {shared}.gate_proj.weight." in failure.message
    changes = {**changes, f"{shared}.linear_gate.weight": ones(64, HIDDEN)}
    result = verified(tmp_path / "spelt", changes)
    assert result.passed, result.failures
    assert all(row["quantization_error_with_shared"] is not None for row in rows_of(result))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "zaya"}, "the router of zaya is not supported"),
        ({"model_type": "phimoe", "num_experts_per_tok": 3}, "chooses 2 experts per token, not 3"),
        (
            {"model_type": "new", "scoring_func": "sqrt"},
            "has the unknown router score function 'sqrt'",
        ),
    ],
)
def test_a_router_that_is_not_known(config: dict[str, Any], says: str, tmp_path: Path) -> None:
    """A note: nothing says that the checkpoint is wrong, and kernels do not depend on it."""
    result = verified(tmp_path, {}, **config)
    assert result.passed, result.failures
    assert {row["routing"] for row in rows_of(result)} == {"random"}
    (note,) = [note for note in result.facts["notes"] if says in note]
    assert note.startswith("level layers, layers 0-1: experts are chosen at random, because")


def test_a_router_that_is_inferred(tmp_path: Path) -> None:
    """And the report says from what, for people and in JSON."""
    result = verified(tmp_path, {}, model_type="of_tomorrow")
    assert result.passed, result.failures
    assert {row["routing"] for row in rows_of(result)} == {"router"}
    (note,) = [note for note in result.facts["notes"] if "inferred" in note]
    assert note == (
        "level layers, layers 0-1: the router of of_tomorrow is not known, and inferred from a "
        "correction bias: sigmoid scores with a correction bias"
    )


def test_a_softmax_that_is_inferred(tmp_path: Path) -> None:
    bias = "gate.e_score_correction_bias"
    without: Changes = {f"{BLOCK}.{bias}": None, f"model.layers.0.mlp.{bias}": None}
    result = verified(tmp_path, without, model_type="of_tomorrow", norm_topk_prob=True)
    assert result.passed, result.failures
    assert {row["routing"] for row in rows_of(result)} == {"router"}
    (note,) = [note for note in result.facts["notes"] if "inferred" in note]
    assert "norm_topk_prob True: softmax scores without a correction bias" in note


def test_norms_that_are_stored_less_one(tmp_path: Path) -> None:
    """Their zeros must not make random hidden states zeros, which show nothing."""
    zeros = {
        f"model.layers.{layer}.post_attention_layernorm.weight": bf16(np.zeros(HIDDEN, np.float32))
        for layer in (0, 1)
    }
    result = verified(tmp_path, zeros, model_type="qwen3_next")
    assert result.passed, result.failures
    assert [row["experts_run"] for row in rows_of(result)] != [0, 0]


def test_a_bias_that_the_family_has_not(tmp_path: Path) -> None:
    result = verified(tmp_path, {}, model_type="qwen3_moe")
    assert result.passed, result.failures
    assert {row["routing"] for row in rows_of(result)} == {"router"}
    assert any("correction bias of routers is not used" in note for note in result.facts["notes"])


def test_an_encoding_that_is_not_known(tmp_path: Path) -> None:
    """Which is no fault of the checkpoint."""
    codes = Raw("I8", (EXPERTS, HIDDEN), bytes(EXPERTS * HIDDEN))
    result = verified(tmp_path, {f"{BLOCK}.gate.weight": codes})
    assert result.passed, result.failures
    assert [row["routing"] for row in rows_of(result)] == ["router", "random"]
    assert any(f"{BLOCK}.gate.weight is I8" in note for note in result.facts["notes"])


@pytest.mark.parametrize(
    ("changes", "config", "says"),
    [
        ({f"{BLOCK}.gate.weight": None}, {}, "layer 1 has no router: none of"),
        ({}, {"hidden_act": "cubic"}, "names the activation 'cubic'"),
    ],
)
def test_what_is_refused_before_anything_is_read(
    changes: Changes,
    config: dict[str, Any],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = write(tmp_path / "model", changes, **config)
    convert(model, tmp_path / "out", method="int8", allow_activation_mismatch=True)

    def read(*_: object) -> None:
        raise AssertionError("a tensor is read")

    monkeypatch.setattr(SourceReader, "read", read)
    with pytest.raises(CheckpointError, match=says) as caught:
        prepare(Request(tmp_path / "out", str(model), threads=1))
    assert caught.value.hint is not None
    assert prepare(Request(tmp_path / "out", str(model), "weights", threads=1))
