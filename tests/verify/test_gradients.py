"""`verify --gradients`: LoRA on a conversion's experts, every gradient against float32 autograd."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from helpers.cli import ktconv
from helpers.convert import Converted, convert
from helpers.family_list import MODELS
from helpers.family_models import write
from helpers.paths import EXAMPLE

from ktconv.errors import UsageError
from ktconv.train.gradients import NAMES, Found
from ktconv.train.step import Step
from ktconv.verify import VerifyRequest, run, verify
from ktconv.verify.memory import Budget
from ktconv.verify.packed import gradients
from ktconv.verify.report import render_report
from ktconv.verify.text import lines_of

# The AMX level runs too, where it is emulated.
pytestmark = [
    pytest.mark.usefixtures("tiles", "no_transformers"),
    pytest.mark.slow,
    pytest.mark.torch,
]

Example = Callable[[str], Path]


@pytest.fixture
def example(converted_example: Converted) -> Callable[[str], Path]:
    return lambda method: converted_example(method=method, numa=2)


def request(output: Path, **changes: Any) -> VerifyRequest:
    return VerifyRequest(output, str(EXAMPLE), **{"gradients": True, "threads": 1} | changes)


@pytest.mark.parametrize("method", ["int4", "int8"])
def test_gradients_of_every_layer_and_level(example: Example, method: str) -> None:
    result = verify(request(example(method)))
    assert result.passed
    layers = result.facts["layers"]
    assert layers["lora_rank"] == gradients.RANK and len(layers["layers"]) == 2
    for layer in layers["layers"]:
        found = layer["gradients"]
        assert list(found["kernel_error"]) == layers["isas"]
        for errors in found["kernel_error"].values():
            assert set(errors) == set(NAMES)
            assert all(0 < errors[name] < found["bounds"][name] for name in NAMES)
        # Quantization costs more than the kernels' rounding.
        assert found["source_error"]["dx"] > 0.006
    lines = "\n".join(lines_of(result))
    assert "gradients of LoRA, worst " in lines and "gradients vs. source: dx 0." in lines


def test_it_is_not_run_without_the_option(example: Example) -> None:
    result = verify(request(example("int4"), gradients=False))
    assert "lora_rank" not in result.facts["layers"]
    assert all("gradients" not in row for row in result.facts["layers"]["layers"])
    assert "LoRA" not in "\n".join(lines_of(result))


@pytest.mark.parametrize("name", ["y", "dw", "gate_b"])
@pytest.mark.parametrize("factor", [1.05, torch.nan])
def test_a_wrong_gradient_fails(
    name: str, factor: float, example: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Step.found

    def wrong(step: Step) -> Found:
        found = right(step)
        return {**found, name: found[name] * factor}

    monkeypatch.setattr(Step, "found", wrong)
    result = verify(request(example("int4")))
    assert not result.passed and not result.facts["layers"]["passed"]
    (level,) = {(failure.level, failure.check) for failure in result.failures}
    assert level == ("layers", "gradient")
    assert {failure.layer for failure in result.failures} == {0, 1}
    what = "the result" if name == "y" else f"the gradient {name}"
    assert what in result.failures[0].message and "the limit is" in result.failures[0].message
    assert "worst " + name in "\n".join(lines_of(result))


def test_experts_in_memory_one_by_one(example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group is a call of its own, and gradients of all are checked."""
    asked: list[list[int]] = []
    made = gradients._Group.__init__

    def noted(group: Any, weights: Any, numbers: list[int], *rest: Any) -> None:
        asked.append(list(numbers))
        made(group, weights, numbers, *rest)

    monkeypatch.setattr(gradients._Group, "__init__", noted)
    monkeypatch.setattr(Budget, "experts_at_once", lambda budget, size: 2)
    result = verify(request(example("int8"), sample=0.5))
    assert result.passed
    assert max(map(len, asked)) == 2 and len(asked) > 2
    numbers = [number for group in asked for number in group]
    assert numbers == sorted(set(numbers))
    assert set(result.facts["layers"]["layers"][0]["gradients"]["source_error"]) == set(NAMES)


def test_the_plan_counts_the_memory(example: Example) -> None:
    with_them = run.prepare(request(example("int4")))
    without = run.prepare(request(example("int4"), gradients=False))
    sizes = with_them.output.packed.geometry(0)
    expert = 4 * 3 * sizes.hidden * sizes.intermediate  # in float32
    need, before = (one.layers_need(2) for one in (with_them, without))
    assert need.fixed >= before.fixed + expert
    lora = gradients.lora_bytes(sizes.hidden, sizes.intermediate, gated=True)
    assert need.expert == before.expert + lora


def test_folded_weights_have_another_adapter(tmp_path: Path) -> None:
    """LoRA's B of up and A of down act between weights that folding has changed."""
    convert(EXAMPLE, tmp_path / "out", method="int4", numa=1, fold="up-down")
    result = verify(request(tmp_path / "out"))
    assert result.passed
    (first, _) = result.facts["layers"]["layers"]
    assert first["gradients"]["source_error"] is None
    assert "gradients vs. source" not in "\n".join(lines_of(result))


def test_the_report_lists_them(example: Example) -> None:
    facts = dict(verify(request(example("int4"))).facts)
    page = render_report(json.loads(json.dumps(facts)))
    table = page[page.index("Gradients of LoRA") :]
    assert "kernels, scalar" in table and "source&#39;s weights" in table and "gate A" in table
    del facts["layers"]["layers"][0]["gradients"]
    facts["layers"]["layers"][1]["gradients"] = {"kernel_error": "hostile", "source_error": [1]}
    assert "Gradients of LoRA" not in render_report(facts)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--level", "weights"), "--gradients belongs to level layers, not weights"),
        (("--level", "structure"), "--gradients belongs to level layers, not structure"),
    ],
)
def test_levels_that_compute_nothing(words: tuple[str, ...], said: str, example: Example) -> None:
    done = ktconv("verify", example("int4"), "--source", EXAMPLE, "--gradients", *words)
    assert done.exit_code == 2 and said in done.stderr


def test_without_a_source_and_with_another_output(example: Example) -> None:
    done = ktconv("verify", example("int4"), "--gradients")
    assert done.exit_code == 2 and "give --source MODEL and --level layers" in done.stderr
    done = ktconv("verify", example("int4"), example("int4"), "--gradients")
    assert done.exit_code == 2 and "--gradients does not apply when comparing" in done.stderr


def test_without_torch(example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="torch, which is not installed") as error:
        run.prepare(request(example("int4")))
    assert error.value.hint is not None and "ktconv[" in error.value.hint


@pytest.mark.parametrize("name", ["DeepSeek-V4-Flash", "gpt-oss MXFP4", "Nemotron-3 NVFP4"])
def test_limits_biases_and_experts_without_a_gate(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    write(model, tmp_path / "model")
    output, allow = tmp_path / "out", not model.for_ktransformers
    convert(tmp_path / "model", output, method="int8", allow_activation_mismatch=allow)
    asked = VerifyRequest(output, str(tmp_path / "model"), tokens=8, gradients=True, threads=1)
    result = verify(asked)
    assert result.passed, result.facts["failures"]
    assert all(row["gradients"]["kernel_error"] for row in result.facts["layers"]["layers"])
