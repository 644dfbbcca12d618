"""Level layers reads what a family's router has beside its gate, and uses it.

Gates are 0, so that all logits are, and the other tensors alone decide.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from helpers import gguf_files
from helpers.families import Raw, Tensor, numbered, random_weights, simple_config, write_checkpoint
from numpy.typing import NDArray

from ktconv.errors import CheckpointError
from ktconv.formats.decode import bf16_to_f32
from ktconv.source import Checkpoint, open_checkpoint
from ktconv.system.text import silent
from ktconv.verify import Request
from ktconv.verify.findings import Findings
from ktconv.verify.hidden_states import HiddenStates, Inputs

HIDDEN, EXPERTS, TOKENS = 64, 4, 5
LAYER = "model.layers.0"
GATE = np.zeros((EXPERTS, HIDDEN), np.float32)


def floats(*values: float) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def whole(rows: object) -> Raw:
    array = np.array(rows, "<i8")
    return Raw("I64", array.shape, array.tobytes())


def opened(directory: Path, kind: str, tensors: Mapping[str, Tensor], said: Any) -> Checkpoint:
    experts = numbered(
        f"{LAYER}.mlp.experts", random_weights(hidden=HIDDEN, inner=64, experts=EXPERTS)
    )
    config = simple_config(
        model_type=kind, hidden_size=HIDDEN, num_hidden_layers=1, num_experts_per_tok=2,
        num_experts=EXPERTS, moe_intermediate_size=64, **said,
    )  # fmt: skip
    there = {f"{LAYER}.{name}": tensor for name, tensor in tensors.items()}
    return open_checkpoint(write_checkpoint(directory, {**experts, **there}, config))


def inputs_of(checkpoint: Checkpoint, findings: Findings) -> Inputs:
    (layer,) = checkpoint.layers
    verifier = SimpleNamespace(
        output=SimpleNamespace(source=checkpoint, source_layers={0: layer}),
        budget=SimpleNamespace(why_not_captured="it is not asked for"),
        request=Request(checkpoint.path, tokens=TOKENS),
        findings=findings,
    )
    states = HiddenStates(cast(Any, verifier), silent)
    return states.of(layer, range(len(layer.experts)))


# model_type, settings, tensors of the block, and the experts and weights of every token
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Tensor], list[int], list[float]]] = {
    "table": (
        "deepseek_v4",
        {"num_hash_layers": 1, "routed_scaling_factor": 3.0},
        {"mlp.gate.weight": GATE, "mlp.gate.tid2eid": whole([[3, 1]] * 9)},
        [3, 1],
        [1.5, 1.5],
    ),
    "no table": (
        "deepseek_v4",
        {"num_hash_layers": 0},
        {"mlp.gate.weight": GATE, "mlp.gate.bias": floats(0, 2, 1, 0)},
        [1, 2],
        [0.75, 0.75],
    ),
    "input scale": (
        "gemma4",
        {"top_k_experts": 2},
        {
            "mlp.gate.weight": GATE,
            "mlp.router.scale": np.ones(HIDDEN, np.float32),
            "mlp.router.per_expert_scale": floats(2, 4, 6, 8),
        },
        [0, 1],
        [1.0, 2.0],
    ),
    "experts that return their input": (
        "longcat_flash",
        {"zero_expert_num": 4, "routed_scaling_factor": 8.0},
        {
            "mlp.gate.weight": np.zeros((8, HIDDEN), np.float32),
            "mlp.gate.e_score_correction_bias": floats(0, 0, 1, 0, 0, 2, 0, 0),
        },
        [-1, 2],
        [1.0, 1.0],
    ),
    "two towers": (
        "ernie4_5_vl_moe",
        {},
        {
            "mlp.gate.weight": np.zeros((HIDDEN, EXPERTS), np.float32),
            "mlp.moe_statics.e_score_correction_bias": floats(0, 1, 0, 2, 9, 0, 9, 0).reshape(2, 4),
        },
        [3, 1],
        [0.5, 0.5],
    ),
    "sinks": (
        "inkling",
        {"n_shared_experts": 2},
        {
            "mlp.gate.weight": np.zeros((EXPERTS + 2, HIDDEN), np.float32),
            "mlp.gate.bias": floats(0, 0, 1, 2),
            "mlp.gate.global_scale": floats(0.5),
        },
        [3, 2],
        [1.0, 1.0],
    ),
    "in the layer": (
        "kolibri1",
        {},
        {"mlp.gate.weight": GATE, "moe.router.expert_bias": floats(0, 0, 1, 2)},
        [3, 2],
        [0.5, 0.5],
    ),
    "one after the other": ("phimoe", {}, {"mlp.gate.weight": GATE}, [0, 1], [1 / 4, 1 / 3]),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_router_reads(case: str, tmp_path: Path) -> None:
    kind, said, tensors, ids, weights = CASES[case]
    findings = Findings()
    found = inputs_of(opened(tmp_path, kind, tensors, said), findings)
    assert not findings.listed and found.routing == "router"
    assert found.ids.tolist() == [ids] * TOKENS
    np.testing.assert_allclose(found.weights, np.tile(weights, (TOKENS, 1)), rtol=1e-6)


def test_weights_on_the_input_of_several_experts(tmp_path: Path) -> None:
    """A row for each expert of a token, with half of its input."""
    findings = Findings()
    llama = opened(tmp_path, "llama4", {"mlp.router.weight": GATE}, {})
    found = inputs_of(llama, findings)
    assert found.ids.tolist() == [[0], [1]] * TOKENS and (found.weights == 1).all()
    rows = bf16_to_f32(found.x).reshape(TOKENS, 2, HIDDEN)
    np.testing.assert_array_equal(rows[:, 0], rows[:, 1])
    halves = np.random.default_rng(0).standard_normal((TOKENS, HIDDEN), np.float32) / 2
    np.testing.assert_allclose(rows[:, 0], halves, rtol=2**-7)


def test_scales_of_a_router_in_a_gguf_file(tmp_path: Path) -> None:
    """Gemma 4: the scale of each expert is a factor of its down matrix there, not of the router."""
    hidden = gguf_files.metadata()["embedding_length"]
    gate = np.zeros((gguf_files.EXPERTS, hidden), np.float32)
    gate[3, 0], gate[1, 1] = 1, 0.5
    scale = np.zeros(hidden, np.float32)
    scale[:2] = 1
    tensors = {
        **gguf_files.experts(),
        "blk.0.ffn_down_exps.scale": np.ones(gguf_files.EXPERTS, np.float32),
        "blk.0.ffn_gate_inp.weight": gate,
        "blk.0.ffn_gate_inp.scale": scale,
    }
    path = gguf_files.write_gguf(tmp_path / "m.gguf", tensors, architecture="gemma4")
    checkpoint, findings = open_checkpoint(path), Findings()
    found = inputs_of(checkpoint, findings)
    assert not findings.listed and found.routing == "router"
    # x / rms(x) / sqrt(H), and only the first two channels
    x = np.random.default_rng(0).standard_normal((TOKENS, hidden), np.float32)
    z = x / np.sqrt((x * x).mean(1, keepdims=True) * x.shape[1])
    logits = np.stack((0 * z[:, 0], z[:, 1] / 2, 0 * z[:, 0], z[:, 0]), axis=1)
    best = np.sort(np.argsort(-logits, axis=1, kind="stable")[:, :2], axis=1)
    np.testing.assert_array_equal(np.sort(found.ids, axis=1), best)
    np.testing.assert_allclose(found.weights.sum(axis=1), 1, rtol=1e-6)


FAULTS: list[tuple[str, dict[str, Tensor], str]] = [
    ("table", {"mlp.gate.tid2eid": whole([[3, 4]])}, "experts from 3 to 4, but there are 4."),
]
REFUSED: list[tuple[str, dict[str, Tensor], str]] = [
    ("table", {"mlp.gate.tid2eid": np.ones((9, 2), np.float32)}, "F32 [9, 2], not a table of"),
    (
        "input scale",
        {"mlp.router.scale": floats(1, 1)},
        "scale has shape [2], expected [64]",
    ),
    ("sinks", {"mlp.gate.weight": GATE}, "has the shape [4, 64]"),
    ("sinks", {"mlp.gate.global_scale": floats(1, 1)}, "global_scale has shape [2], expected [1]"),
    ("two towers", {"mlp.gate.weight": GATE}, "gate.weight has shape [4, 64], expected [64, 4]"),
]


@pytest.mark.parametrize(("case", "changed", "says"), FAULTS)
def test_what_is_wrong_is_a_failure(
    case: str, changed: dict[str, Tensor], says: str, tmp_path: Path
) -> None:
    """Experts are computed all the same."""
    kind, said, tensors, *_ = CASES[case]
    findings = Findings()
    found = inputs_of(opened(tmp_path, kind, tensors | changed, said), findings)
    (failure,) = findings.listed
    assert (failure.level, failure.check, failure.layer) == ("layers", "router", 0)
    assert says in failure.message and found.routing == "random"


@pytest.mark.parametrize(("case", "changed", "says"), REFUSED)
def test_what_headers_show_is_refused(
    case: str, changed: dict[str, Tensor], says: str, tmp_path: Path
) -> None:
    kind, said, tensors, *_ = CASES[case]
    with pytest.raises(CheckpointError, match=re.escape(says)):
        opened(tmp_path, kind, tensors | changed, said)


@pytest.mark.parametrize(
    ("case", "what"),
    [("table", "table of tokens"), ("input scale", "scale per expert"), ("sinks", "scale")],
)
def test_what_is_missing_is_a_failure(case: str, what: str, tmp_path: Path) -> None:
    kind, said, tensors, *_ = CASES[case]
    findings, last = Findings(), list(tensors)[-1]
    kept = {name: tensor for name, tensor in tensors.items() if name != last}
    assert inputs_of(opened(tmp_path, kind, kept, said), findings).routing == "random"
    (failure,) = findings.listed
    assert f"has no {what}: none of" in failure.message and f"{LAYER}.{last}" in failure.message
