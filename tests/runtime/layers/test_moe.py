"""Layers for the kernels: quantizers by their definitions, packing, converted models.

That the forward itself is right on every level is tests/native's to prove.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.convert import Converted, convert
from helpers.paths import EXAMPLE
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from ktconv.errors import CheckpointError, UsageError
from ktconv.formats import FORMATS, format_named, formats_for
from ktconv.formats.decode import E4M3FN_VALUES, bf16_to_f32, f32_to_bf16
from ktconv.formats.mxfp4 import MAGNITUDES
from ktconv.model.matching import open_layers
from ktconv.native import Activation
from ktconv.runtime import MoELayer
from ktconv.runtime.layers import experts_per_token, open_experts, pack_experts
from ktconv.runtime.layers.experts import gated, quantized
from ktconv.runtime.layers.load import activation_of, moe_layers
from ktconv.source.settings import ModelSettings
from ktconv.system.pool import Pool

pytestmark = pytest.mark.slow

F32 = NDArray[np.float32]


def gaussian(rows: int, cols: int, seed: int = 0) -> F32:
    values = np.random.default_rng(seed).standard_normal((rows, cols), np.float32)
    return bf16_to_f32(f32_to_bf16(values * np.float32(cols**-0.5)))


def matrices(hidden: int, intermediate: int, seed: int = 0) -> tuple[F32, F32, F32]:
    up = gaussian(intermediate, hidden, 3 * seed), gaussian(intermediate, hidden, 3 * seed + 1)
    return (*up, gaussian(hidden, intermediate, 3 * seed + 2))


def matrices_for(
    activation: Activation, hidden: int, intermediate: int, seed: int = 0
) -> tuple[F32 | None, F32, F32]:
    gate, up, down = matrices(hidden, intermediate, seed)
    return gate if activation.gated else None, up, down


# ---- quantizers ------------------------------------------------------------------------

# Root mean square error of Gaussian weights, relative: what each format is known to lose.
TYPICAL = {
    "int4": 0.16,
    "int8": 0.012,
    "bf16": 0.0,
    "fp8": 0.03,
    "fp8-channel": 0.03,
    "mxfp8": 0.03,
    "mxfp4": 0.14,
    "nvfp4": 0.1,
    **dict.fromkeys(("gint4-32", "gint4-32-f32"), 0.1),
    **dict.fromkeys(("gint4-64", "gint4-64-f32"), 0.12),
    **dict.fromkeys(("gint4-128", "gint4-128-f32"), 0.13),
    **dict.fromkeys(("gint8-32", "gint8-32-f32", "gint8-64", "gint8-64-f32"), 0.0075),
    **dict.fromkeys(("gint8-128", "gint8-128-f32"), 0.0085),
}


@pytest.mark.parametrize("name", FORMATS)
def test_quantizers_lose_what_their_formats_do(name: str) -> None:
    values = gaussian(256, 512)
    restored = quantized(FORMATS[name], values).values
    error = np.linalg.norm(restored - values) / np.linalg.norm(values)
    assert 0.5 * TYPICAL[name] <= error <= TYPICAL[name]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", ["zeros", "tiny", "large", "one outlier"])
def test_quantizers_stand_extremes(name: str, kind: str) -> None:
    values = gaussian(128, 256)
    values *= {"zeros": 0.0, "tiny": 1e-20, "large": 1e20, "one outlier": 1.0}[kind]
    values[3, 5] *= 100 if kind == "one outlier" else 1
    values = bf16_to_f32(f32_to_bf16(values))
    found = quantized(FORMATS[name], values)
    assert np.isfinite(found.values).all()
    if kind == "zeros":
        assert not found.values.any()
    pack_experts(FORMATS[name], lambda _: (values, values, values.T.copy()), [0], 256, 128)


def test_e4m3_rounds_to_the_nearest_value() -> None:
    values = gaussian(128, 128)
    found = quantized(FORMATS["fp8-channel"], values)
    assert found.scale is not None and found.codes.max() <= 0xFE
    scaled = values / found.scale[:, None]
    finite = E4M3FN_VALUES[np.isfinite(E4M3FN_VALUES)]
    nearest = np.abs(scaled[..., None] - finite).min(axis=2)
    restored = E4M3FN_VALUES[found.codes] * found.scale[:, None]
    assert np.array_equal(restored, found.values)
    assert np.allclose(np.abs(restored / found.scale[:, None] - scaled), nearest, atol=1e-3)


def test_mxfp4_has_power_of_two_scales_and_nibbles_low_first() -> None:
    values = gaussian(32, 64)
    found = quantized(FORMATS["mxfp4"], values)
    assert found.scale is not None and found.scale.dtype == np.uint8
    steps = np.ldexp(1.0, found.scale.astype(int) - 127).repeat(32, axis=1)
    codes = np.stack([found.codes & 15, found.codes >> 4], axis=2).reshape(32, 64)
    signs = np.where(codes & 8, -1.0, 1.0)
    assert np.array_equal(signs * MAGNITUDES[codes & 7] * steps, found.values)
    assert np.abs(found.values - values).max() <= (steps * 2).max()  # saturation at 6


def test_gint4_codes_and_scales_give_the_values() -> None:
    for group in (32, 64, 128):
        found = quantized(FORMATS[f"gint4-{group}"], gaussian(32, 256))
        assert found.scale is not None and found.scale.shape == (32, 256 // group)
        codes = np.stack([found.codes & 15, found.codes >> 4], axis=2).reshape(32, 256)
        steps = bf16_to_f32(found.scale).repeat(group, axis=1)
        assert np.array_equal((codes.astype(np.float32) - 8) * steps, found.values)


def test_names() -> None:
    for row in FORMATS.values():
        assert format_named(row.key.upper()) is row
    with pytest.raises(UsageError, match="unknown method 'int5'"):
        format_named("int5")


def test_methods_that_hold() -> None:
    assert set(formats_for(128, 128, 1)) == set(FORMATS)
    wide = {"int4", "fp8", "gint4-128", "gint4-128-f32", "gint8-128", "gint8-128-f32"}
    assert set(formats_for(2880, 2880, 1)) == set(FORMATS) - wide
    narrow = {
        "bf16",
        "mxfp4",
        "mxfp8",
        "nvfp4",
        "gint4-32",
        "gint4-32-f32",
        "gint8-32",
        "gint8-32-f32",
    }
    assert set(formats_for(128, 64, 2)) == narrow
    assert formats_for(128, 128, 3) == formats_for(100, 128, 1) == []


# ---- packing ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("function", ["swiglu", "relu2"])
def test_packed_layers_compute_what_their_values_say(name: str, parts: int, function: str) -> None:
    hidden, intermediate, activation = 128, 256, Activation(function)
    origins = [0, 1, None, 0]
    experts = pack_experts(
        FORMATS[name],
        lambda origin: matrices_for(activation, hidden, intermediate, origin),
        origins,
        hidden,
        intermediate,
        parts=parts,
        activation=activation,
    )
    each = (2 + activation.gated) * intermediate * hidden
    assert experts.expert_bytes >= each * experts.format.traits.bits // 8
    assert experts.expert_bytes <= each * (experts.format.traits.bits + 1) // 8
    x = f32_to_bf16(np.random.default_rng(1).standard_normal((5, hidden), np.float32))
    ids = np.array([[0, 1], [3, -1], [1, 3], [-1, -1], [0, 3]], np.int32)
    weights = np.random.default_rng(2).random((5, 2), np.float32)
    with Pool(2) as pool:
        y = bf16_to_f32(experts.forward(x, ids, weights, pool))
    expected = experts.reference(x, ids, weights)
    assert np.linalg.norm(y - expected) <= FORMATS[name].tolerance * np.linalg.norm(expected)
    assert not y[3].any() and not expected[3].any()
    source = experts.reference(x, ids, weights, experts.source)
    assert np.linalg.norm(expected - source) <= 2 * TYPICAL[name] * np.linalg.norm(source) + 1e-6


def test_the_reference_is_the_plain_sum() -> None:
    """Token by token, expert by expert, in float64."""
    gate, up, down = matrices(128, 128)
    experts = pack_experts(FORMATS["bf16"], lambda _: (gate, up, down), [0, 0], 128, 128)
    x = f32_to_bf16(gaussian(3, 128))
    ids = np.array([[0, 1], [1, -1], [0, 0]])
    weights = np.array([[0.3, 0.7], [1, 5], [0.5, 0.5]], np.float32)
    totals = np.array([1.0, 1.0, 1.0])  # of the weights that count: all experts are the same
    g, u = (bf16_to_f32(x).astype(np.float64) @ m.T.astype(np.float64) for m in (gate, up))
    expected = totals[:, None] * ((g / (1 + np.exp(-g)) * u) @ down.T.astype(np.float64))
    assert np.allclose(experts.reference(x, ids, weights), expected, atol=1e-5)


def test_missing_experts_cannot_be_asked_for() -> None:
    experts = pack_experts(FORMATS["bf16"], lambda _: matrices(64, 64), [0, None], 64, 64)
    x, weights = np.zeros((1, 64), np.uint16), np.ones((1, 1), np.float32)
    with pytest.raises(IndexError, match="not present"):
        experts.reference(x, np.array([[1]]), weights)
    with Pool(1) as pool, pytest.raises(ValueError):
        experts.forward(x, np.array([[1]]), weights, pool)


def test_experts_of_a_part_lie_in_one_block_that_can_be_bound() -> None:
    bound: list[tuple[int, int, int]] = []

    def bind(memory: Any, part: int) -> None:
        bound.append((part, memory.ctypes.data, memory.nbytes))

    experts = pack_experts(
        FORMATS["int8"], lambda o: matrices(64, 128, o), [0, 1, 0], 64, 128, parts=2, bind=bind
    )
    assert [part for part, _, _ in bound] == [0, 1]
    seen = set()
    for (_, start, size), row in zip(bound, experts.layer._keep, strict=True):
        for projection in (p for expert in row if expert for p in expert if p):
            address = projection.codes.ctypes.data
            assert address % 64 == 0 and start <= address < start + size
            seen.add(address)
    assert len(seen) == 2 * 3 * 3
    assert sum(size for *_, size in bound) >= 3 * experts.expert_bytes


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        (Activation(), lambda g, u: g / (1 + np.exp(-g)) * u),
        (
            Activation(limit=1.0),
            lambda g, u: min(g, 1) / (1 + np.exp(-min(g, 1))) * np.clip(u, -1, 1),
        ),
        (
            Activation("swiglu", 1.702, 1.0, 7.0),
            lambda g, u: min(g, 7) / (1 + np.exp(-1.702 * min(g, 7))) * (np.clip(u, -7, 7) + 1),
        ),
        (
            Activation("swiglu_clamped", limit=2.0),
            lambda g, u: min(g / (1 + np.exp(-g)), 2) * np.clip(u, -2, 2),
        ),
        (
            Activation("softcap", 4.0, 0.5),
            lambda g, u: 4 * np.tanh(g / 4) / (1 + np.exp(-g)) * 0.5 * np.tanh(u / 0.5),
        ),
        (
            Activation("softcap", 4.0, np.inf, 3.0),
            lambda g, u: 4 * np.tanh(min(g, 3) / 4) / (1 + np.exp(-min(g, 3))) * np.clip(u, -3, 3),
        ),
        (Activation("softcap", np.inf, np.inf), lambda g, u: g / (1 + np.exp(-g)) * u),
    ],
)
def test_activations(activation: Activation, expected: Any) -> None:
    points = np.array([-100, -8, -1, 0, 0.5, 3, 8], np.float32)
    g, u = (array.ravel() for array in np.meshgrid(points, points))
    with np.errstate(over="ignore"):
        wanted = [expected(*pair) for pair in zip(g.astype(float), u.astype(float), strict=True)]
    assert np.allclose(gated(activation, g, u), wanted, rtol=1e-5, atol=1e-6)


def test_relu2_has_no_gate() -> None:
    up = np.array([-100, -0.5, -0.0, 0, 0.5, 3, np.inf, np.nan], np.float32)
    expected = np.array([0, 0, 0, 0, 0.25, 9, np.inf, np.nan], np.float32)
    assert np.array_equal(gated(Activation("relu2"), None, up), expected, equal_nan=True)
    limited = gated(Activation("relu2", limit=2.0), None, up)
    assert np.array_equal(limited, np.minimum(expected, 4), equal_nan=True)
    for activation, gate in ((Activation("relu2"), up), (Activation(), None)):
        with pytest.raises(ValueError, match=f"experts with {activation.function}: a gate too"):
            gated(activation, gate, up)


@pytest.mark.parametrize("name", ["relu", "ungated_gelu", "ungated_gelu_tanh"])
def test_functions_without_a_gate(name: str) -> None:
    """ReLU by its definition, GELU as of a gate beside an up of 1."""
    up = np.array([-100, -0.5, -0.0, 0, 0.5, 3, np.nan], np.float32)
    expected = np.where(up < 0, 0, up)
    if name != "relu":
        expected = gated(Activation(name.removeprefix("ungated_")), up, np.ones_like(up))
    assert np.array_equal(gated(Activation(name), None, up), expected, equal_nan=True)
    limited = gated(Activation(name, limit=2.0), None, up)
    assert np.array_equal(limited, gated(Activation(name), None, np.clip(up, -2, 2)), True)
    with pytest.raises(ValueError, match=f"experts with {name}: a gate too"):
        gated(Activation(name), up, up)


def test_gelu_is_the_integral_and_its_approximation() -> None:
    g, u = np.linspace(-5, 5, 41, dtype=np.float32), np.full(41, 2, np.float32)
    exact, close = (gated(Activation(name), g, u) for name in ("gelu", "gelu_tanh"))
    assert exact[20] == 0 and exact[-1] == pytest.approx(10, rel=1e-5)
    assert exact[24] == pytest.approx(2 * 0.8413447, rel=1e-5)  # the normal distribution at 1
    assert 0 < np.abs(exact - close).max() < 2e-3


# ---- converted models ------------------------------------------------------------------


@pytest.fixture(scope="session")
def converted(converted_example: Converted) -> Path:
    return converted_example(method="int4", numa=2)


def copy_of(converted: Path, target: Path) -> Path:
    shutil.copytree(converted, target)
    return target


@pytest.mark.parametrize("method", ["int4", "int8"])
@pytest.mark.parametrize("numa", [1, 2])
def test_an_opened_layer_computes_the_source_layer(method: str, numa: int, tmp_path: Path) -> None:
    convert(EXAMPLE, tmp_path / "out", method=method, numa=numa, max_shard_size=300_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    source: dict[str, F32] = {}
    for shard in EXAMPLE.glob("*.safetensors"):
        source |= _load(shard)
    for layer in moe_layers(tmp_path / "out"):
        experts = open_experts(tmp_path / "out", layer)
        assert (experts.format.key, experts.parts) == (method, numa)
        x = f32_to_bf16(
            np.random.default_rng(layer).standard_normal((9, experts.hidden), np.float32)
        )
        rng = np.random.default_rng(0)
        ids = np.argsort(rng.random((9, experts.count)), axis=1)[:, :3].astype(np.int32)
        weights = rng.random((9, 3), np.float32)
        with Pool(2) as pool:
            experts.layer.touch(pool)
            y = bf16_to_f32(experts.forward(x, ids, weights, pool))
        for truth, bound in (
            (experts.reference(x, ids, weights), experts.format.tolerance),
            (experts.reference(x, ids, weights, _source(source, layer)), 2 * TYPICAL[method]),
        ):
            assert np.linalg.norm(y - truth) <= bound * np.linalg.norm(truth)


def _load(shard: Path) -> dict[str, F32]:
    from safetensors import deserialize

    found = {}
    for name, view in deserialize(shard.read_bytes()):
        if view["dtype"] == "BF16":
            bits = np.frombuffer(bytes(view["data"]), np.uint16)
            found[name] = bf16_to_f32(bits).reshape(view["shape"])
    return found


def _source(tensors: dict[str, F32], layer: int) -> Any:
    def expert(index: int) -> tuple[F32, F32, F32]:
        stem = f"model.layers.{layer}.mlp.experts.{index}"
        gate, up, down = (tensors[f"{stem}.{p}_proj.weight"] for p in ("gate", "up", "down"))
        return gate, up, down

    return expert


def test_weights_are_mapped_and_not_copied(converted: Path) -> None:
    experts = open_experts(converted)
    projections = experts.layer._keep[0][0]
    assert projections is not None and projections[0] is not None
    codes = projections[0].codes
    assert not codes.flags.writeable and not codes.flags.owndata


def test_layers_and_top_k(converted: Path) -> None:
    layers = moe_layers(converted)
    assert layers == [0, 1]
    assert (
        experts_per_token(converted)
        == json.loads((EXAMPLE / "config.json").read_text())["num_experts_per_tok"]
    )
    with pytest.raises(UsageError, match="no experts of layer 5"):
        open_experts(converted, 5)


def test_without_a_config_it_is_silu_and_eight(converted: Path, tmp_path: Path) -> None:
    model = copy_of(converted, tmp_path / "model")
    (model / "config.json").unlink()
    assert open_experts(model).activation == Activation()
    assert experts_per_token(model) == 8
    (model / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not valid JSON"):
        open_experts(model)


def test_a_missing_tensor_is_named(converted: Path, tmp_path: Path) -> None:
    model = copy_of(converted, tmp_path / "model")
    gone = "blk.0.ffn_up_exps.1.numa.1.weight"
    _change(model, gone, None)
    with pytest.raises(CheckpointError, match=f"does not contain {gone}"):
        open_experts(model, 0)
    assert open_experts(model, 1).count == 8


@pytest.mark.parametrize("kind", ["weight", "scale"])
@pytest.mark.parametrize("proj", ["gate", "down"])
def test_a_tensor_of_another_size_is_refused(
    proj: str, kind: str, converted: Path, tmp_path: Path
) -> None:
    model = copy_of(converted, tmp_path / "model")
    _change(model, f"blk.0.ffn_{proj}_exps.1.numa.1.{kind}", 64)
    with pytest.raises(CheckpointError, match=r"layer 0 of|has \d+ bytes"):
        open_experts(model, 0)


def _change(model: Path, name: str, length: int | None) -> None:
    """Cuts a tensor to `length` elements, or removes it."""
    index = json.loads((model / "model.safetensors.index.json").read_text())
    shard = model / index["weight_map"][name]
    tensors = {key: np.array(value) for key, value in load_file(shard).items()}
    whole = tensors.pop(name)
    if length is not None:
        tensors[name] = whole.ravel()[:length]
    save_file(tensors, shard)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, Activation()),
        ({"hidden_act": "silu"}, Activation()),
        ({"hidden_act": "gelu"}, Activation("gelu")),
        ({"hidden_activation": "gelu_pytorch_tanh"}, Activation("gelu_tanh")),
        ({"hidden_act": "silu", "swiglu_limit": 10.0}, Activation(limit=10.0)),
        ({"model_type": "gpt_oss", "hidden_act": "silu"}, Activation("swiglu", 1.702, 1.0, 7.0)),
        ({"swiglu_alpha": 1.5, "swiglu_limit": 5}, Activation("swiglu", 1.5, 1.0, 5.0)),
        ({"text_config": {"swiglu_limit": 3}, "swiglu_limit": 4}, Activation(limit=3.0)),
    ],
)
def test_activations_of_configs(config: dict[str, Any], expected: Activation) -> None:
    assert activation_of(ModelSettings(config)) == expected


def test_an_activation_that_the_kernels_lack() -> None:
    with pytest.raises(CheckpointError, match="'relu', which the kernels do not support"):
        activation_of(ModelSettings({"hidden_act": "relu"}))
    with pytest.raises(CheckpointError, match="'silu' of experts without a gate, which") as caught:
        activation_of(ModelSettings({"model_type": "nemotron_h", "mlp_hidden_act": "silu"}))
    assert "gelu, gelu_tanh, relu, relu2" in str(caught.value.hint)
    with pytest.raises(CheckpointError, match="clamped to 7, which the kernels do not support"):
        activation_of(ModelSettings({"swiglu_alpha": 1.5, "swiglu_limits": [7.0]}), 0)


ODD_CONFIGS: list[tuple[str, Any]] = [
    ("hidden_act", ["silu"]),
    ("hidden_act", 3),
    ("hidden_activation", {}),
    ("swiglu_limit", "abc"),
    ("swiglu_limit", ["7"]),
    ("swiglu_limit", True),
    ("swiglu_limit", float("nan")),
    ("swiglu_limit", float("inf")),
    ("swiglu_limit", -3),
    ("swiglu_limit", 10**400),
    ("swiglu_alpha", {}),
    ("swiglu_alpha", "1.7"),
    ("swiglu_alpha", -1.0),
    ("text_config", [1]),
    ("text_config", "silu"),
]


@pytest.mark.parametrize(("key", "value"), ODD_CONFIGS)
def test_an_activation_that_is_none(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=f"config.json: {key} is .*, not an? "):
        activation_of(ModelSettings({key: value}))


@pytest.mark.parametrize("value", ["8", 0, -1, 2.0, True, [8], float("nan")])
def test_a_top_k_that_is_none(value: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_experts_per_tok": value}))
    with pytest.raises(
        CheckpointError, match=r"config.json: num_experts_per_tok is .*, not a number of experts"
    ):
        experts_per_token(tmp_path)


def test_a_config_that_is_nested_deeply(converted: Path, tmp_path: Path) -> None:
    model = copy_of(converted, tmp_path / "model")
    (model / "config.json").write_text('{"text_config":' * 50_000 + "{}" + "}" * 50_000)
    with pytest.raises(CheckpointError, match="nested too deeply"):
        open_experts(model)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("proj", ["gate", "up", "down"])
def test_a_scale_that_is_not_finite_is_named(
    proj: str, value: float, converted: Path, tmp_path: Path
) -> None:
    """Even of an expert that no token of a benchmark goes to."""
    model = copy_of(converted, tmp_path / "model")
    name = f"blk.1.ffn_{proj}_exps.5.numa.1.scale"
    shard = (
        model / json.loads((model / "model.safetensors.index.json").read_text())["weight_map"][name]
    )
    tensors = {key: np.array(tensor) for key, tensor in load_file(shard).items()}
    tensors[name].view(np.float32).reshape(-1)[7] = value
    save_file(tensors, shard)
    with pytest.raises(CheckpointError, match=f"{name} of .* contains a scale that is not finite"):
        open_experts(model, 1)
    assert open_experts(model, 0).count == 8
    for memory in ("map", "copy", "shared"):
        with pytest.raises(CheckpointError, match=f"{name} of .* a scale that is not finite"):
            MoELayer.load(model, 1, memory=memory)
    with pytest.raises(CheckpointError, match=f"{name} of .* contains a scale that is not finite"):
        open_layers(model, [0, 1], ModelSettings({}))
