"""Levels layers and model on the example model, and what is done where they cannot be run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.convert import Converted, convert
from helpers.corrupt import swap
from helpers.families import (
    FAMILIES,
    numbered,
    random_weights,
    simple_config,
    write_checkpoint,
    write_family,
)
from helpers.paths import EXAMPLE

from ktconv import native
from ktconv.errors import CheckpointError, UsageError
from ktconv.formats import FORMATS
from ktconv.runtime import layer as runtime_layer
from ktconv.runtime.compute import compute
from ktconv.runtime.layers import Experts
from ktconv.targets.packed.weights import open_packed
from ktconv.verify import (
    LEVELS,
    Request,
    Thresholds,
    prepare,
    verify,
)
from ktconv.verify import model as model_level
from ktconv.verify.findings import Findings
from ktconv.verify.packed.model import PackedModelCheck
from ktconv.verify.packed.output import open_cpu_output
from ktconv.verify.run import unwatched

# The AMX level runs too, where it is emulated.
pytestmark = [pytest.mark.usefixtures("tiles"), pytest.mark.slow]
USUAL_TOKENS = 32  # that both models write, as docs/verify.md says; tests/conftest.py takes fewer
needs_torch = pytest.mark.skipif(
    not (find_spec("torch") and find_spec("transformers")), reason="transformers is not installed"
)


@pytest.fixture
def example(converted_example: Converted) -> Callable[[str], Path]:
    return lambda method: converted_example(method=method, numa=2)


@pytest.mark.parametrize("method", ["int4", "int8"])
def test_layers_without_transformers(
    method: str, example: Callable[[str], Path], no_transformers: None
) -> None:
    result = verify(Request(example(method), str(EXAMPLE), "layers", tokens=9))
    assert result.passed
    about = result.facts["layers"]
    assert about["states"] == "random"
    assert any("torch is not installed" in note for note in result.facts["notes"])
    assert about["isas"] == native.kernel_levels(FORMATS[method].layout)
    for row in about["layers"]:
        assert set(row["kernel_error"]) == set(about["isas"])
        assert all(0 < error < 0.005 for error in row["kernel_error"].values())
        low, high = (0.02, 0.3) if method == "int4" else (0.002, 0.03)
        assert low < row["quantization_error"] < high
        assert row["worst_expert"]["error"] >= row["weights_error"] * 0.5
        assert row["router_agreement"] is None
    assert native.isa() == native.isa_available()[-1] or native.isa() in native.isa_available()


def test_model_without_transformers(
    example: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told before anything is read, with the way out."""
    monkeypatch.setattr(model_level, "find_spec", lambda name: None)
    pytest.importorskip("torch")
    with pytest.raises(UsageError, match="needs transformers") as caught:
        prepare(Request(example("int8"), str(EXAMPLE), "model"))
    assert "ktconv[model]" in str(caught.value.hint)


@needs_torch
def test_layers_with_captured_states(example: Callable[[str], Path]) -> None:
    about = verify(Request(example("int8"), str(EXAMPLE), "layers")).facts["layers"]
    assert about["states"] == "captured"
    assert all(row["router_agreement"] > 0.95 for row in about["layers"])


@needs_torch
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "olmoe"])
def test_layers_of_families(name: str, tmp_path: Path, no_transformers: None) -> None:
    """Every family's router and shared expert, from the files alone."""
    write_family(name, tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "out", method="int8")
    result = verify(Request(tmp_path / "out", str(tmp_path / "model"), "layers", tokens=6))
    assert result.passed, result.failures
    rows = result.facts["layers"]["layers"]
    shared = name in ("qwen2_moe", "deepseek_v2", "deepseek_v3", "glm4_moe") or "next" in name
    if shared:
        assert all(row["quantization_error_with_shared"] is not None for row in rows)


def test_verify_fails_on_a_wrong_kernel(
    example: Callable[[str], Path], no_transformers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Experts.forward

    def wrong(self: Experts, *inputs: Any) -> Any:
        y = right(self, *inputs)
        y[:, 5] ^= np.uint16(0x8000)
        return y

    monkeypatch.setattr(Experts, "forward", wrong)
    result = verify(Request(example("int8"), str(EXAMPLE), "layers"))
    assert not result.passed
    assert {(failure.level, failure.check) for failure in result.failures} == {("layers", "kernel")}


def test_layers_are_not_run_on_a_broken_structure(
    example: Callable[[str], Path], tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    output = tmp_path / "out"
    shutil.copytree(example("int4"), output)
    min(output.glob("*.safetensors")).unlink()
    result = verify(Request(output, str(EXAMPLE), "model"))
    assert not result.passed and result.facts["layers"] is None and result.facts["model"] is None
    assert any("were not run" in note for note in result.facts["notes"])


def test_no_router(tmp_path: Path, no_transformers: None) -> None:
    """Experts alone: level layers cannot be run, and says which tensor it wants."""
    weights = random_weights(128, 128, 2)
    config = simple_config(
        hidden_size=128, moe_intermediate_size=128, num_experts=2, num_experts_per_tok=1
    )
    write_checkpoint(tmp_path / "model", numbered("model.layers.0.mlp.experts", weights), config)
    convert(tmp_path / "model", tmp_path / "out", method="int8")
    with pytest.raises(CheckpointError, match=r"has no router: none of .*mlp\.gate\.weight"):
        verify(Request(tmp_path / "out", str(tmp_path / "model"), "layers"))


# ---- model -----------------------------------------------------------------------------


def checked(check: PackedModelCheck) -> dict[str, Any] | None:
    """What level model alone finds."""
    check.prepare()
    return check.run(unwatched, print)


@needs_torch
@pytest.mark.parametrize("method", ["int4", "int8"])
def test_model(
    method: str,
    example: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if method == "int4":
        monkeypatch.setattr(model_level, "NEW_TOKENS", USUAL_TOKENS)
    text = tmp_path / "text.txt"
    text.write_text((EXAMPLE.parent / "eval.txt").read_text()[:6000])
    request = Request(example(method), str(EXAMPLE), "model", text=text, windows=4)
    result = verify(request)
    about = result.facts["model"]
    assert result.passed and about["text"] == "text.txt"
    assert about["perplexity_source"] < 60
    assert abs(about["perplexity_increase"]) < (0.03 if method == "int4" else 0.006)
    assert 0 < about["kl_mean"] < about["kl_p99"]
    assert 0.85 < about["top1_agreement"] <= 1
    assert about["generation"]["source"] and about["generation"]["converted"]
    if method == "int4":
        assert len(about["generation"]["converted"]) > USUAL_TOKENS
    assert [row["layer"] for row in about["layers"]] == [0, 1]
    for row in about["layers"]:
        assert 0 < row["relative_error"] < 0.2 and 0 < row["token_error"] < 0.2
        assert 0.98 < row["cosine"] < 1
    json.dumps(result.facts)


@needs_torch
def test_thresholds(example: Callable[[str], Path]) -> None:
    strict = Thresholds(max_ppl_increase=0.0, max_kl=0.0)
    result = verify(Request(example("int4"), str(EXAMPLE), "model", windows=1, thresholds=strict))
    assert not result.passed
    assert "divergence" in {failure.check for failure in result.failures}
    assert result.facts["model"]["thresholds"] == {"max_ppl_increase": 0.0, "max_kl": 0.0}
    assert not result.facts["model"]["passed"] and result.facts["layers"]["passed"]


@needs_torch
def test_level_model_runs_our_kernels(
    example: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With kernels that lose every eighth channel, the model speaks otherwise."""

    def wrong(packed: Experts, pool: Any, call: Any) -> None:
        compute(packed, pool, call)
        call.y.owner[..., ::8] = 0

    monkeypatch.setattr(runtime_layer, "compute", wrong)
    request, findings = Request(example("int8"), str(EXAMPLE), "model", windows=1), Findings()
    output = open_cpu_output(request.output, request.source)
    about = checked(PackedModelCheck(output, request, findings))
    assert about is not None and about["kl_mean"] > 0.01
    assert "divergence" in {failure.check for failure in findings.listed}


@needs_torch
def test_experts_of_another_model(example: Callable[[str], Path], tmp_path: Path) -> None:
    """A failure that is named, not a run that could not be."""
    output = tmp_path / "out"
    shutil.copytree(example("int8"), output)
    layer = min(open_packed(output).layers)
    for proj in ("gate", "up", "down"):
        for part in (0, 1):
            name = f"blk.{layer}.ffn_{proj}_exps"
            swap(output, f"{name}.0.numa.{part}", f"{name}.1.numa.{part}")
    request, findings = Request(output, str(EXAMPLE), "model", windows=1), Findings()
    opened = open_cpu_output(output, request.source)
    assert checked(PackedModelCheck(opened, request, findings)) is None
    (failure,) = findings.listed
    assert failure.check == "experts" and f"layer {layer}" in failure.message


@needs_torch
def test_model_code_that_fails(
    example: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Level layers and the writing of text do without it, level model says why it cannot be run."""
    import transformers

    import ktconv.model

    def broken(*_: object, **_options: object) -> None:
        raise RuntimeError("no such attention\nand many lines more")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ktconv.model, "load_model", broken, raising=False)
        result = verify(Request(example("int8"), str(EXAMPLE), "model", windows=1))
    assert result.passed and result.facts["layers"]["states"] == "random"
    first, second = (note for note in result.facts["notes"] if "no such attention" in note)
    assert first.endswith("because no such attention")
    assert second.startswith("level model: no text was generated, because")
    assert result.facts["model"]["generation"] is None and result.facts["model"]["kl_mean"] > 0
    kind = transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeDecoderLayer
    monkeypatch.setattr(kind, "forward", broken)
    request = Request(example("int8"), str(EXAMPLE), "model", sample=1e-9)
    with pytest.raises(CheckpointError, match=r"cannot be run by transformers: no such attention$"):
        verify(request)


# ---- requests that cannot be --------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS[1:])
def test_levels_need_a_source(level: str, example: Callable[[str], Path]) -> None:
    with pytest.raises(UsageError, match="needs the source"):
        verify(Request(example("int8"), level=level))


@pytest.mark.parametrize("sample", [0.0, -0.1, 1.01, float("nan")])
def test_sample_must_be_a_share(sample: float, example: Callable[[str], Path]) -> None:
    with pytest.raises(UsageError, match=r"--sample must be in"):
        verify(Request(example("int8"), sample=sample))


def test_nothing_to_verify(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="contains no packed experts"):
        verify(Request(tmp_path))
    with pytest.raises(UsageError, match="is not a directory"):
        verify(Request(tmp_path / "missing"))
    with pytest.raises(UsageError, match="contains no packed experts"):
        verify(Request(EXAMPLE))


def test_unusable_source(example: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(CheckpointError):
        verify(Request(example("int8"), str(tmp_path / "model")))
