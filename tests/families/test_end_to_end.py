"""Every family, layout and encoding of released models, from the checkpoint to verified weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.activations import computed
from helpers.convert import assert_same, convert, expected_experts, read_json, read_model
from helpers.families import Raw
from helpers.family_list import MODELS
from helpers.family_models import Model, Written, write
from helpers.gpu import dequantize, modules, quantize
from helpers.layouts import LAYOUTS, Numbered

from ktconv.errors import CheckpointError
from ktconv.formats import tensor_name
from ktconv.formats.decode import bf16_to_f32, f32_to_bf16
from ktconv.inspect.inspection import inspect_path
from ktconv.runtime.layers.load import open_layer
from ktconv.source import Projection
from ktconv.system.pool import Pool
from ktconv.system.units import format_ranges
from ktconv.verify import VerifyRequest, hidden_states, verify

pytestmark = pytest.mark.slow

# INT4 and INT8 in turns, and the finer one where an activation is compared.
METHODS = {
    name: "int4" if model.activation == "silu" and number % 2 else "int8"
    for number, (name, model) in enumerate(MODELS.items())
}
# Hidden states come from the models themselves, but not of one that is no language model, of one
# that multiplies inputs, and of one that transformers cannot run in bf16.
NOT_RUN = ("openai_privacy_filter", "llama4", "deepseek_v4, resaved")
BOUNDS = {"int4": 0.5, "int8": 0.2}  # of relative errors; FP4 and FP8 have rows of wide range


@pytest.mark.usefixtures("tiles")  # the AMX level runs too, where it is emulated
@pytest.mark.parametrize("name", MODELS)
def test_a_family_from_end_to_end(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, source, output = MODELS[name], tmp_path / "model", tmp_path / "out"
    if model.saved_by:
        pytest.importorskip("torch")
        if not hasattr(pytest.importorskip("transformers"), model.saved_by):
            pytest.skip(f"transformers has no {model.saved_by} yet")
    else:  # these have only what is converted, and no attention
        monkeypatch.setattr(hidden_states, "why_not_captured", lambda _: "there is no model")
    truth = write(model, source)

    found = inspect_path(str(source))
    assert found["experts_found_as"] == sorted(
        {re.sub(r"[0-9]+", "N", at) for at in model.sources.values()}
    )
    assert found["moe_layers"] == format_ranges(list(model.sources))
    assert found["mtp_layers"] == ("none" if not model.mtp else str(max(model.sources)))
    assert found["experts"] == [model.experts] and found["encodings"] == [model.encoding]
    assert found["hidden_size"] == [model.hidden]
    assert found["intermediate_size"] == [model.inner]

    method, allow = METHODS[name], not model.for_ktransformers
    if allow:
        with pytest.raises(CheckpointError) as refusal:
            convert(source, output, method=method)
        assert "--allow-activation-mismatch" in str(refusal.value.hint)
        assert not output.exists()
    convert(source, output, method=method, threads=2, allow_activation_mismatch=allow)
    stored = read_model(output)
    assert_same(
        {key: one for key, one in stored.items() if "_exps." in key},
        {**expected_experts(truth.matrices, method, 1), **_expected_biases(truth.biases)},
    )
    others = [one for key, one in stored.items() if "_exps." not in key]
    assert sorted(others) == sorted(truth.others.values())

    result = verify(VerifyRequest(output, str(source), tokens=8))
    facts = result.facts
    assert result.passed, facts["failures"]
    layers = {row["layer"]: row for row in facts["layers"]["layers"]}
    assert list(layers) == sorted(model.sources)
    for row in layers.values():
        assert 0 < row["quantization_error"] < BOUNDS[method]
        assert row["routing"] in ("model", "router"), facts["notes"]
        if model.saved_by and row["layer"] in model.layers and name not in NOT_RUN:
            assert row["routing"] == "model", facts["notes"]
            if not model.router_apart:  # of 16 choices; another rule agrees in half of them
                assert row["router_agreement"] > 0.8, facts["notes"]

    for index in model.sources:
        _check_activation(model, truth, read_json(source / "config.json"), output, index, method)


def _check_activation(
    model: Model, written: Written, config: Mapping[str, Any], output: Path, index: int, method: str
) -> None:
    """Packed experts compute the model's formula, as `bench --model` runs them, too."""
    number, experts = open_layer(output, index)
    assert (number, experts.count) == (index, model.experts)
    # So that the products exceed limits, or are where GELU differs from SiLU.
    up = written.matrices[index, 1, "up"]
    wide = (1 if model.activation == "gelu_tanh" else 10) / (up.std() * model.hidden**0.5)
    x = f32_to_bf16(wide * np.random.default_rng(index).standard_normal((8, model.hidden), "f4"))
    with Pool(1) as pool:
        y = experts.forward(x, np.ones((8, 1), np.int64), np.ones((8, 1), np.float32), pool)
    got = bf16_to_f32(y)
    wanted = _output(model.activation, written, config, index, bf16_to_f32(x))
    assert _error(got, wanted) < BOUNDS[method]
    if model.gated:
        plain = _output("silu", written, config, index, bf16_to_f32(x))
        assert np.array_equal(plain, wanted) or _error(got, plain) > 1.5 * _error(got, wanted)


def _output(
    activation: str, written: Written, config: Mapping[str, Any], index: int, x: Any
) -> Any:
    """Of expert 1, before a norm."""

    def product(projection: Projection, values: Any) -> Any:
        key = index, 1, projection
        if key not in written.matrices:
            return None
        return values @ written.matrices[key].T.astype(np.float64) + written.biases.get(key, 0)

    text = config.get("text_config", config)
    inner = computed(activation, product("gate", x), product("up", x), text, index)
    return product("down", inner)


def _error(got: Any, wanted: Any) -> float:
    return float(np.linalg.norm(got - wanted) / max(np.linalg.norm(wanted), 1e-30))


def _expected_biases(biases: Mapping[tuple[int, int, Projection], Any]) -> dict[str, Raw]:
    return {
        tensor_name(layer, projection, expert, 0, "bias"): Raw(
            "F32", values.shape, values.astype("<f4").tobytes()
        )
        for (layer, expert, projection), values in biases.items()
    }


# One of each layout, and those with something beside their experts.
ON_GPUS = (
    "qwen3_5_moe", "deepseek_v4, resaved", "nemotron_h", "gemma4", "llama4", "step3p7",
    "granitemoe", "laguna", "Kimi-K3", "Hy4 MXFP8", "Nemotron-3, stacked", "Muse-Spark",
    "Inkling-2 MXFP8", "mlx",
)  # fmt: skip
SPELLINGS: Mapping[str, Projection] = {
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up",
    "w2": "down",
}  # fmt: skip


@pytest.mark.parametrize("name", ON_GPUS)
def test_experts_of_a_family_for_gpus(name: str, tmp_path: Path) -> None:
    pytest.importorskip("llmcompressor")
    model, source, output = MODELS[name], tmp_path / "model", tmp_path / "out"
    written = write(model, source)
    quantize(source, output, method="rtn", scheme="W8A16", group_size=128)
    stored = read_model(output)
    found = set()
    for module in modules(stored):
        at, expert, spelling = module.rsplit(".", 2)
        (index,) = (
            one
            for one, where in model.sources.items()
            if at.startswith(where.removesuffix("switch_mlp"))
        )
        key = index, int(expert), SPELLINGS[spelling]
        found.add(key)
        wanted = written.matrices[key]
        assert np.abs(dequantize(stored, module) - wanted).max() < np.abs(wanted).max() / 100
        if model.layout in ("N", "W", "U"):
            assert module in _modules(model.layout, model.sources[index], int(expert)), module
    assert found == written.matrices.keys()
    assert verify(VerifyRequest(output, str(source), level="weights")).passed


def _modules(layout: str, source: str, expert: int) -> set[str]:
    """Names of an expert's matrices in the source."""
    names = LAYOUTS[layout]
    assert isinstance(names, Numbered)
    return {f"{source}.{expert}.{name}" for name in names.names.values()}
