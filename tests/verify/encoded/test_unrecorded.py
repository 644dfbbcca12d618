"""Integers without a manifest and a recipe: their rule is found, and damage with it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from helpers.cli import ktconv, ktconv_done
from helpers.convert import read_json
from helpers.corrupt import check, forget_manifest, found
from helpers.encoded import encoded_model
from helpers.gpu_corrupt import U8, change, flip, read
from helpers.recoded import change_recorded

from ktconv.source import read_header
from ktconv.targets.encoded.scheme import names_of

pytestmark = pytest.mark.slow

INTEGERS = ("rawint4", "int4-g64", "int4-g128", "int8-g128")
MADE = [("quantize-cpu", "--method", name, "--scale", rule)
        for name in INTEGERS for rule in ("search", "amax")]  # fmt: skip
MADE += [("quantize-gpu", "--scheme", name, "--scale", rule)
         for name in ("W4A16", "W8A16") for rule in ("search", "amax")]  # fmt: skip
UP = "model.layers.1.mlp.experts.2.up_proj"


def made(model: Path, output: Path, words: tuple[str, ...]) -> Path:
    ktconv_done(words[0], model, output, *words[1:], "--threads=2")
    (output / "recipe.yaml").unlink(missing_ok=True)
    return forget_manifest(output)


@pytest.mark.parametrize("words", MADE, ids=" ".join)
def test_a_single_bit_is_found(words: tuple[str, ...], model: Path, tmp_path: Path) -> None:
    output = made(model, tmp_path / "out", words)
    result = check(output, model, "weights")
    assert result.passed, [one.message for one in result.failures]
    assert result.facts["method"] == ("rtn" if "amax" in words else "search")
    assert not any("is not known" in note for note in result.facts["notes"])
    bits = 8 if words[2] in ("int8-g128", "W8A16") else 4
    for part, check_of in (("weight_packed", "element"), ("weight_scale", "scale")):
        before = read(output, f"{UP}.{part}")
        place = len(before) // 2 & ~1

        def flip(data: U8, place: int = place) -> None:
            data[place] ^= 1 if bits == 8 else 16

        change(output, f"{UP}.{part}", flip)
        failures = {(one.check, one.expert) for one in check(output, model, "weights").failures}
        assert (check_of, 2) in failures and {expert for _, expert in failures} == {2}
        change(output, f"{UP}.{part}", partial(np.copyto, src=before))


def test_many_flipped_bits_are_found(model: Path, tmp_path: Path) -> None:
    """As many as an element's bound would let pass."""
    output = made(model, tmp_path / "out", ("quantize-cpu", "--method", "rawint4"))
    places = np.random.default_rng(3).integers(0, 256 * 128, 2400)
    for expert in range(3):
        name = f"model.layers.0.mlp.experts.{expert}.up_proj.weight_packed"
        change(output, name, lambda data: np.bitwise_xor.at(data, places, 1))
    assert not check(output, model, "weights").passed


def test_what_no_rule_explains_fails(model: Path, tmp_path: Path) -> None:
    """Codes that are not the nearest: those of GPTQ, if nothing says so, or of a broken tool."""
    output = made(model, tmp_path / "out", ("quantize-gpu", "--scheme", "W4A16"))
    rng = np.random.default_rng(2)
    for shard in output.glob("*.safetensors"):
        for tensor in read_header(shard).tensors:
            if tensor.name.endswith(".weight_packed"):

                def nudge(data: U8) -> None:
                    low = data & 15
                    moved = np.where((rng.random(len(data)) < 0.4) & (low < 15), low + 1, low)
                    data[:] = (data & 0xF0) | moved.astype(np.uint8)

                change(output, tensor.name, nudge)
    failures = found(check(output, model, "weights"), "weights", "rule")
    assert "follow no known rule" in failures[0]["message"]
    (output / "recipe.yaml").write_text("stage:\n  GPTQModifier:\n    bits: 4\n")
    assert check(output, model, "weights").passed


@pytest.mark.parametrize("kind", ["int4 packed, group 32", "gptq in order"])
def test_codes_that_were_kept(kind: str, tmp_path: Path) -> None:
    """Of a source that has the format already, whose codes are no rounding of anything here."""
    model, _, _ = encoded_model(tmp_path / "model", kind)
    for method in INTEGERS:
        said = ktconv("quantize-cpu", model, tmp_path / method, "--method", method)
        if said.exit_code:
            continue
        output = forget_manifest(tmp_path / method)
        result = check(output, model, "weights")
        assert result.passed, (method, [one.message for one in result.failures])


@pytest.mark.parametrize("command", ["quantize-cpu", "quantize-gpu"])
def test_no_method_passes_damaged_without_a_manifest(
    command: str, model: Path, tmp_path: Path
) -> None:
    """An undamaged output passes; one of plain bf16, which nothing tells from an ordinary
    checkpoint, with its source only."""
    for name in names_of(command):  # type: ignore[arg-type]
        option = "--method" if command == "quantize-cpu" else "--scheme"
        output = tmp_path / name
        said = ktconv(command, model, output, option, name, "--threads=2")
        assert said.exit_code == 0, said.stderr
        forget_manifest(output)
        said = ktconv("verify", output, "--source", model, "--level", "weights")
        assert said.exit_code == 0, (name, said.stdout, said.stderr)
        alone = ktconv("verify", output)
        assert alone.exit_code == (2 if name == "bf16" else 0), (name, alone.stderr)
        index = read_json(output / "model.safetensors.index.json")["weight_map"]
        codes = next(
            tensor for tensor in sorted(index)
            if ("experts.2." in tensor or "exps.2" in tensor) and "scale" not in tensor
            and not tensor.endswith(("shape", "qzeros", "g_idx"))
        )  # fmt: skip

        def flip(data: U8) -> None:
            data[101] ^= 16

        change(output, codes, flip)
        said = ktconv("verify", output, "--source", model, "--level", "weights")
        assert said.exit_code == 1, (name, said.stdout)


@pytest.mark.parametrize(("words", "part"), [
    (("quantize-cpu", "--method", "nvfp4"), "weight_scale_2"),
    (("quantize-gpu", "--scheme", "NVFP4A16"), "weight_global_scale"),
], ids=["nvfp4", "NVFP4A16"])  # fmt: skip
def test_the_last_bit_of_a_second_scale(
    words: tuple[str, ...], part: str, model: Path, tmp_path: Path
) -> None:
    """With a manifest that was forged to fit."""

    output = tmp_path / "out"
    ktconv_done(words[0], model, output, *words[1:], "--threads=2")
    assert check(output, model, "weights").passed
    for proj in ("gate_proj", "up_proj", "down_proj"):
        name = f"model.layers.1.mlp.experts.2.{proj}.{part}"
        before = read(output, name)

        change_recorded(output, name, flip)
        failures = check(output, model, "weights").failures
        assert ("scale", 2, name) in {(one.check, one.expert, one.tensor) for one in failures}
        change_recorded(output, name, partial(np.copyto, src=before))
    assert check(output, model, "weights").passed


def test_damage_in_the_first_expert_is_named(model: Path, tmp_path: Path) -> None:
    """The format is that of the first expert that is whole."""
    output = tmp_path / "out"
    ktconv_done("quantize-cpu", model, output, "--method", "mxfp4", "--threads=2")
    forget_manifest(output)
    index = read_json(output / "model.safetensors.index.json")
    name = min(one for one in index["weight_map"] if "experts" in one and "shared" not in one)
    del index["weight_map"][name]
    (output / "model.safetensors.index.json").write_text(json.dumps(index))
    said = ktconv("verify", output, "--source", model, "--level", "structure")
    assert said.exit_code == 1 and name.rpartition(".")[0] in said.stdout, said.stdout


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "MXFP8", "MXFP4A16"])
def test_a_scheme_has_its_own_name(scheme: str, model: Path, tmp_path: Path) -> None:
    """Its group in config.json has bits, as integers have them."""
    output = tmp_path / "out"
    ktconv_done("quantize-gpu", model, output, "--scheme", scheme, "--threads=2")
    assert check(output, model, "structure").facts["scheme"] == scheme
    forget_manifest(output)
    assert check(output, model, "structure").facts["scheme"] == scheme
