"""`--adapter` in conversions: the bytes are those of a checkpoint whose weights are merged."""

from __future__ import annotations

import json
import shutil
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
    found, expected = shards(tmp_path / "one"), shards(tmp_path / "other")
    assert found == expected
    if name == "bf16":  # shows what is merged
        library.quantize_cpu(EXAMPLE, tmp_path / "plain", **options)
        plain = shards(tmp_path / "plain")
        assert found.keys() == plain.keys()
        assert {one for one in found if found[one] == plain[one]} == {"config.json"}
    assert library.verify(tmp_path / "one", source=EXAMPLE, adapter=adapter, level="weights")[
        "passed"
    ]


@needs_torch
def test_experts_for_gpus(adapter: Path, merged: Path, tmp_path: Path) -> None:
    library.quantize_gpu(EXAMPLE, tmp_path / "one", adapter=[adapter])
    library.quantize_gpu(merged, tmp_path / "other")
    assert shards(tmp_path / "one") == shards(tmp_path / "other")
    result = library.verify(tmp_path / "one", source=EXAMPLE, adapter=adapter, level="weights")
    assert result["passed"]


@needs_torch
def test_calibrated_experts_for_gpus(adapter: Path, merged: Path, tmp_path: Path) -> None:
    if find_spec("llmcompressor") is None:
        pytest.skip("llmcompressor is not installed")
    options: Any = {
        "algorithm": "gptq",
        "dataset": TEXT,
        "samples": 4,
        "max_seq_len": 64,
        "threads": 1,
    }
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
    adapter = copy_of(adapter, tmp_path / "there")  # next to the outputs
    given, named = f"{adapter}:0.5", "there:0.5"
    layers, merged, cut = (tmp_path / name for name in ("layers", "merged", "cut"))
    library.quantize_cpu(EXAMPLE, layers, adapter=given, layout="layers", numa=2)
    library.merge(layers, merged, source=EXAMPLE)
    library.reshard(merged, cut, numa=1, source=EXAMPLE)
    library.quantize_cpu(EXAMPLE, tmp_path / "at-once", adapter=given, numa=1)
    assert shards(cut) == shards(tmp_path / "at-once")
    for output in (layers, merged, cut):
        assert read_json(output / "ktconv.json")["adapters"] == [named]
        assert library.verify(output, source=EXAMPLE, level="weights")["passed"]
        assert library.inspect(output)["adapters"] == [named]
    library.merge(layers, tmp_path / "alone")
    assert read_json(tmp_path / "alone" / "ktconv.json")["adapters"] == [named]
    other = ktconv("reshard", merged, tmp_path / "other", "--numa=1", f"--source={EXAMPLE}",
                   f"--adapter={adapter}")  # fmt: skip
    assert "from another model than" in refused(other, 2)
    assert not (tmp_path / "other").exists()


def test_several_conversions_are_compared(adapter: Path, tmp_path: Path) -> None:
    adapter = copy_of(adapter, tmp_path / "adapter")
    for method in ("int4", "int8"):
        library.quantize_cpu(EXAMPLE, tmp_path / method, adapter=adapter, method=method)
    found = library.compare(tmp_path / "int4", tmp_path / "int8", source=EXAMPLE, level="weights")
    assert found["passed"]


def copy_of(adapter: Path, to: Path) -> Path:
    shutil.copytree(adapter, to)
    return to


WORDS = (f"--source={EXAMPLE}", "--level=weights")


def test_verify_needs_the_adapter(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Next to the output, in the current directory, or where the option says; another one is
    another source."""
    there, output = copy_of(adapter, tmp_path / "there"), tmp_path / "out"
    library.quantize_cpu(EXAMPLE, output, adapter=there)
    assert "note: adapters are those that ktconv.json names: there:1.0" in ktconv_done(
        "verify", output, *WORDS
    )
    report = tmp_path / "report.html"
    ktconv_done("verify", output, *WORDS, f"--report={report}")
    assert "names: there:1.0" in report.read_text()
    assert str(there) not in report.read_text()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    there.rename(elsewhere / "there")
    done = ktconv("verify", output, *WORDS)
    refused(done, 2, "converted with the adapter there, which is neither next to it")
    assert "say where it is: --adapter DIR/there" in done.stderr
    monkeypatch.chdir(elsewhere)
    assert "OK" in ktconv_done("verify", output, *WORDS)
    moved = (elsewhere / "there").rename(tmp_path / "moved")
    assert "OK" in ktconv_done("verify", output, *WORDS, f"--adapter={moved}")
    done = ktconv("verify", output, *WORDS, f"--adapter={moved}:0.5")
    assert done.exit_code == 1
    assert "adapter 1 x 1.0/adapter_model.safetensors of the source differs" in done.output


def test_adapters_of_one_name(adapter: Path, tmp_path: Path) -> None:
    """As checkpoints of several trainings have: neither is taken for the other."""
    model = tmp_path / "model"
    shutil.copytree(EXAMPLE, model)
    far = copy_of(adapter, tmp_path / "run" / "checkpoint-500")
    settings = read_json(far / "adapter_config.json")
    (far / "adapter_config.json").write_text(json.dumps(settings | {"lora_alpha": 1}))
    near = copy_of(adapter, tmp_path / "checkpoint-500")
    output = tmp_path / "out"
    given = [f"{far}:0.5", str(near)]
    library.quantize_cpu(model, output, adapter=given)
    assert read_json(output / "ktconv.json")["adapters"] == [
        "checkpoint-500:0.5", "checkpoint-500:1.0",
    ]  # fmt: skip
    words = ("verify", output, f"--source={model}", "--level=weights")
    done = ktconv(*words)
    refused(done, 2, "with the adapter checkpoint-500")
    both = "--adapter DIR/checkpoint-500:0.5 --adapter DIR/checkpoint-500"
    assert f"say where it is: {both}" in done.stderr
    assert "OK" in ktconv_done(*words, *(f"--adapter={one}" for one in given))
    far.rename(model / "checkpoint-500")
    assert "OK" in ktconv_done(*words)


def test_nothing_says_where_an_adapter_lay(adapter: Path, tmp_path: Path) -> None:
    """Outputs are published with their manifest."""
    library.quantize_cpu(EXAMPLE, tmp_path / "out", adapter=f"{adapter}:2", method="bf16")
    library.quantize_gpu(EXAMPLE, tmp_path / "gpu", adapter=adapter)
    for output in ("out", "gpu"):
        for name, data in all_files(tmp_path / output).items():
            assert str(adapter.parent).encode() not in data, name


@pytest.mark.parametrize("text", ["/etc", ":1", "x:", "x:y", "x:nan"])
def test_a_manifest_that_names_no_weight(text: str, adapter: Path, tmp_path: Path) -> None:
    library.quantize_cpu(EXAMPLE, tmp_path / "out", adapter=adapter)
    path = tmp_path / "out" / "ktconv.json"
    path.write_text(json.dumps(read_json(path) | {"adapters": [text]}))
    done = ktconv("verify", tmp_path / "out", *WORDS)
    refused(done, 2, f"names the adapter '{text}', which has no weight")


def test_outputs_of_other_adapters_are_not_compared(adapter: Path, tmp_path: Path) -> None:
    for weight in (1, 2):
        library.quantize_cpu(EXAMPLE, tmp_path / str(weight), adapter=f"{adapter}:{weight}")
    done = ktconv("compare", tmp_path / "1", tmp_path / "2", f"--source={EXAMPLE}")
    refused(done, 2, "with adapter:1.0, and", "with adapter:2.0: they are of different models")


@pytest.mark.parametrize("method", ["int4", "bf16"])
def test_verify_does_not_believe_the_sums(
    method: str, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A converter that adds too much would read its source in that way again."""
    from ktconv.source.reading import merged as module

    exact = module.exact
    monkeypatch.setattr(module, "exact", lambda a, b, scale: exact(a, b, scale * 1.01))
    library.quantize_cpu(EXAMPLE, tmp_path / "out", adapter=adapter, method=method)
    result = library.verify(tmp_path / "out", source=EXAMPLE, adapter=adapter, level="weights")
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
