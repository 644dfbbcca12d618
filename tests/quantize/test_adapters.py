"""`--adapter` in conversions: the bytes are those of a checkpoint whose weights are merged."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.cli import ktconv, ktconv_done, refused
from helpers.convert import all_files, read_json
from helpers.lora import Sides, sides, write_adapter
from helpers.paths import EXAMPLE
from safetensors.numpy import save_file

import ktconv as library
from ktconv.source import ModelSource, open_checkpoint
from ktconv.source.reading.tensors import SourceTensors

pytestmark = pytest.mark.slow

HIDDEN, INNER = 128, 256
TEXT = EXAMPLE.parent / "eval.txt"
needs_torch = pytest.mark.skipif(
    find_spec("torch") is None or find_spec("transformers") is None, reason="needs transformers"
)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all experts and of attention."""
    rng = np.random.default_rng(6)
    modules: dict[str, Sides] = {}
    for layer in range(2):
        start = f"model.layers.{layer}"
        for expert in range(8):
            for name in ("gate", "up", "down"):
                shape = (HIDDEN, INNER) if name == "down" else (INNER, HIDDEN)
                modules[f"{start}.mlp.experts.{expert}.{name}_proj"] = sides(rng, *shape)
        modules[f"{start}.self_attn.q_proj"] = sides(rng, HIDDEN, HIDDEN)
    return write_adapter(tmp_path_factory.mktemp("lora") / "adapter", modules)


@pytest.fixture(scope="module")
def merged(adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with the sums in float32, and in bf16 beside the experts."""
    checkpoint = open_checkpoint(ModelSource(EXAMPLE, adapter=(str(adapter),)))
    source, stored = SourceTensors(checkpoint), {}
    for layer in checkpoint.layers:
        for number in range(8):
            for name, one in zip(("gate", "up", "down"), source.expert(layer, number), strict=True):
                assert one is not None
                stored[f"{layer.source}.{number}.{name}_proj.weight"] = one.values()
    directory = tmp_path_factory.mktemp("merged") / "model"
    directory.mkdir()
    for path in EXAMPLE.glob("*.json"):
        if "index" not in path.name:
            (directory / path.name).write_bytes(path.read_bytes())
    save_file(stored, directory / "model-1.safetensors")
    from safetensors.torch import save_file as save_others
    from torch import bfloat16, from_numpy

    others = {
        one.name: from_numpy(source.plain(one)).to(bfloat16) for one in checkpoint.other_tensors
    }
    save_others(others, directory / "model-2.safetensors")
    return directory


def shards(output: Path) -> dict[str, Any]:
    return {
        name: one
        for name, one in all_files(output).items()
        if name.endswith((".safetensors", ".kt")) or name == "config.json"
    }


OPTIONS: dict[str, dict[str, Any]] = {
    "int8": {"method": "int8", "numa": 2},
    "layers": {"method": "int4", "layout": "layers"},
    "importance": {"importance": "weights"},
    "fold": {"importance": "weights", "fold": "up-down"},
    "calibrate": {"calibrate": TEXT},
    "backward": {"save_backward": True},
    "fp8": {"method": "fp8"},
    "bf16": {"method": "bf16"},
    "nvfp4": {"method": "nvfp4"},
    "bits": {"target_bits": 6},
}


@needs_torch
@pytest.mark.parametrize("name", OPTIONS)
def test_all_ways_to_convert(name: str, adapter: Path, merged: Path, tmp_path: Path) -> None:
    options = OPTIONS[name]
    library.quantize_cpu(EXAMPLE, tmp_path / "one", adapter=adapter, **options)
    library.quantize_cpu(merged, tmp_path / "other", **options)
    plain = tmp_path / "plain"
    library.quantize_cpu(EXAMPLE, plain, **options)
    found, expected = shards(tmp_path / "one"), shards(tmp_path / "other")
    assert found == expected
    assert found != shards(plain)
    assert library.verify(tmp_path / "one", source=EXAMPLE, level="weights")["passed"]


@needs_torch
def test_experts_for_gpus(adapter: Path, merged: Path, tmp_path: Path) -> None:
    library.quantize_gpu(EXAMPLE, tmp_path / "one", adapter=[adapter])
    library.quantize_gpu(merged, tmp_path / "other")
    assert shards(tmp_path / "one") == shards(tmp_path / "other")
    result = library.verify(tmp_path / "one", source=EXAMPLE, level="weights")
    assert result["passed"]


@needs_torch
def test_calibrated_experts_for_gpus(adapter: Path, merged: Path, tmp_path: Path) -> None:
    if find_spec("llmcompressor") is None:
        pytest.skip("llmcompressor is not installed")
    options: Any = {"algorithm": "gptq", "dataset": TEXT, "samples": 4, "max_seq_len": 64}
    options |= {"device": "cpu", "self_test": False}
    library.quantize_gpu(EXAMPLE, tmp_path / "one", adapter=adapter, **options)
    library.quantize_gpu(merged, tmp_path / "other", **options)
    assert shards(tmp_path / "one") == shards(tmp_path / "other")


@needs_torch
def test_statistics(adapter: Path, merged: Path) -> None:
    """What a router chooses in the model with the adapter."""
    options: Any = {"max_tokens": 500, "text": TEXT}
    one = library.stats(EXAMPLE, adapter=adapter, **options)
    other, plain = library.stats(merged, **options), library.stats(EXAMPLE, **options)
    assert one["layers"] == other["layers"] != plain["layers"]


def test_merge_and_reshard_keep_the_record(adapter: Path, tmp_path: Path) -> None:
    given = f"{adapter}:0.5"
    layers, merged, cut = (tmp_path / name for name in ("layers", "merged", "cut"))
    library.quantize_cpu(EXAMPLE, layers, adapter=given, layout="layers", numa=2)
    library.merge(layers, merged, source=EXAMPLE)
    library.reshard(merged, cut, numa=1, source=EXAMPLE)
    library.quantize_cpu(EXAMPLE, tmp_path / "at-once", adapter=given, numa=1)
    assert shards(cut) == shards(tmp_path / "at-once")
    for output in (layers, merged, cut):
        assert read_json(output / "ktconv.json")["adapters"] == [given]
        assert library.verify(output, source=EXAMPLE, level="weights")["passed"]
        assert library.inspect(output)["adapters"] == [given]
    library.merge(layers, tmp_path / "alone")
    assert read_json(tmp_path / "alone" / "ktconv.json")["adapters"] == [given]
    other = ktconv("reshard", merged, tmp_path / "other", "--numa=1", f"--source={EXAMPLE}",
                   f"--adapter={adapter}")  # fmt: skip
    assert "from another model than" in refused(other, 2)
    assert not (tmp_path / "other").exists()


def test_several_conversions_are_compared(adapter: Path, tmp_path: Path) -> None:
    for method in ("int4", "int8"):
        library.quantize_cpu(EXAMPLE, tmp_path / method, adapter=adapter, method=method)
    found = library.compare(tmp_path / "int4", tmp_path / "int8", source=EXAMPLE, level="weights")
    assert found["passed"]


def test_verify_needs_the_adapter(adapter: Path, tmp_path: Path) -> None:
    """Where it was, or where the option says; another one is another source."""
    there = tmp_path / "there"
    there.mkdir()
    for path in adapter.iterdir():
        (there / path.name).write_bytes(path.read_bytes())
    output = tmp_path / "out"
    library.quantize_cpu(EXAMPLE, output, adapter=there)
    moved = there.rename(tmp_path / "moved")
    words = ["verify", output, f"--source={EXAMPLE}", "--level=weights"]
    done = ktconv(*words)
    refused(done, 2, "was converted with the adapter", "is not there")
    assert "say where it is: --adapter dir" in done.stderr.lower()
    assert "OK" in ktconv_done(*words, f"--adapter={moved}")
    for other in (f"{moved}:0.5",):
        done = ktconv(*words, f"--adapter={other}")
        assert done.exit_code == 1
        assert "adapter 1 x 1.0/adapter_model.safetensors of the source differs" in done.output


@pytest.mark.parametrize("method", ["int4", "bf16"])
def test_verify_does_not_believe_the_sums(
    method: str, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A converter that adds too much would read its source in that way again."""
    from ktconv.source.reading import merged as module

    exact = module.exact
    monkeypatch.setattr(module, "exact", lambda a, b, scale: exact(a, b, scale * 1.01))
    library.quantize_cpu(EXAMPLE, tmp_path / "out", adapter=adapter, method=method)
    result = library.verify(tmp_path / "out", source=EXAMPLE, level="weights")
    assert not result["passed"]
    messages = " ".join(one["message"] for one in result["failures"])
    assert "was read wrongly: the value at" in messages
    assert "q_proj.weight with the adapters of the source is" in messages


def test_a_dry_run_writes_nothing(adapter: Path, tmp_path: Path) -> None:
    output, option = tmp_path / "out", f"--adapter={adapter}"
    said = ktconv_done("quantize-cpu", EXAMPLE, output, option, "--dry-run")
    assert "is added to 48 matrices of experts and 2 other matrices" in said
    assert not (tmp_path / "out").exists()
    assert library.plan(EXAMPLE, adapter=adapter, ep=2)
    assert library.inspect(EXAMPLE, adapter=adapter)["encodings"] == ["fp32"]
    said = refused(ktconv("verify", tmp_path, f"--adapter={adapter}"), 2)
    assert "--adapter belongs to --source" in said
