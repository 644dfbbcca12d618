"""GPTQ on the trained tiny models: quality, what is quantized and what is not, bad input."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import signal
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.convert import read_shards
from helpers.corrupt import check
from helpers.encoded import in_int8
from helpers.forked import forked
from helpers.gpu import stacked
from helpers.oneshot import oneshot_experts
from helpers.paths import MODELS
from msgspec.structs import replace

from ktconv.conversion.pipeline import Observer
from ktconv.errors import CheckpointError, KtconvError, ResourceError, UsageError, VerificationError
from ktconv.quantize.encoded.request import Request
from ktconv.quantize.llm_compressor.gptq.calibration import load_tokenizer, read_samples
from ktconv.quantize.llm_compressor.gptq.coverage import Counter
from ktconv.quantize.llm_compressor.run import prepare, quantize_gpu
from ktconv.targets.encoded.target import Calibration, Options

pytestmark = [
    pytest.mark.slow,
    pytest.mark.torch,
    # Not imported: ktconv quiets it before.
    pytest.mark.skipif(find_spec("llmcompressor") is None, reason="llmcompressor is not installed"),
    pytest.mark.skipif(not MODELS.is_dir(), reason="the trained models are not here"),
]

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
PARTS = ("weight_packed", "weight_scale", "weight_shape")
LONG = 512  # tokens of a sample where quality counts: few samples, as each passes every expert
EXPERTS = 6  # of 16 in models that are cut; a token has 4
EVALUATED = 5  # windows of 512 tokens from the start of a model's text; calibration has the rest


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Calibration text that evaluation does not see."""
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    content = (MODELS / "tiny-qwen3moe/eval.txt").read_bytes()
    path.write_bytes(content[60_000:])
    return path


def request(model: Path, output: Path, text: object, **changes: Any) -> Request:
    """A short calibration on one thread; `changes` are fields of Request, Options, Calibration."""
    fields = changes.keys() & {*Request.__struct_fields__}
    of_request = {name: changes.pop(name) for name in fields}
    length = changes.pop("max_seq_len", 128)
    settings = Calibration(str(text), samples=changes.pop("samples", 4), max_seq_len=length)
    options: dict[str, Any] = {"method": "gptq", "calibration": settings, "dampening": 0.1}
    wanted: dict[str, Any] = {"threads": 1, "self_test": False, "device": "cpu"} | of_request
    return Request(str(model), output, Options(**(options | changes)), **wanted)


def tensors(output: Path) -> dict[str, Any]:
    return read_shards(sorted(output.glob("*.safetensors")))


# ---- the trained models ----------------------------------------------------------------


@pytest.fixture(scope="module", params=["tiny-qwen3moe", "tiny-deepseekv3"])
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, text: Path
) -> tuple[Path, Path]:
    """(model, its GPTQ W4A16)"""
    model, output = MODELS / request.param, tmp_path_factory.mktemp("gptq") / "output"
    quantize(model, output, text, max_seq_len=LONG)
    return model, output


def quantize(model: Path, output: Path, text: object, **changes: Any) -> Any:
    return quantize_gpu(request(model, output, text, **changes))


def perplexity(torch: Any, directory: Path, windows: list[Any]) -> tuple[float, Any]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    losses = []
    with torch.inference_mode():
        for ids in windows:
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
            losses.append(torch.nn.functional.cross_entropy(logits, ids[0, 1:]).item())
    return math.exp(sum(losses) / len(losses)), model


def test_perplexity_is_not_worse_than_rounded_to_nearest(
    torch: Any, trained: tuple[Path, Path], tmp_path: Path
) -> None:
    """Loaded by transformers, which also generates."""
    from ktconv.model.evaluate import windows

    model, output = trained
    quantize_gpu(Request(str(model), tmp_path / "rtn", threads=1, device="cpu"))
    tokenizer = load_tokenizer(output)
    texts = windows(tokenizer, (model / "eval.txt").read_text(), 512, EVALUATED)
    source, _ = perplexity(torch, model, texts)
    rtn, _ = perplexity(torch, tmp_path / "rtn", texts)
    gptq, loaded = perplexity(torch, output, texts)
    assert source * 0.99 < gptq <= rtn < source * 1.05, (source, gptq, rtn)
    prompt = texts[0][:, :16]
    written = loaded.generate(prompt, max_new_tokens=8, do_sample=False)
    assert written.shape == (1, 24)


def test_all_experts_are_quantized_and_nothing_else(trained: tuple[Path, Path]) -> None:
    model, output = trained
    source, found = tensors(model), tensors(output)
    experts = {name.removesuffix(".weight") for name in source if ".mlp.experts." in name}
    assert len(experts) >= 3 * 3 * 16
    assert {name for name in found if ".mlp.experts." in name} == {
        f"{module}.{part}" for module in experts for part in PARTS
    }
    assert {n: found[n] for n in found if ".mlp.experts." not in n} == {
        n: source[n] for n in source if ".mlp.experts." not in n
    }


def test_every_expert_is_nearer_to_its_source_than_another(trained: tuple[Path, Path]) -> None:
    """The manifest's errors: swapped experts or projections would be far off."""
    _, output = trained
    manifest = json.loads((output / "ktconv.json").read_text())
    errors = [
        about["relative_rms_error"]
        for unit in manifest["units"].values()
        for name, about in unit["tensors"].items()
        if name.endswith("weight_packed")
    ]
    assert len(errors) >= 3 * 3 * 16 and min(errors) > 0.05 and max(errors) < 0.25


def test_only_tokens_with_an_expert_are_counted() -> None:
    """Of LongCat's some have none, and Llama 4 has a row per token and expert."""
    counter = Counter(4)
    counter.add(np.array([[0, -1], [-1, 3], [-1, -1], [3, 1]]))
    found = counter.result(())
    assert (found.tokens, found.top_k, list(found.routed)) == (3, 2, [1, 1, 0, 2])


def test_coverage_is_what_the_router_chooses(
    torch: Any, trained: tuple[Path, Path], text: Path
) -> None:
    """Of the first MoE layer, whose router sees the same in the source model. It would not if
    calibration let every token see the whole text, as llm-compressor by itself does."""
    from transformers import AutoModelForCausalLM

    from ktconv.model.sites import find_experts
    from ktconv.quantize.llm_compressor.gptq.run import coverage_of

    model, output = trained
    coverage = coverage_of(output)
    first = min(coverage)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    chosen: list[Any] = []
    module = find_experts(loaded)[first].module
    module.register_forward_pre_hook(lambda _, args: chosen.append(args[1]))
    samples = read_samples(
        Calibration(str(text), samples=4, max_seq_len=LONG), load_tokenizer(model)
    )
    with torch.inference_mode():
        for ids in samples.ids:
            loaded(input_ids=torch.tensor([list(ids)]), use_cache=False)
    counted = torch.bincount(torch.cat(chosen).reshape(-1), minlength=16).tolist()
    assert sum(counted) == 4 * LONG * 4
    # Experts that run one by one sum up in another order, so a near tie can fall otherwise.
    assert sum(abs(a - b) for a, b in zip(counted, coverage[first].routed, strict=True)) <= 8
    assert all(layer.tokens == 4 * LONG and layer.top_k == 4 for layer in coverage.values())


@pytest.fixture(scope="module")
def three(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """(three layers of tiny-qwen3moe, GPTQ of two experts of each in a run without interruption,
    the file that names them)"""
    directory = tmp_path_factory.mktemp("three")
    model, chosen = cut(directory / "model", layers=3), directory / "hot.json"
    experts = {str(layer): [2, 5] for layer in range(3)}
    chosen.write_text(json.dumps({"schema": 1, "experts": experts}))
    quantize(model, directory / "clean", text, samples=2, experts=chosen)
    return model, directory / "clean", chosen


def test_a_killed_run_goes_on_and_ends_the_same(
    three: tuple[Path, Path, Path], text: Path, tmp_path: Path, passed: list[int]
) -> None:
    class Killer(Observer):
        def unit_started(self, key: str) -> None:
            if key == "layer-00002":
                os.kill(os.getpid(), signal.SIGKILL)

    model, clean, chosen = three
    output = tmp_path / "output"
    asked = request(model, output, text, samples=2, experts=chosen)
    assert forked(lambda: quantize_gpu(asked, Killer())) == -signal.SIGKILL
    kept = {path.name: path.stat().st_mtime_ns for path in output.glob("*.safetensors")}
    report = quantize(model, output, text, samples=2, experts=chosen)
    assert report.complete and "layer-00001" in report.kept and "layer-00002" in report.converted
    assert passed == [2]  # no earlier layer ran again
    after = {path.name: path.stat().st_mtime_ns for path in output.glob("*.safetensors")}
    assert len(kept) >= 2 and after | kept == after
    same_files(output, clean)
    again = quantize(model, output, text, samples=2, experts=chosen)
    assert again.complete and not again.converted and passed == [2]


def same_files(output: Path, expected: Path) -> None:
    files = sorted(path.name for path in output.iterdir())
    assert files == sorted(path.name for path in expected.iterdir())
    for name in files:
        assert (output / name).read_bytes() == (expected / name).read_bytes(), name


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Layers whose experts run."""
    from ktconv.quantize.llm_compressor.gptq.runner import GptqRunner

    found: list[int] = []
    run = GptqRunner.run

    def recorded(self: Any, layer: Any, *others: Any) -> None:
        found.append(layer.index)
        run(self, layer, *others)

    monkeypatch.setattr(GptqRunner, "run", recorded)
    return found


class Ending(Observer):
    """Interrupts at an event of a unit."""

    def __init__(self, event: str) -> None:
        self._event = event

    def unit_started(self, key: str) -> None:
        self._reached(f"started {key}")

    def unit_finished(self, key: str) -> None:
        self._reached(f"finished {key}")

    def _reached(self, event: str) -> None:
        if event == self._event:
            raise KeyboardInterrupt


def changed_byte(folder: Path) -> None:
    for path in folder.glob("states-*.bin"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


@pytest.mark.parametrize(
    ("event", "damage", "ran"),
    [
        ("finished layer-00001", lambda _: None, [1, 2]),  # before the state is written
        ("started layer-00002", lambda _: None, [2]),
        ("started layer-00002", lambda output: shutil.rmtree(output / ".ktconv/pass"), [0, 1, 2]),
        ("started layer-00002", lambda output: changed_byte(output / ".ktconv/pass"), [0, 1, 2]),
        ("started layer-00002", lambda output: first_shard(output).unlink(), [0, 1, 2]),
    ],
)
def test_what_an_interrupted_run_left_is_used_or_made_again(
    three: tuple[Path, Path, Path], text: Path, tmp_path: Path, passed: list[int], event: str,
    damage: Callable[[Path], None], ran: list[int],
) -> None:  # fmt: skip
    """Down to the last bit, whatever is lost."""
    model, clean, chosen = three
    output = tmp_path / "output"
    asked = request(model, output, text, samples=2, experts=chosen)
    with pytest.raises(KeyboardInterrupt):
        quantize_gpu(asked, Ending(event))
    damage(output)
    passed.clear()
    assert quantize_gpu(asked).complete
    assert passed == ran
    same_files(output, clean)


def first_shard(output: Path) -> Path:
    """That of the first layer's experts."""
    for path in sorted(output.glob("*.safetensors")):
        if b"model.layers.0.mlp.experts.2." in path.read_bytes()[:100_000]:
            return path
    raise AssertionError("no shard has the first layer")


def test_stacked_experts_are_the_same(text: Path, tmp_path: Path, passed: list[int]) -> None:
    """Also where a layer is read again because the samples between two layers are lost."""
    model = cut(tmp_path / "model", layers=2)
    quantize(model, tmp_path / "numbered", text, samples=4)
    asked = request(model, tmp_path / "output", text, samples=4, expert_layout="stacked")
    with pytest.raises(KeyboardInterrupt):
        quantize_gpu(asked, Ending("started layer-00001"))
    shutil.rmtree(tmp_path / "output/.ktconv/pass")
    passed.clear()
    assert quantize_gpu(asked).complete and passed == [0, 1]
    assert tensors(tmp_path / "output") == stacked(tensors(tmp_path / "numbered"), "stacked")
    assert check(tmp_path / "output", model).passed


# ---- one layer of a trained model ------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first layer of tiny-qwen3moe as a model."""
    return cut(tmp_path_factory.mktemp("small") / "model")


def cut(directory: Path, fused: bool = False, layers: int = 1) -> Path:
    """Writes the first layers with the first experts; `fused` (of one) as transformers stores
    experts, all of a layer in two tensors."""
    import torch
    from safetensors.torch import load_file, save_file

    source = MODELS / "tiny-qwen3moe"
    directory.mkdir()
    config = json.loads((source / "config.json").read_text()) | {"num_hidden_layers": layers}
    config |= {"layer_types": ["full_attention"] * layers, "num_local_experts": EXPERTS}
    (directory / "config.json").write_text(json.dumps(config))
    for path in source.glob("tokenizer*"):
        shutil.copy(path, directory / path.name)
    weights = {
        name: tensor
        for shard in sorted(source.glob("*.safetensors"))
        for name, tensor in load_file(shard).items()
        if ".layers." not in name or int(name.split(".layers.")[1].split(".")[0]) < layers
        if ".experts." not in name or int(name.split(".experts.")[1].split(".")[0]) < EXPERTS
    }
    for layer in range(layers):
        router = f"model.layers.{layer}.mlp.gate.weight"
        weights[router] = weights[router][:EXPERTS].clone()
    if fused:
        prefix = "model.layers.0.mlp.experts"
        taken = {
            proj: [weights.pop(f"{prefix}.{expert}.{proj}.weight") for expert in range(EXPERTS)]
            for proj in PROJECTIONS
        }
        both = [torch.cat(pair) for pair in zip(taken["gate_proj"], taken["up_proj"], strict=True)]
        weights[f"{prefix}.gate_up_proj"] = torch.stack(both)
        weights[f"{prefix}.down_proj"] = torch.stack(taken["down_proj"])
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def observed(
    small: Path, text: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any, Silent]:
    """(output of a run with that layer, its report, what its observer has been told)"""
    output, observer = tmp_path_factory.mktemp("one") / "output", Silent()
    return output, quantize_gpu(request(small, output, text), observer), observer


@pytest.fixture(scope="module")
def quantized(observed: tuple[Path, Any, Silent]) -> dict[str, Any]:
    return tensors(observed[0])


def test_the_library_by_itself_comes_to_the_same(torch: Any, text: Path, tmp_path: Path) -> None:
    """Two layers by llm-compressor's oneshot, in memory: the second sees what the first one, which
    is rounded, answers."""
    from compressed_tensors.quantization import QuantizationArgs

    from ktconv.quantize.llm_compressor.gptq.rounding import Rounding

    model, chosen = cut(tmp_path / "model", layers=2), tmp_path / "hot.json"
    experts = {str(layer): [2, 3, 5] for layer in range(2)}
    chosen.write_text(json.dumps({"schema": 1, "experts": experts}))
    quantize(model, tmp_path / "output", text, experts=chosen)
    found = tensors(tmp_path / "output")
    weights = QuantizationArgs(num_bits=4, strategy="group", group_size=128)
    samples = read_samples(
        Calibration(str(text), samples=4, max_seq_len=128), load_tokenizer(model)
    )
    expected = oneshot_experts(model, [2, 3, 5], samples.ids, weights, 0.1)
    assert len(expected) == 2 * 3 * 3
    for name, weight in expected.items():
        packed = {part: as_tensor(torch, found[f"{name}.{part}"]) for part in PARTS}
        assert torch.equal(Rounding(weights, 0.1).values(packed), weight), name


@pytest.fixture
def rounding(torch: Any) -> Any:
    from compressed_tensors.quantization import QuantizationArgs

    from ktconv.quantize.llm_compressor.gptq.rounding import Rounding

    return Rounding(QuantizationArgs(num_bits=4, strategy="group", group_size=32), 0.1)


def test_matrices_with_the_same_inputs_are_rounded_as_each_by_itself(
    torch: Any, rounding: Any
) -> None:
    from ktconv.quantize.llm_compressor.gptq.rounding import Hessian

    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(96, 128, generator=generator).bfloat16() for _ in range(5)]
    inputs = Hessian(128, "cpu")
    for tokens in (70, 3):
        inputs.add(torch.randn(tokens, 128, generator=generator).bfloat16())
    together = rounding.alike(matrices, inputs)
    others = [rounding.each([matrix], [inputs])[0] for matrix in matrices]
    at_once = rounding.each(matrices, [inputs] * 5)
    for matrix, *found in zip(matrices, together, others, at_once, strict=True):
        values = [rounding.values(one.tensors) for one in found]
        assert torch.equal(values[0], values[1]) and torch.equal(values[0], values[2])
        assert not torch.equal(values[0], rounding.nearest(matrix, found[0].tensors))
        assert not any(one.fell_back for one in found)


def test_a_hessian_that_cannot_be_inverted(torch: Any, rounding: Any) -> None:
    """Its matrices are rounded to nearest, and named; others in the same call are not."""
    from ktconv.quantize.llm_compressor.gptq.rounding import Hessian

    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(64, 128, generator=generator).bfloat16() for _ in range(2)]
    bad, good = (Hessian(128, "cpu") for _ in range(2))
    rows = torch.randn(300, 128, generator=generator)
    good.add(rows.bfloat16())
    rows[7, 5] = float("inf")
    bad.add(rows)
    first, second = rounding.each(matrices, [bad, good])
    assert first.fell_back and not second.fell_back
    same = rounding.values(first.tensors) == rounding.nearest(matrices[0], first.tensors)
    assert same.float().mean() > 0.98  # quotients there are in float32, here in bf16


def as_tensor(torch: Any, raw: Any) -> Any:
    dtype = {"I32": torch.int32, "BF16": torch.bfloat16, "I64": torch.int64}[raw.dtype]
    return torch.frombuffer(bytearray(raw.data), dtype=dtype).reshape(raw.shape)


def test_fused_experts_come_out_quantized_and_the_same(
    text: Path, tmp_path: Path, quantized: Mapping[str, Any]
) -> None:
    model = cut(tmp_path / "fused", fused=True)
    quantize(model, tmp_path / "output", text)
    assert tensors(tmp_path / "output") == quantized


def test_an_encoded_model_is_calibrated_as_its_values_are(
    torch: Any, small: Path, text: Path, tmp_path: Path
) -> None:
    """Experts and attention in INT8, and the same values in float32."""
    from safetensors.numpy import save_file
    from safetensors.torch import load_file

    encoded: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for name, tensor in load_file(small / "model.safetensors").items():
        values[name] = encoded[name] = tensor.float().numpy()
        if name.endswith("_proj.weight"):
            parts, values[name] = in_int8(values[name])
            encoded |= {f"{name.removesuffix('weight')}{part}": one for part, one in parts.items()}
    for directory, tensors_of in (("encoded", encoded), ("plain", values)):
        shutil.copytree(small, tmp_path / directory)
        save_file(tensors_of, tmp_path / directory / "model.safetensors", {"format": "pt"})
        if directory == "encoded":  # by a method that llm-compressor does not know
            file = tmp_path / directory / "config.json"
            method = {"quantization_config": {"quant_method": "quark"}}
            file.write_text(json.dumps(json.loads(file.read_text()) | method))
        changed = {"self_test": True}
        quantize(tmp_path / directory, tmp_path / f"{directory}-out", text, **changed)
    found, expected = (tensors(tmp_path / f"{name}-out") for name in ("encoded", "plain"))
    experts = {name for name in expected if ".mlp.experts." in name}
    assert len(experts) == 3 * 3 * EXPERTS
    assert {name for name in found if ".mlp.experts." in name} == experts
    assert all(found[name] == expected[name] for name in experts)
    attention = "model.layers.0.self_attn.q_proj.weight"
    rounded = torch.from_numpy(values[attention]).bfloat16()
    assert found[attention].data == rounded.view(torch.uint8).numpy().tobytes()


def test_only_chosen_experts_are_quantized(small: Path, text: Path, tmp_path: Path) -> None:
    chosen = tmp_path / "hot.json"
    chosen.write_text(json.dumps({"schema": 1, "experts": {"0": [2, 3, 5]}}))
    quantize(small, tmp_path / "output", text, experts=chosen)
    found = {name.split(".")[5] for name in tensors(tmp_path / "output") if ".experts." in name}
    assert found == {"2", "3", "5"}


def test_eight_bits_with_a_scale_per_row(small: Path, text: Path, tmp_path: Path) -> None:
    chosen = tmp_path / "hot.json"
    chosen.write_text(json.dumps({"schema": 1, "experts": {"0": [3]}}))
    options: dict[str, Any] = {"scheme": "W8A16", "group_size": -1, "experts": chosen}
    quantize(small, tmp_path / "output", text, **options)
    found = tensors(tmp_path / "output")
    assert found["model.layers.0.mlp.experts.3.up_proj.weight_packed"].shape == (256, 64)
    assert found["model.layers.0.mlp.experts.3.up_proj.weight_scale"].shape == (256, 1)


def test_the_self_test_runs_with_the_first_layer(
    small: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    quantized: Mapping[str, Any], torch: Any,
) -> None:  # fmt: skip
    from ktconv.quantize.llm_compressor.gptq import selftest

    asked = request(small, tmp_path / "output", text, self_test=True)
    with monkeypatch.context() as changed:
        changed.setattr(selftest, "TOLERANCE", 0.0)
        with pytest.raises(VerificationError, match=r"self-test failed.*layer 0"):
            quantize_gpu(replace(asked, threads=2))
    assert not (tmp_path / "output").exists()
    assert torch.get_num_threads() == 1  # as before
    said: list[str] = []
    report = quantize_gpu(asked, Silent(), notify=said.append)
    tested = report.more["self_test"]
    assert 0 < tested["gptq_error"] < tested["rtn_error"] < 0.2
    assert f"layer 0 are {tested['gptq_error']:.4f} off with GPTQ" in said[1]
    assert said[0] == "calibrating on 4 samples, 512 tokens"
    assert report.more["coverage"]["0"]["tokens"] == 512
    assert tensors(tmp_path / "output") == quantized
    assert not (tmp_path / "output/.ktconv").exists()


class Silent(Observer):
    """Adds up what it is told."""

    def __init__(self) -> None:
        self.done, self.keys = 0, list[str]()

    def begin(self, keys: list[str]) -> None:
        assert not self.keys, "a second beginning would make the bar jump back"
        self.keys = keys

    def noted(self, text: str) -> None:
        pass

    def advanced(self, source_bytes: int) -> None:
        self.done += source_bytes

    def unit_started(self, key: str) -> None:
        pass

    def unit_finished(self, key: str) -> None:
        pass


def test_progress_adds_up(observed: tuple[Path, Any, Silent]) -> None:
    _, report, observer = observed
    assert set(observer.keys) == set(report.converted)
    assert observer.done == report.source_bytes


# ---- bad input -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dampening": None}, "--dampening"),
        ({"dampening": 0.0}, "--dampening"),
        ({"calibration": None}, "needs --dataset"),
        ({"layers": [0]}, "--layers cannot be given"),
        ({"scheme": "W3A16"}, "--scheme W3A16"),
        ({"group_size": 96}, "--group-size 96"),
        ({"calibration": Calibration("nosuch.txt")}, "does not exist"),
        ({"calibration": Calibration("x.txt", samples=0)}, "--samples 0"),
    ],
)
def test_impossible_options(
    small: Path, text: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        prepare(request(small, tmp_path / "output", text, **changes))
    assert not (tmp_path / "output").exists()


def fails(model: Path, output: Path, text: object, **changes: Any) -> KtconvError:
    """The error of a run that leaves nothing behind."""
    with pytest.raises(KtconvError) as raised:
        quantize(model, output, text, **changes)
    assert not output.exists()
    assert raised.value.hint and "\n" not in str(raised.value)
    return raised.value


def test_a_dataset_without_text(small: Path, tmp_path: Path) -> None:
    dataset = tmp_path / "empty.jsonl"
    dataset.write_text('{"text": ""}\n')
    assert "contains no usable text" in str(fails(small, tmp_path / "output", dataset))


def test_messages_without_a_chat_template(small: Path, tmp_path: Path) -> None:
    dataset = tmp_path / "talks.jsonl"
    dataset.write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    assert "no chat template" in str(fails(small, tmp_path / "output", dataset))


def test_a_model_without_tokenizer(small: Path, text: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(small, model, ignore=shutil.ignore_patterns("tokenizer*"))
    assert "contains no tokenizer" in str(fails(model, tmp_path / "output", text))


def test_a_tokenizer_of_another_model(small: Path, text: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(small, model)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {word: number + 50 for word, number in vocabulary.items()}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    error = fails(model, tmp_path / "output", text)
    assert isinstance(error, CheckpointError)
    assert re.search(r"makes token 20[0-9]{2}, but the model knows 2048", str(error))


def test_a_model_that_is_no_language_model(small: Path, text: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(small, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "vit"}))
    with pytest.raises(
        CheckpointError,
        match=r"/model is of type vit, for which transformers \S+ has no language model",
    ) as raised:
        quantize(model, tmp_path / "output", text, group_size=32, self_test=True)
    assert "--algorithm rtn" in str(raised.value.hint)


def test_what_the_library_raises_is_one_sentence(
    small: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ktconv.quantize.llm_compressor.gptq import rounding

    def broken(**_: Any) -> None:
        raise ValueError("cannot round this\nat line 7")

    monkeypatch.setattr(rounding, "quantize_weight", broken)
    error = fails(small, tmp_path / "output", text)
    assert str(error) == "llm-compressor cannot calibrate this model: cannot round this"


def test_a_model_with_a_missing_tensor(small: Path, text: Path, tmp_path: Path) -> None:
    """transformers would make it up."""
    from safetensors.torch import load_file, save_file

    model = tmp_path / "model"
    shutil.copytree(small, model)
    weights = load_file(model / "model.safetensors")
    del weights["model.layers.0.self_attn.k_proj.weight"]
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    error = fails(model, tmp_path / "output", text, self_test=True)
    assert isinstance(error, CheckpointError) and "self_attn.k_proj.weight" in str(error)


def test_too_little_memory_is_told_before_loading(
    small: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ktconv.system import machine

    error = fails(small, tmp_path / "output", text, max_cpu_memory=1 << 20)
    assert re.search(r"--max-cpu-memory 1\.0 MB is too small: .* needs", str(error))
    assert str(error.hint).startswith("use --max-cpu-memory ")
    monkeypatch.setattr(machine, "available_memory", lambda: 1 << 20)
    error = fails(small, tmp_path / "output", text)
    assert isinstance(error, ResourceError) and "can be used" in str(error)
    assert "--max-seq-len" in str(error.hint)


def test_a_full_disk_keeps_what_is_finished(
    three: tuple[Path, Path, Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the folder where samples are between layers."""
    from ktconv.model.streamed import states
    from ktconv.system.files import write_all

    model, clean, chosen = three
    output, written = tmp_path / "output", list[int]()

    def full(fd: int, data: memoryview, offset: int) -> None:
        written.append(len(data))
        if len(written) > 6:  # in the second layer
            raise OSError(errno.ENOSPC, "No space left on device")
        write_all(fd, data, offset)

    with monkeypatch.context() as changed:
        changed.setattr(states, "write_all", full)
        with pytest.raises(ResourceError) as raised:
            quantize(model, output, text, samples=2, experts=chosen)
    assert "--work-dir" not in str(raised.value.hint) and "--samples" in str(raised.value.hint)
    report = quantize(model, output, text, samples=2, experts=chosen)
    assert report.complete and "layer-00000" in report.kept
    same_files(output, clean)
