"""Rounding to nearest: llm-compressor's own bits, from every kind of source, loadable."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.convert import read_json, read_model
from helpers.families import (
    FAMILIES,
    Tensor,
    bf16,
    fp8,
    fp8_values,
    fused,
    numbered,
    random_weights,
    simple_config,
    write_checkpoint,
    write_family,
)
from helpers.gpu import dequantize, experts_of, floats, modules, quantize
from helpers.paths import EXAMPLE

from ktconv.formats.decode import round_to_bf16

pytestmark = [pytest.mark.slow, pytest.mark.torch]

SOURCE = "model.layers.0.mlp.experts"


@pytest.mark.parametrize(("scheme", "group"), [("W4A16", 128), ("W8A16", 128), ("W4A16", -1)])
def test_bits_are_those_of_model_free_ptq(
    scheme: str, group: int, quantized: Callable[..., Path], tmp_path: Path
) -> None:
    """Also tensor names, dtypes and shapes; and what its config.json says of the weights."""
    from ktconv.quantize.llm_compressor.library import quiet

    output = quantized(scheme, group)
    ours = read_json(output / "config.json")["quantization_config"]
    with quiet():
        from compressed_tensors.quantization import QuantizationConfig
        from llmcompressor import model_free_ptq

        pattern, linear = ours["config_groups"]["experts"]["targets"]
        assert linear == "Linear"  # which here would be embeddings too
        experts = {**ours["config_groups"]["experts"], "targets": [pattern]}
        config = QuantizationConfig(config_groups={"experts": experts}, ignore=ours["ignore"])
        model_free_ptq(str(EXAMPLE), str(tmp_path / "theirs"), config=config, device="cpu")
    theirs = read_json(tmp_path / "theirs/config.json")["quantization_config"]
    assert read_model(output) == read_model(tmp_path / "theirs")
    assert len(modules(read_model(output))) == 2 * 8 * 3
    for key, value in ours["config_groups"]["experts"]["weights"].items():
        assert theirs["config_groups"]["experts"]["weights"][key] == value
    assert {key: theirs[key] for key in ours if key != "config_groups"} == {
        key: ours[key] for key in ours if key != "config_groups"
    }


@pytest.mark.parametrize(("scheme", "group"), [("W4A16", 128), ("W8A16", 128), ("W8A16", -1)])
def test_values_lie_within_rounding_of_their_source(
    scheme: str, group: int, quantized: Callable[..., Path]
) -> None:
    output, source = quantized(scheme, group), read_model(EXAMPLE)
    tensors, manifest = read_model(output), read_json(output / "ktconv.json")
    records = {k: v for unit in manifest["units"].values() for k, v in unit["tensors"].items()}
    most = 0.0
    for module in modules(tensors):
        wanted, found = floats(source[f"{module}.weight"]), dequantize(tensors, module)
        scale = floats(tensors[f"{module}.weight_scale"])
        steps = np.abs(found - wanted).reshape(*scale.shape, -1) / scale[:, :, None]
        most = max(most, float(steps.max()))
        error = math.sqrt(np.vdot(found - wanted, found - wanted) / np.vdot(wanted, wanted))
        told = records[f"{module}.weight_packed"]
        assert told["relative_rms_error"] == pytest.approx(error, rel=1e-3)
        assert told["max_error_steps"] == pytest.approx(float(steps.max()), rel=1e-3)
        assert told["zero_share"] == pytest.approx(float((found == 0).mean()), abs=1e-4)
    assert 0.4 < most < (1.0 if scheme == "W4A16" else 1.5)


def test_everything_else_is_the_source(quantized: Callable[..., Path]) -> None:
    output, source = read_model(quantized()), read_model(EXAMPLE)
    kept = {name: tensor for name, tensor in source.items() if ".experts." not in name}
    assert {name: output[name] for name in kept} == kept
    assert len(output) == len(kept) + 3 * len(modules(output))
    assert read_json(quantized() / "config.json")["hidden_size"] == 128
    assert (quantized() / "tokenizer.json").read_bytes() == (
        EXAMPLE / "tokenizer.json"
    ).read_bytes()


def test_perplexity(torch: Any, quantized: Callable[..., Path]) -> None:
    """Near that of the source, and not the same: the experts that answer are quantized ones."""
    from ktconv.model.evaluate import load_model, windows

    text, found = (EXAMPLE.parent / "eval.txt").read_text(), {}
    for name, path in {"bf16": EXAMPLE, "4": quantized("W4A16"), "8": quantized("W8A16")}.items():
        model, tokenizer = load_model(path, "bfloat16")
        losses = []
        for ids in windows(tokenizer, text, 128, 12):
            with torch.no_grad():
                logits = model(ids.reshape(1, -1)).logits[0, :-1].float()
            losses.append(torch.nn.functional.cross_entropy(logits, ids.reshape(-1)[1:]))
        found[name] = math.exp(torch.stack(losses).mean())
    assert found["8"] == pytest.approx(found["bf16"], rel=0.005)
    assert found["4"] == pytest.approx(found["bf16"], rel=0.03)
    assert len(set(found.values())) == 3


# ---- sources ---------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["out-in", "in-out", "fp32", "fp16", "w1"])
def test_sources_of_every_form_give_the_same_experts(
    style: str, torch: Any, tmp_path: Path
) -> None:
    weights = random_weights(128, 256, 3)
    config = simple_config(hidden_size=128, moe_intermediate_size=256, num_experts=3)
    plain = write_checkpoint(tmp_path / "plain", numbered(SOURCE, weights), config)
    if style in ("out-in", "in-out"):
        tensors = fused(SOURCE, weights, transposed=style == "in-out")
    elif style == "w1":
        tensors = numbered(SOURCE, weights, ("w1", "w3", "w2"))
    else:
        kind = {"fp32": np.float32, "fp16": np.float16}[style]
        tensors = numbered(SOURCE, weights, encode=lambda values: values.astype(kind))
    model = write_checkpoint(tmp_path / "model", tensors, config)
    quantize(plain, tmp_path / "wanted")
    quantize(model, tmp_path / "found")
    wanted, found = read_model(tmp_path / "wanted"), read_model(tmp_path / "found")
    if style == "w1":
        spelled = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
        for short, usual in spelled.items():
            found = {name.replace(f".{short}.", f".{usual}."): t for name, t in found.items()}
    if style == "fp16":  # scales keep the precision of the source
        assert found[f"{SOURCE}.0.up_proj.weight_scale"].dtype == "F16"
        for module in modules(wanted):
            ours, theirs = dequantize(found, module), floats(read_model(plain)[f"{module}.weight"])
            assert 0.08 < np.linalg.norm(ours - theirs) / np.linalg.norm(theirs) < 0.13
        return
    assert found == wanted


def test_fp8_is_decoded(torch: Any, tmp_path: Path) -> None:
    """Experts and what an engine could not read any more; the scales' numbers, ragged blocks."""
    rng = np.random.default_rng(1)
    plain: dict[str, Tensor] = {"model.norm.weight": bf16(np.ones(256, np.float32))}
    tensors: dict[str, Tensor] = dict(plain)

    def add(name: str, rows: int, cols: int) -> None:
        codes = rng.integers(0, 120, (rows, cols)).astype(np.uint8)
        scale = rng.uniform(0.001, 0.01, (-(-rows // 128), -(-cols // 128))).astype(np.float32)
        wide = np.repeat(np.repeat(scale, 128, 0), 128, 1)[:rows, :cols]
        tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"] = fp8(codes), scale
        plain[f"{name}.weight"] = bf16(round_to_bf16(fp8_values()[codes] * wide))

    for expert in range(2):
        add(f"{SOURCE}.{expert}.gate_proj", 384, 256)
        add(f"{SOURCE}.{expert}.up_proj", 384, 256)
        add(f"{SOURCE}.{expert}.down_proj", 256, 384)
    add("model.layers.0.self_attn.q_proj", 200, 256)
    config = simple_config(hidden_size=256, moe_intermediate_size=384, num_experts=2)
    coded = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    write_checkpoint(tmp_path / "plain", plain, config)
    write_checkpoint(tmp_path / "fp8", tensors, {**config, "quantization_config": coded}, shards=2)
    quantize(tmp_path / "plain", tmp_path / "wanted")
    quantize(tmp_path / "fp8", tmp_path / "found")
    assert read_model(tmp_path / "found") == read_model(tmp_path / "wanted")
    for file in ("config.json", "recipe.yaml"):
        assert (tmp_path / "found" / file).read_text() == (tmp_path / "wanted" / file).read_text()


@pytest.mark.parametrize("kind", ["zeros", "denormal", "tiny", "half"])
def test_weights_that_are_next_to_nothing(kind: str, torch: Any, tmp_path: Path) -> None:
    """Dead experts: whatever their scales round to, they are written and stay next to nothing."""
    size = {"zeros": 0.0, "denormal": 2.0**-131, "tiny": 2.0**-120, "half": 2.0**-20}[kind]
    weights = random_weights(128, 128, 2)
    encode = (lambda v: v.astype(np.float16)) if kind == "half" else bf16
    small = type(weights)(*(stack * np.float32(size) for stack in weights))
    tensors = numbered(SOURCE, small, encode=encode)
    model = write_checkpoint(tmp_path / "model", tensors, simple_config(num_experts=2))
    quantize(model, tmp_path / "out", scheme="W8A16")
    for matrix in experts_of(tmp_path / "out").values():
        assert np.abs(matrix).max() <= 8 * size


# ---- loading ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "qwen3_vl_moe"])
def test_transformers_loads_quantized_experts(name: str, torch: Any, tmp_path: Path) -> None:
    """Every parameter is there; experts are what was written, everything else the source's."""
    import transformers

    write_family(name, tmp_path / "source")
    quantize(tmp_path / "source", tmp_path / "output")
    kind = "ImageTextToText" if name == "qwen3_5_moe" else "CausalLM"
    loader = getattr(transformers, f"AutoModelFor{kind}")
    model, report = loader.from_pretrained(
        tmp_path / "output", output_loading_info=True, dtype=torch.bfloat16
    )
    assert not report["missing_keys"] and not report["mismatched_keys"]
    source = loader.from_pretrained(tmp_path / "source", dtype=torch.bfloat16)
    written = experts_of(tmp_path / "output")
    parameters = dict(model.named_parameters())
    count = 0
    for key, wanted in source.named_parameters():
        found = parameters[key].detach().float().numpy()
        if ".experts." not in key:
            assert np.array_equal(found, wanted.detach().float().numpy()), key
            continue
        for expert, matrix in enumerate(found):
            assert np.array_equal(matrix, round_to_bf16(_stored(written, key, expert))), key
            count += 1
    assert count
    ids = torch.tensor([[1, 5, 9]])
    with torch.no_grad():
        assert torch.isfinite(model(input_ids=ids, use_cache=False).logits).all()


def _stored(written: dict[str, np.ndarray[Any, Any]], key: str, expert: int) -> Any:
    """What the output holds of transformers' fused parameter `key`."""
    layer = int(key.split(".layers.")[1].split(".")[0])
    wanted = ("up_proj", "w3"), ("gate_proj", "w1"), ("down_proj", "w2")
    found = {
        usual: matrix
        for usual, short in wanted
        for name, matrix in written.items()
        if f"layers.{layer}." in name
        and name.endswith((f".{expert}.{usual}", f".{expert}.{short}"))
    }
    if key.endswith("gate_up_proj"):
        return np.concatenate([found["gate_proj"], found["up_proj"]])
    return found["down_proj"]


def test_the_plan_says_what_transformers_cannot_load(torch: Any, tmp_path: Path) -> None:
    """Transformers would initialize the experts at random."""
    from ktconv.quantize.encoded.request import Request
    from ktconv.quantize.llm_compressor.run import prepare

    for name, fused_only in {"qwen3_vl_moe": True, "qwen3_5_moe": False}.items():
        write_family(name, tmp_path / name)
        notes = prepare(Request(str(tmp_path / name), tmp_path / "out")).plan.notes
        named = any("5.17 reads the experts of" in note for note in notes)
        assert named is fused_only


def test_config_keeps_other_words_and_drops_other_quantization(torch: Any, tmp_path: Path) -> None:
    other = {"quant_method": "fp8", "modules_to_not_convert": [SOURCE]}
    config = simple_config(
        text_config={"quantization_config": other, "words": "ü"}, dtype="bfloat16"
    )
    model = write_checkpoint(tmp_path / "model", numbered(SOURCE, random_weights()), config)
    quantize(model, tmp_path / "out")
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["text_config"] == {"words": "ü"}
    assert written["quantization_config"]["quant_method"] == "compressed-tensors"
