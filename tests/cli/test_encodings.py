"""Every command on every kind of encoding: a model of two layers, of which the second and some
weights of the first have other encodings, and whose attention is quantized too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.amx import Emulator
from helpers.cli import contents, edit_json
from helpers.encoded import HIDDEN, INNER, KINDS, encoded_model
from helpers.families import Tensor, bf16
from helpers.harmless import assert_safe, run

pytestmark = pytest.mark.slow

# One of each file and each way to have zero points, groups and outer scales.
CHOSEN = (
    "fp8 block, Qwen", "mxfp4, DeepSeek-V4", "mxint4, AutoRound",
    "nvfp4, compressed-tensors", "int3 packed, asymmetric",
    "int4 packed by activation", "int8 channel", "int4, AngelSlim", "int8 asymmetric, msModelSlim",
    "gptq by activation", "awq",
)  # fmt: skip
OTHER = dict.fromkeys(("int8 channel", "int8 asymmetric, msModelSlim"), "fp8 block")


def tensors_of(kind: str, name: str, rows: int, cols: int) -> dict[str, Tensor]:
    parts, _ = KINDS[kind].of(np.random.default_rng(3), rows, cols)
    return {f"{name}.{part}": tensor for part, tensor in parts.items()}


def write(directory: Path, kind: str) -> Path:
    other = OTHER.get(kind, "int8 channel")
    rng = np.random.default_rng(4)
    more: dict[str, Any] = {"model.embed_tokens.weight": bf16(rng.standard_normal((64, HIDDEN)))}
    for layer in range(2):
        block = f"model.layers.{layer}"
        more |= tensors_of(kind, f"{block}.self_attn.o_proj", HIDDEN, HIDDEN)
        more[f"{block}.post_attention_layernorm.weight"] = bf16(np.ones(HIDDEN))
        more[f"{block}.mlp.gate.weight"] = bf16(rng.standard_normal((2, HIDDEN)))
    for expert in range(2):  # layer 1: gate and down like layer 0, up in another encoding
        for proj, of in (("gate", kind), ("up", other), ("down", kind)):
            name = f"model.layers.1.mlp.experts.{expert}.{proj}_proj"
            shape = (HIDDEN, INNER) if proj == "down" else (INNER, HIDDEN)
            more |= tensors_of(of, name, *shape)
    model, _, _ = encoded_model(directory, kind, **more)
    details = {"num_hidden_layers": 2, "num_experts_per_tok": 1}
    edit_json(model / "config.json", lambda config: config.update(details))
    # Whatever quantization_config says is of one of the encodings only.
    if "quant_method" in KINDS[kind].quantization:
        edit_json(
            model / "config.json", lambda config: config["quantization_config"].pop("quant_method")
        )
    return model


def succeeds(*command: object) -> str:
    result = run(*command)
    assert_safe(result)
    assert result.exit_code == 0, result.output
    return str(result.stdout)


@pytest.mark.parametrize("kind", CHOSEN)
def test_commands_for_cpus(kind: str, tiles: Emulator | None, tmp_path: Path) -> None:
    model, out = write(tmp_path / "model", kind), tmp_path / "out"
    both = {KINDS[kind].name, KINDS[OTHER.get(kind, "int8 channel")].name}

    facts = json.loads(succeeds("inspect", model, "--json"))
    assert set(facts["encodings"]) == both
    command = ["quantize-cpu", model, "--numa", "3", "--threads", "2"]
    plan = json.loads(succeeds(*command, out, "--dry-run", "--json"))
    assert set(plan["encodings"]) == both
    mixed = next(name for name in plan["layers_by_encoding"] if "+" in name)
    assert plan["layers_by_encoding"] == {KINDS[kind].name: "0", mixed: "1"}
    assert set(mixed.split("+")) == both
    text = succeeds(*command, out, "--dry-run")
    assert f"{KINDS[kind].name} (layer 0)" in text and f"{mixed} (layer 1)" in text

    succeeds(*command, out, "--layers", "0")
    succeeds(*command, out)  # continues
    succeeds(*command, tmp_path / "clean")
    assert contents(out) == contents(tmp_path / "clean")
    verified = json.loads(succeeds("verify", out, "--source", model, "--level", "layers", "--json"))
    assert verified["weights"]["matrices"] == 2 * 2 * 3 and verified["layers"]["passed"]

    manifest = json.loads((out / "ktconv.json").read_text())
    found = {layer["encoding"] for layer in manifest["geometry"]["layers"].values()}
    assert {name for one in found for name in one.split("+")} == both

    succeeds(*command, tmp_path / "folders", "--layout", "layers")
    succeeds("merge", tmp_path / "folders", tmp_path / "merged", "--source", model)
    shards = {name for name in contents(out) if name.endswith(".safetensors")}
    merged = contents(tmp_path / "merged")
    assert {name: merged[name] for name in shards} == {n: contents(out)[n] for n in shards}
    succeeds("verify", tmp_path / "merged", "--source", model, "--level", "weights")
    succeeds("inspect", out)
