"""Encoded experts in the layouts and names of releases, decoded while transformers loads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from click.testing import CliRunner
from helpers.convert import read_model
from helpers.encoded import KINDS
from helpers.families import Tensor, write_checkpoint
from helpers.family_list import MADE, SAVED
from helpers.family_models import write
from helpers.layouts import Encode, Weights, draw, experts_of

from ktconv.cli.app import app
from ktconv.errors import CheckpointError
from ktconv.model.decoded import open_encoded
from ktconv.model.load import load_language_model
from ktconv.model.sites import find_experts
from ktconv.source import open_checkpoint
from ktconv.verify import VerifyRequest, verify

pytestmark = [pytest.mark.slow, pytest.mark.torch]


class Release(NamedTuple):
    """A family as transformers writes it, with experts as a release has them."""

    saved: str
    of: Encode
    quantization: Mapping[str, Any]
    layout: str
    at: str


def _as_in(saved: str, made: str, at: str = "") -> Release:
    """Experts as in a checkpoint of family_list.MADE."""
    model = MADE[made]
    config = {**model.config.get("text_config", {}), **model.config}
    assert model.of is not None
    quantization = config.get("quantization_config", {})
    return Release(saved, model.of, quantization, model.layout, at or model.at)


def _in(saved: str, kind: str, layout: str = "") -> Release:
    """The layout of `saved`, or another, in an encoding of KINDS."""
    model = SAVED[saved]
    kinds = KINDS[kind]
    return Release(saved, kinds.of, kinds.quantization, layout or model.layout, model.at)


RELEASES = {
    "Inkling-2 MXFP8": _as_in("inkling2", "Inkling-2 MXFP8"),
    "Mistral-Small-4 FP8": _as_in("mistral4", "Mistral-Small-4 FP8", SAVED["mistral4"].at),
    "Mistral-Large-4": _as_in("mistral_large4", "Mistral-Large-4"),
    "Step-3.7 FP8": _as_in("step3p7", "Step-3.5 FP8"),
    "Hy4 MXFP8": _as_in("hy_v4", "Hy4 MXFP8"),
    "Hy4 MXFP4": _in("hy_v4", "mxfp4, Quark", "F12"),
    "Qwen3-VL FP8": _as_in("qwen3_vl_moe, resaved", "Qwen3-VL FP8"),
    "Qwen3.5 FP8": _as_in("qwen3_5_moe", "Qwen3.5 FP8"),
    "GLM-5.3-Flash FP8": _as_in("glm5_next", "GLM-5.3-Flash FP8"),
    "MiMo-V2.5-Pro FP4": _as_in("mimo_v2_flash", "MiMo-V2.5-Pro FP4"),
    "Ling-3.0-Flash FP4": _as_in("bailing_hybrid", "Ling-3.0-Flash FP4"),
    "Ling-3.0-Flash INT4": _as_in("bailing_hybrid", "Ling-3.0-Flash INT4"),
    "Kimi-K2.5": _as_in("kimi_k25, resaved", "Kimi-K2.5"),
    "DeepSeek-V4-Flash": _as_in("deepseek_v4, resaved", "DeepSeek-V4-Flash"),
    "MiniMax-M3 MXFP8": _as_in("minimax_m3_vl", "MiniMax-M3 MXFP8"),
    "Nemotron-3 NVFP4": _as_in("nemotron_h, latent", "Nemotron-3 NVFP4"),
    "Nemotron-3, stacked": _in("nemotron_h", "mxfp8", "F11"),
    "Gemma-4 NVFP4": _as_in("gemma4", "Gemma-4 NVFP4"),
    "Granite": _in("granitemoe", "fp8 block, Qwen"),
    "Aria": _in("aria", "fp8 block, Qwen"),
    "Muse-Spark": _in("muse_spark", "fp8 block, Qwen"),
    "Qwen3, names of Hy4": _in("qwen3_moe", "mxfp8", "F12"),
}


def _write(name: str, directory: Path) -> dict[int, Weights]:
    """The checkpoint, and what its experts stand for."""
    release = RELEASES[name]
    model = SAVED[release.saved]
    if not hasattr(pytest.importorskip("transformers"), model.saved_by):
        pytest.skip(f"transformers has no {model.saved_by} yet")
    write(model, directory)
    tensors: dict[str, Tensor] = {**read_model(directory)}
    sizes, rng = (model.experts, model.inner, model.hidden), np.random.default_rng(1)
    weights = {}
    for index in model.layers:
        known = experts_of(
            model.layout, model.at.format(index), model.experts, read_model(directory)
        )
        tensors = {key: one for key, one in tensors.items() if key not in known.names}
        stored, weights[index] = draw(
            release.layout, release.at.format(index), sizes, rng, release.of
        )
        tensors |= stored
    config = json.loads((directory / "config.json").read_text())
    for file in directory.glob("*.safetensors"):
        file.unlink()
    quantization = {"quantization_config": dict(release.quantization)}
    write_checkpoint(directory, tensors, config | quantization)
    return weights


@pytest.mark.parametrize("name", RELEASES)
def test_experts_of_a_release(name: str, torch: Any, tmp_path: Path) -> None:
    weights = _write(name, tmp_path)
    decoded = open_encoded(tmp_path)
    assert decoded is not None
    model = load_language_model(tmp_path, torch.bfloat16, decoded=decoded)
    sites = find_experts(model)
    assert sites.keys() == weights.keys()
    for index, site in sites.items():
        stacks = weights[index]
        for expert in range(site.count):
            found = site.own.matrices(expert)
            assert found.keys() == stacks.keys()
            for projection, matrix in found.items():
                wanted = torch.from_numpy(stacks[projection][expert].copy())
                assert torch.equal(matrix, wanted.to(torch.bfloat16)), (index, expert, projection)


def test_experts_that_do_not_fit(torch: Any, tmp_path: Path) -> None:
    """Half as many as the model has, under names that transformers does not know."""
    _write("Hy4 MXFP8", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    decoded = open_encoded(tmp_path)
    config |= {"n_routed_experts": 8, "num_experts": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"does not contain model\.layers\.1\.mlp\.[a-z]"):
        load_language_model(tmp_path, torch.bfloat16, decoded=decoded)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("name", ["Hy4 MXFP8", "Gemma-4 NVFP4"])
def test_commands_on_names_that_transformers_does_not_know(
    name: str, torch: Any, tmp_path: Path
) -> None:
    _write(name, tmp_path / "model")
    result = CliRunner().invoke(app, ["stats", str(tmp_path / "model"), "--max-tokens", "40"])
    assert result.exit_code == 0, result.output
    words = ["--method", "int8", "--numa", "1", "--allow-activation-mismatch"]
    output = str(tmp_path / "out")
    result = CliRunner().invoke(app, ["quantize-cpu", str(tmp_path / "model"), output, *words])
    assert result.exit_code == 0, result.output
    request = VerifyRequest(Path(output), str(tmp_path / "model"), level="layers", tokens=8)
    rows = verify(request).facts["layers"]["layers"]
    assert [row["routing"] for row in rows if row["layer"] < 2].count("model") > 0


def test_a_model_that_transformers_cannot_run(torch: Any, tmp_path: Path) -> None:
    """DeepSeek-V4 in bf16, before release 5.23."""
    _write("DeepSeek-V4-Flash", tmp_path)
    assert {layer.encoding for layer in open_checkpoint(tmp_path).layers} == {"mxfp4"}
    result = CliRunner().invoke(app, ["stats", str(tmp_path), "--max-tokens", "40"])
    if result.exit_code:
        assert result.exit_code == 2 and "cannot be run by transformers: " in result.stderr
        assert "use a release of transformers" in " ".join(result.stderr.split())
        assert "Traceback" not in result.output
    else:
        counted = [line.split()[:2] for line in result.output.splitlines()]
        assert ["0", "40"] in counted and ["1", "40"] in counted
