"""Level layers with the activation of each layer, of shared experts, and norms of outputs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.convert import convert
from helpers.families import Tensor, bf16, numbered, random_weights, simple_config, write_checkpoint

from ktconv.errors import CheckpointError
from ktconv.formats import FORMATS
from ktconv.formats.decode import bf16_to_f32, f32_to_bf16
from ktconv.native import Activation
from ktconv.runtime.layers import KERNEL_BOUND, load, pack_experts
from ktconv.runtime.layers.experts import OutputNorm
from ktconv.system.pool import Pool
from ktconv.verify import Request, prepare, verify
from ktconv.verify.packed import model as packed_model

pytestmark = pytest.mark.usefixtures("no_transformers")

HIDDEN, EXPERTS, STRONG = 128, 4, 16.0  # STRONG: so that limits matter
LIMITS: dict[str, Any] = {"swiglu_limits": [0.0, 0.5], "swiglu_limits_shared": [0.25, 0.0]}


def strong(values: np.ndarray[Any, Any]) -> Tensor:
    return bf16(values * STRONG)


def write(directory: Path, more: Mapping[str, Any] | None = None, **config: Any) -> Path:
    """Two layers with shared experts, and `more` tensors."""
    tensors: dict[str, Tensor] = dict(more or {})
    for layer in range(2):
        prefix, rng = f"model.layers.{layer}", np.random.default_rng(layer)
        weights = random_weights(seed=layer)
        tensors |= numbered(f"{prefix}.mlp.experts", weights)
        tensors[f"{prefix}.mlp.gate.weight"] = bf16(rng.standard_normal((EXPERTS, HIDDEN)))
        for name, shape in (("gate", (64, HIDDEN)), ("up", (64, HIDDEN)), ("down", (HIDDEN, 64))):
            values = rng.standard_normal(shape)
            tensors[f"{prefix}.mlp.shared_experts.{name}_proj.weight"] = strong(values)
    sizes = {"num_hidden_layers": 2, "num_experts_per_tok": 2}
    return write_checkpoint(directory, tensors, simple_config(**sizes, **config))


@pytest.mark.usefixtures("tiles")  # the AMX level runs too, where it is emulated
def test_each_layer_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: dict[int, Activation] = {}
    original = load.packed_experts

    def packed_experts(packed: Any, layer: int, activation: Activation, *more: Any) -> Any:
        used[layer] = activation
        return original(packed, layer, activation, *more)

    monkeypatch.setattr(packed_model, "packed_experts", packed_experts)
    errors = {}
    cases: dict[str, dict[str, Any]] = {"limits": LIMITS, "none": {}}
    for name, config in cases.items():
        model = write(tmp_path / name, **config)
        output = tmp_path / f"{name}-out"
        convert(model, output, method="int8", allow_activation_mismatch=True)
        result = verify(Request(output, str(model), tokens=8, threads=1))
        assert result.passed, result.failures
        if config:
            assert used == {0: Activation(), 1: Activation("swiglu_clamped", limit=0.5)}
        errors[name] = result.facts["layers"]["layers"]
    # The same weights, inputs and routers: what differs is limited in one of the two models.
    for layer, routed in ((0, False), (1, True)):
        limited, free = errors["limits"][layer], errors["none"][layer]
        assert (limited["quantization_error"] != free["quantization_error"]) == routed
    shared = "quantization_error_with_shared"
    assert errors["limits"][0][shared] != errors["none"][0][shared]


def muse(directory: Path, *lengths: int, largest: float = 1.0) -> Path:
    """With norms of so many elements in the first layers."""
    rng = np.random.default_rng(8)
    tensors: dict[str, Tensor] = {}
    for layer in range(2):
        block = f"model.layers.{layer}.mlp"
        tensors[f"{block}.gate.e_score_correction_bias"] = np.zeros(EXPERTS, np.float32)
        if layer < len(lengths):
            norm = bf16(largest * rng.random(lengths[layer]))
            tensors[f"{block}.experts.post_expert_norm.weight"] = norm
    return write(directory, tensors, model_type="muse_spark")


def test_a_model_with_norms(tmp_path: Path) -> None:
    """With other norms outputs and so their errors are others."""
    errors = []
    for largest in (1.0, 9.0):
        model = muse(tmp_path / str(largest), HIDDEN, HIDDEN, largest=largest)
        output = tmp_path / f"{largest}-out"
        convert(model, output, method="int8", allow_activation_mismatch=True)
        result = verify(Request(output, str(model), tokens=8, threads=1))
        assert result.passed, result.failures
        errors.append([row["quantization_error"] for row in result.facts["layers"]["layers"]])
    assert all(one != other for one, other in zip(*errors, strict=True))


def test_a_norm_that_is_missing(tmp_path: Path) -> None:
    model = muse(tmp_path / "model", HIDDEN)
    convert(model, tmp_path / "out", method="int8", allow_activation_mismatch=True)
    says = r"layer 1 has no norm of its experts' outputs: .*post_expert_norm\.weight does"
    with pytest.raises(CheckpointError, match=says) as caught:
        prepare(Request(tmp_path / "out", str(model), threads=1))
    assert caught.value.hint == "run --level weights, which does not need it"


def test_a_norm_of_another_size_is_refused_with_the_model(tmp_path: Path) -> None:
    model = muse(tmp_path / "model", HIDDEN, 64)
    with pytest.raises(CheckpointError, match=r"_norm\.weight has shape \[64\], expected \[128\]"):
        convert(model, tmp_path / "out", method="int8", allow_activation_mismatch=True)


def test_outputs_are_normalised_before_their_weights() -> None:
    """By the kernels and in float32, against the formula."""
    rng = np.random.default_rng(5)
    weights = random_weights(seed=3)
    stack = [(weights.gate[e], weights.up[e], weights.down[e]) for e in range(EXPERTS)]
    made = pack_experts(
        FORMATS["bf16"], lambda origin: stack[origin], list(range(EXPERTS)), HIDDEN, HIDDEN
    )
    norm = OutputNorm(rng.standard_normal(HIDDEN, np.float32), 1e-5)
    made.norm = norm
    x = f32_to_bf16(rng.standard_normal((5, HIDDEN), np.float32))
    ids = np.array([[0, 1], [2, 3], [3, 0], [1, -1], [-1, -1]])
    factors = rng.random(ids.shape, np.float32)
    expected = np.zeros((5, HIDDEN))
    for token, chosen in enumerate(ids):
        for slot, expert in enumerate(chosen):
            if expert >= 0:
                gate, up, down = (np.float64(one) for one in stack[expert])
                row = np.float64(bf16_to_f32(x[token]))
                g, u = gate @ row, up @ row
                out = (down @ (g / (1 + np.exp(-g)) * u)) * (1 + norm.weight)
                out /= np.sqrt(np.mean(out**2) + 1e-5)
                expected[token] += factors[token, slot] * out
    with Pool(1) as pool:
        kernels = bf16_to_f32(made.forward(x, ids, factors, pool))
    for found in (kernels, made.reference(x, ids, factors)):
        assert np.linalg.norm(found - expected) < KERNEL_BOUND * np.linalg.norm(expected)
    assert not kernels[4].any()
