"""Experts with biases: encoded on request, for our own kernels."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from helpers.cli import ktconv
from helpers.convert import read_json, read_model
from helpers.corrupt import check
from helpers.families import Raw, Tensor, bf16, simple_config, write_checkpoint
from helpers.gpt_oss import EXPERTS, HIDDEN, INNER, SIZES, Blocks
from helpers.gpu_corrupt import change
from helpers.recoded import change_recorded, encode

from ktconv.errors import CheckpointError
from ktconv.formats import PROJECTIONS
from ktconv.runtime.layers import native_experts
from ktconv.source import open_checkpoint
from ktconv.targets.encoded.scheme import SCHEMES, names_of

pytestmark = pytest.mark.slow

WIDE = ("fp8", "gptq-int4")  # 192 columns are no whole blocks of 128
METHODS = [
    name for name in names_of("quantize-cpu") if SCHEMES[name].kt_method and name not in WIDE
]


def gpt_oss(directory: Path, dtype: str = "F32") -> tuple[Path, Blocks]:
    blocks = Blocks()
    rng = np.random.default_rng(1)
    tensors: dict[str, Tensor] = dict(blocks.mxfp4)
    tensors["model.layers.0.mlp.router.weight"] = bf16(rng.standard_normal((EXPERTS, HIDDEN)))
    tensors["model.layers.0.mlp.router.bias"] = bf16(rng.standard_normal(EXPERTS))
    for name in [name for name in tensors if name.endswith("_bias")]:
        values = np.asarray(tensors[name])
        if dtype == "BF16":
            tensors[name] = bf16(values)
        elif dtype == "F16":
            tensors[name] = Raw("F16", values.shape, values.astype("<f2").tobytes())
    config = simple_config(**SIZES, model_type="gpt_oss", num_experts_per_tok=2)
    return write_checkpoint(directory, tensors, config), blocks


def biases(blocks: Blocks, expert: int) -> dict[str, np.ndarray]:
    gate_up, down = blocks.biases
    return {"gate": gate_up[expert, 0::2], "up": gate_up[expert, 1::2], "down": down[expert]}


def is_bias(name: str) -> bool:
    return name.endswith(".bias") and ".experts." in name


@pytest.mark.parametrize("method", METHODS)
def test_biases_are_beside_the_codes(method: str, tmp_path: Path) -> None:
    model, blocks = gpt_oss(tmp_path / "model")
    encode(model, tmp_path / "out", method, allow_activation_mismatch=True)
    found = {name: one for name, one in read_model(tmp_path / "out").items() if is_bias(name)}
    assert len(found) == 3 * EXPERTS
    values = {name: np.frombuffer(one.data, "<f4") for name, one in found.items()}
    for expert in range(EXPERTS):
        for proj, expected in biases(blocks, expert).items():
            own = [v for n, v in values.items() if np.array_equal(v, expected)]
            assert len(own) == 1, (expert, proj)
    report = check(tmp_path / "out", model)
    assert report.passed, report
    layers = check(tmp_path / "out", model, level="layers")
    assert layers.passed
    card = (tmp_path / "out" / "README.md").read_text()
    assert "plain SiLU without biases" in card and "library_name: ktconv" in card
    assert "vLLM" not in card


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_our_kernels_add_them(dtype: str, tmp_path: Path) -> None:
    """The numbers of mxfp4 are the source's, so everything is equal."""
    model, _ = gpt_oss(tmp_path / "model", dtype)
    encode(model, tmp_path / "out", "mxfp4", allow_activation_mismatch=True)
    encode(model, tmp_path / "plain", "bf16", allow_activation_mismatch=True)
    stored = [one.dtype for name, one in read_model(tmp_path / "out").items() if is_bias(name)]
    assert set(stored) == {dtype}
    source = native_experts(model)
    for output in ("out", "plain"):
        experts = native_experts(tmp_path / output)
        assert experts.activation == source.activation
        for expert in range(EXPERTS):
            for one, own in zip(experts.streams(expert), source.streams(expert), strict=True):
                assert one is not None and own is not None
                np.testing.assert_array_equal(one.bias, own.bias)
                np.testing.assert_array_equal(one.values(), own.values())
        again = check(tmp_path / output, model)
        assert again.passed


def test_refused_unless_it_is_allowed(tmp_path: Path) -> None:
    model, _ = gpt_oss(tmp_path / "model")
    done = ktconv("quantize-cpu", model, tmp_path / "out", "--method", "fp8-channel")
    assert done.exit_code == 2 and not (tmp_path / "out").exists()
    assert "plain SiLU without biases, and its results would be wrong" in done.stderr
    assert "--allow-activation-mismatch converts it for ktconv's own runtime" in done.stderr
    encode(model, tmp_path / "plain", "bf16")  # is no encoding
    for method in ("int4-g64", "awq"):  # which no loader of KTransformers has
        with pytest.raises(CheckpointError, match=r"have biases; .* does not write them"):
            encode(model, tmp_path / "out", method, allow_activation_mismatch=True)


@pytest.mark.parametrize("method", ["rawint4", "fp8-channel"])
def test_verify_compares_them(method: str, tmp_path: Path) -> None:
    model, _ = gpt_oss(tmp_path / "model")
    encode(model, tmp_path / "out", method, allow_activation_mismatch=True)
    name = "model.layers.0.mlp.experts.1.down_proj.bias"

    def damage(data: np.ndarray) -> None:
        data[4 * 7] ^= 1

    change_recorded(tmp_path / "out", name, damage)
    assert check(tmp_path / "out").passed
    words = f"{name} in .* differs from the source's biases in 1 rows, first in row 7"
    (found,) = check(tmp_path / "out", model).failures
    assert re.match(words, found.message)
    assert (found.layer, found.expert, found.projection) == (0, 1, "down")
    change(tmp_path / "out", name, damage)
    assert any(one.tensor == name for one in check(tmp_path / "out").failures)


def test_one_that_is_missing_or_too_much(tmp_path: Path) -> None:
    model, blocks = gpt_oss(tmp_path / "model")
    encode(model, tmp_path / "out", "bf16", allow_activation_mismatch=True)
    plain = {name: one for name, one in blocks.mxfp4.items() if "bias" not in name}
    unbiased = write_checkpoint(tmp_path / "plain", plain, simple_config(**SIZES))
    found = check(tmp_path / "out", unbiased)
    assert any("down_proj.bias" in one.message for one in found.failures)
    encode(unbiased, tmp_path / "without", "bf16")
    found = check(tmp_path / "without", model)
    missing = {one.tensor for one in found.failures if one.check == "missing tensor"}
    assert missing > {f"model.layers.0.mlp.experts.0.{proj}_proj.bias" for proj in PROJECTIONS}


def test_the_manifest_has_their_checksums(tmp_path: Path) -> None:
    model, _ = gpt_oss(tmp_path / "model")
    encode(model, tmp_path / "out", "bf16", allow_activation_mismatch=True)
    units = read_json(tmp_path / "out" / "ktconv.json")["units"].values()
    assert sum(is_bias(name) for unit in units for name in unit["tensors"]) == 3 * EXPERTS
    assert open_checkpoint(str(tmp_path / "out")).layers[0].hidden_size == HIDDEN
    assert open_checkpoint(str(tmp_path / "out")).layers[0].intermediate_size == INNER
