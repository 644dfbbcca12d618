"""Which engines are said to read a checkpoint of encoded experts: in the plan, card and inspect."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub as hub
import pytest
from helpers.cli import ktconv
from helpers.families import (
    Weights,
    numbered,
    random_weights,
    simple_config,
    write_checkpoint,
)

from ktconv.inspect.inspection import inspect_path
from ktconv.targets.encoded import readers
from ktconv.targets.encoded.scheme import SCHEMES

ALL = "vLLM 0.32, SGLang 0.5.23, sglang-kt 0.7.2 and transformers 5.17 read it."
WITH_KT = "With KTransformers it is what `--model` names"


def usual(directory: Path) -> Path:
    """Qwen3-MoE: experts named as most models' are."""
    tensors = numbered("model.layers.0.mlp.experts", random_weights())
    return write_checkpoint(directory / "usual", tensors, simple_config())


def mixtral(directory: Path, kind: str = "mixtral") -> Path:
    """Experts named block_sparse_moe.experts.N.w1, as MiniMax-M3's."""
    weights: Weights = random_weights()
    tensors = numbered("model.layers.0.block_sparse_moe.experts", weights, ("w1", "w3", "w2"))
    config = simple_config(
        model_type=kind, num_experts=None, num_local_experts=len(weights.gate),
        intermediate_size=weights.gate.shape[1],
    )  # fmt: skip
    return write_checkpoint(directory / kind, tensors, config)


def converted(source: Path, *words: object) -> tuple[str, str, str]:
    """The card, its library, and what was said."""
    output = source.with_name(f"{source.name}-out")
    result = ktconv(words[0], source, output, *words[1:])
    assert result.exit_code == 0, result.stderr
    path = output / "README.md"
    card = " ".join(path.read_text().split())
    return card, hub.ModelCard.load(path).data.to_dict()["library_name"], result.stderr


def test_rows_name_formats_that_there_are() -> None:
    named = {name for reader in readers.READERS for name in (*reader.fails, *reader.types)}
    assert named <= SCHEMES.keys()
    assert all(reader.types.keys() <= reader.fails.keys() for reader in readers.READERS)


@pytest.mark.parametrize("scheme", ["W4A16", "W8A16", "FP8_DYNAMIC"])
def test_what_all_read(scheme: str, tmp_path: Path) -> None:
    card, library, said = converted(usual(tmp_path), "quantize-gpu", "--scheme", scheme)
    assert ALL in card and WITH_KT in card
    assert library == "transformers"
    assert "is not for" not in said


@pytest.mark.parametrize(
    ("scheme", "library", "able", "others"),
    [
        (
            "MXFP4A16",
            "transformers",
            "vLLM 0.32 and transformers 5.17 read it.",
            [
                "SGLang 0.5.23 leaves the experts out without an error",
                "sglang-kt 0.7.2 refuses it",
            ],
        ),
        (
            "NVFP4A16",
            "vllm",
            "vLLM 0.32 and SGLang 0.5.23 read it.",
            ["sglang-kt 0.7.2 refuses it", "transformers 5.17 computes wrong results"],
        ),
        (
            "FP8_BLOCK",
            "vllm",
            "vLLM 0.32, SGLang 0.5.23 and sglang-kt 0.7.2 read it.",
            ["transformers 5.17 fails on blocks"],
        ),
        (
            "MXFP8",
            "vllm",
            "vLLM 0.32 reads it.",
            [
                "SGLang 0.5.23 refuses it",
                "sglang-kt 0.7.2 refuses it",
                "transformers 5.17 fails on groups",
            ],
        ),
    ],
)
def test_what_some_do_not_read(
    scheme: str, library: str, able: str, others: list[str], tmp_path: Path
) -> None:
    source = usual(tmp_path)
    card, found, said = converted(source, "quantize-gpu", "--scheme", scheme)
    assert able in card and found == library
    assert (WITH_KT in card) == (scheme == "FP8_BLOCK")
    for failure in others:
        assert failure in card and f"note: {scheme} is not for {failure.split()[0]}: " in said
        assert failure in said


def test_mxfp8_under_names_that_vllm_does_not_know(tmp_path: Path) -> None:
    """vLLM renames the scales in MiniMax-M3's class alone."""
    card, library, said = converted(mixtral(tmp_path), "quantize-cpu", "--method", "mxfp8")
    assert "SGLang 0.5.23, sglang-kt 0.7.2 and transformers 5.17 read it." in card
    assert "vLLM 0.32 ends with an error about weight_scale_inv." in card
    assert "mxfp8 is not for vLLM: " in said
    assert library == "ktransformers"
    assert readers.VLLM.failure("mxfp8", ["minimax_m3_vl"]) is None


def test_inspect_names_them_before_a_conversion(tmp_path: Path) -> None:
    found = {one: inspect_path(str(one))["methods"] for one in (usual(tmp_path), mixtral(tmp_path))}
    qwen, other = found.values()
    assert qwen["fp8"]["read_by"] == [one.title for one in readers.READERS]
    assert qwen["nvfp4"]["read_by"] == ["vLLM 0.32", "SGLang 0.5.23", "sglang-kt 0.7.2"]
    assert qwen["mxfp8"]["read_by"] == qwen["awq"]["read_by"] == []  # named for KTransformers
    assert other["mxfp8"]["read_by"] == ["SGLang 0.5.23", "sglang-kt 0.7.2", "transformers 5.17"]
    assert other["rawint4"]["read_by"] == []
    assert "read_by" not in qwen["int4"]  # no engine loads the packed bytes by config.json
