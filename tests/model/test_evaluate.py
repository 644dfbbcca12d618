"""Loading, windows, and how far a conversion is from its source."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.convert import read_model
from helpers.paths import EVAL, EXAMPLE
from safetensors.numpy import save_file

from ktconv.errors import CheckpointError, ResourceError, UsageError
from ktconv.families.names import router_tensors
from ktconv.families.routers import router_of
from ktconv.families.routing import route
from ktconv.formats.decode import bf16_to_f32
from ktconv.model import load_model, replace_experts
from ktconv.model.evaluate import (
    capture_layer_inputs,
    greedy_side_by_side,
    predictions_of_both,
    windows,
)
from ktconv.model.text import read_text
from ktconv.system import machine

pytestmark = [pytest.mark.slow, pytest.mark.torch]

# ---- without PyTorch -------------------------------------------------------------------

WITHOUT = """
import sys
sys.modules["torch"] = None
import ktconv.model
from ktconv.families.routers import router_of
assert router_of({"model_type": "mixtral", "num_experts_per_tok": 2}, 0).top_k == 2
try:
    ktconv.model.replace_experts
except ktconv.errors.UsageError as error:
    print(error, error.hint)
"""


def test_routers_need_no_pytorch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True
    )
    assert "needs torch, which is not installed" in done.stdout
    assert "ktconv[model]" in done.stdout


# ---- loading ---------------------------------------------------------------------------


def test_dtypes(torch: Any) -> None:
    assert load_model(EXAMPLE)[0].dtype == torch.bfloat16
    assert load_model(EXAMPLE, "float32")[0].dtype == torch.float32
    for wrong in ("int8", "fp7"):
        with pytest.raises(UsageError, match="is not a supported dtype"):
            load_model(EXAMPLE, wrong)


def test_memory_is_checked_before_loading(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(path.stat().st_size for path in EXAMPLE.glob("*.safetensors"))
    monkeypatch.setattr(machine, "available_memory", lambda: int(1.5 * size))
    load_model(EXAMPLE)
    with pytest.raises(ResourceError, match=r"needs about .* are free"):
        load_model(EXAMPLE, "float32")


def test_checkpoints_that_cannot_be_loaded(torch: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a directory"):
        load_model(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="is empty"):
        load_model(tmp_path)
    save_file({"x": np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="transformers cannot load"):
        load_model(tmp_path)


def test_weights_are_never_made_up(torch: Any, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((EXAMPLE / name).read_bytes())
    tensors = {
        name: bf16_to_f32(np.frombuffer(raw.data, np.uint16)).reshape(raw.shape)
        for name, raw in read_model(EXAMPLE).items()
    }
    del tensors["model.layers.1.mlp.gate.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"does not contain model\.layers\.1\.mlp\.gate\.weight"
    ):
        load_model(tmp_path)


# ---- windows ---------------------------------------------------------------------------


def test_windows_cut_the_text(tokenizer: Any) -> None:
    tokens = tokenizer(EVAL.read_text())["input_ids"]
    found = windows(tokenizer, EVAL.read_text(), 64, 5)
    assert [list(ids.shape) for ids in found] == [[1, 64]] * 5
    assert [token for ids in found for token in ids[0].tolist()] == tokens[:320]
    every = windows(tokenizer, EVAL.read_text(), 64)
    assert len(every) == len(tokens) // 64
    assert windows(tokenizer, "a text that is short", 512)[0].shape[1] < 512


def test_windows_that_cannot_be(tokenizer: Any) -> None:
    for length, limit in ((1, 1), (8, 0)):
        with pytest.raises(UsageError, match="cannot be evaluated"):
            windows(tokenizer, "some text", length, limit)
    with pytest.raises(UsageError, match="less than two tokens"):
        windows(tokenizer, "", 8)


def test_the_sample_text_is_enough_for_an_evaluation(tokenizer: Any) -> None:
    assert len(windows(tokenizer, read_text(None)[0], 128)) >= 8


# ---- comparing -------------------------------------------------------------------------


def test_the_measures_are_what_they_say(loaded: Any, int4: Path, torch: Any) -> None:
    model, tokenizer = loaded
    texts = windows(tokenizer, EVAL.read_text(), 65, 2)  # two cuts of positions each
    with replace_experts(model, int4, threads=1, keep=True) as replaced:
        found = predictions_of_both(model, replaced, texts).result()
        with torch.no_grad():
            q = [model(ids).logits[0, :-1].double() for ids in texts]
    with torch.no_grad():
        p = [model(ids).logits[0, :-1].double() for ids in texts]
        losses = [model(ids, labels=ids).loss for ids in texts]
    logp, logq = (torch.cat(part).log_softmax(1) for part in (p, q))
    kl = torch.nn.functional.kl_div(logq, logp, reduction="none", log_target=True).sum(1)

    assert found.tokens == 2 * 64
    assert found.perplexity_source == pytest.approx(math.exp(sum(losses) / 2), rel=1e-5)
    assert found.kl_mean == pytest.approx(float(kl.mean()), rel=1e-6)
    assert found.kl_p99 == pytest.approx(float(kl.quantile(0.99)), rel=1e-6)
    assert found.top1_agreement == float((logp.argmax(1) == logq.argmax(1)).double().mean())


@pytest.mark.parametrize(
    ("method", "kl", "agreement"), [("int8", 5e-3, 0.95), ("int4", 0.05, 0.85)]
)
def test_a_conversion_keeps_what_its_source_says(
    loaded: Any, method: str, kl: float, agreement: float, request: pytest.FixtureRequest
) -> None:
    model, tokenizer = loaded
    texts = windows(tokenizer, EVAL.read_text(), 128, 8)
    with replace_experts(model, request.getfixturevalue(method), threads=1, keep=True) as replaced:
        found = predictions_of_both(model, replaced, texts).result()
    assert 0 < found.kl_mean < kl and found.kl_mean < found.kl_p99
    assert agreement < found.top1_agreement <= 1
    assert found.perplexity_converted == pytest.approx(found.perplexity_source, rel=0.03)


def test_nothing_to_compare(loaded: Any, int8: Path) -> None:
    model, tokenizer = loaded
    replaced = replace_experts(model, int8, threads=1)
    with pytest.raises(UsageError, match="no text to compare on"):
        predictions_of_both(model, replaced, []).result()
    with pytest.raises(UsageError, match="were not kept"):
        predictions_of_both(model, replaced, windows(tokenizer, "some text", 8)).result()
    with pytest.raises(UsageError, match="a positive number of new tokens"):
        greedy_side_by_side(model, replaced, tokenizer, "", 4)


def test_ruled_out_tokens_add_nothing(torch: Any) -> None:
    from ktconv.model.streamed.compare import _compare

    logits = torch.tensor([[0.0, 1.0, -math.inf]])
    ids = torch.tensor([[0, 1]])
    assert _compare(logits, logits, ids)[2].tolist() == [0.0]
    assert _compare(logits, torch.zeros(1, 3), ids)[2].isfinite().all()
    assert _compare(torch.zeros(1, 3), logits, ids)[2].tolist() == [math.inf]
    assert _compare(logits, logits * math.nan, ids)[2].isnan().all()


def test_greedy_texts(loaded: Any, int8: Path, torch: Any) -> None:
    model, tokenizer = loaded
    with replace_experts(model, int8, threads=1, keep=True) as replaced:
        source, converted = greedy_side_by_side(model, replaced, tokenizer, "The memory", 8)
    ids = tokenizer("The memory", return_tensors="pt")["input_ids"]
    for _ in range(8):  # the slow way, without a cache
        with torch.no_grad():
            best = model(ids).logits[0, -1].argmax().reshape(1, 1)
        ids = torch.cat([ids, best], dim=1)
    assert tokenizer.decode(ids[0]) == "The memory" + source
    assert converted.strip()


# ---- what layers are given -------------------------------------------------------------


def test_captured_inputs_are_routed_as_numpy_says(loaded: Any, int8: Path) -> None:
    model, tokenizer = loaded
    found = capture_layer_inputs(model, tokenizer, EVAL.read_text(), 40)
    tensors = read_model(EXAMPLE)
    config = json.loads((EXAMPLE / "config.json").read_text())
    assert sorted(found) == [0, 1]
    for layer, (hidden, ids, weights) in found.items():
        assert (hidden.shape, ids.shape, weights.shape) == ((40, 128), (40, 2), (40, 2))
        assert [a.dtype for a in (hidden, ids, weights)] == [np.float32, np.int64, np.float32]
        names = router_tensors(f"model.layers.{layer}.mlp.experts").weight
        (name,) = (name for name in names if name in tensors)
        raw = tensors[name]
        gate = bf16_to_f32(np.frombuffer(raw.data, np.uint16)).reshape(raw.shape)
        own_ids, own_weights = route(router_of(config, layer), hidden, gate)
        np.testing.assert_array_equal(own_ids, ids)
        np.testing.assert_allclose(own_weights, weights, atol=1e-5)

    with pytest.raises(UsageError, match="windows of 1 token"):
        capture_layer_inputs(model, tokenizer, EVAL.read_text(), 1)

    replace_experts(model, int8, threads=1)
    again = capture_layer_inputs(model, tokenizer, EVAL.read_text(), 40)
    np.testing.assert_array_equal(again[0][0], found[0][0])  # no experts before layer 0
    assert 0 < np.abs(again[1][0] - found[1][0]).max() < 0.5
