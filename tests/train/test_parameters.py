"""Adapters of PEFT's target_parameters, against PEFT itself."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, Literal

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft
import torch
import transformers
from helpers import listed
from helpers.adapted import apart, example, logits, train_a_little
from helpers.family_list import SAVED
from helpers.family_models import build
from safetensors.torch import load_file, save_file
from torch import nn

from ktconv.errors import KtconvError, UsageError
from ktconv.model.sites import find_experts
from ktconv.train import load, merge, prepare, save

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
INNER, OUTER = (
    f"base_model.model.model.layers.1.mlp.experts.{words}lora_{{}}.weight"
    for words in ("base_layer.", "")
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys"),
    pytest.mark.slow,
    pytest.mark.torch,
]


def by_peft(model: Any, parameters: list[str], **options: Any) -> Any:
    """With random numbers in A and B."""
    settings = {"r": 3, "lora_alpha": 6, "target_modules": [], **options}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**settings, target_parameters=parameters))
    generator = torch.Generator().manual_seed(4)
    for name, one in adapted.named_parameters():
        if "lora_" in name:
            one.data.copy_(torch.randn(one.shape, generator=generator) / 10)
    return adapted


def expect_alike(one: Any, other: Any, changed: Any) -> None:
    """The same weights, of which those of experts are not those of `changed`."""
    before = dict(changed.named_parameters())
    different = 0
    for (name, ours), (_, theirs) in zip(
        one.named_parameters(), other.named_parameters(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=name)
        different += not torch.equal(theirs, before[name])
    assert different


@pytest.mark.parametrize(("number", "name"), list(enumerate(SAVED)), ids=SAVED)
def test_all_families(number: int, name: str, tmp_path: Path) -> None:
    """Of all parameters, and of one alone, families in turns: read and merged as PEFT does it."""
    if not hasattr(transformers, SAVED[name].saved_by):
        pytest.skip(f"transformers has no {SAVED[name].saved_by} yet")
    model = build(SAVED[name]).float().eval()
    site = next(iter(find_experts(model).values()))
    named = [".".join(filter(None, (one.module, one.name))) for one in site.parameters_of_all]
    if not named:
        pytest.skip("its experts are no parameters of three dimensions")
    words = site.bare_path.rpartition(f".{site.layer}.")[2]
    full = [f"{words}.{one}" for one in named]
    # Few families have parameters in modules of their own: these one after the other.
    alone = full if site.parameters_of_all[0].module else [full[number % len(full)]]
    theirs, weights = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    before = [one.clone() for one in matrices_of(model)]
    for turn, targets in enumerate([full, *([one] for one in alone)]):
        for changed in (model, theirs):
            changed.load_state_dict(weights)
        adapted = by_peft(theirs, targets)
        directory = tmp_path / str(turn)
        adapted.save_pretrained(str(directory))
        merge(model, directory)
        theirs = adapted.merge_and_unload()
        found = zip(matrices_of(model), matrices_of(theirs), before, strict=True)
        for ours, expected, own in found:
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
            assert len(targets) == 1 or not torch.equal(expected, own)


def matrices_of(model: Any) -> list[torch.Tensor]:
    """Of all experts. (LongCat's parameters have more, which it does not use.)"""
    return [
        one
        for site in find_experts(model).values()
        for number in range(site.own.count)
        for one in site.own.matrices(number).values()
    ]


def test_beside_other_modules(tmp_path: Path) -> None:
    """Router, attention, and ranks by patterns."""
    adapted = by_peft(
        example(), [*PARAMETERS, "mlp.gate.weight"], target_modules=["q_proj"],
        rank_pattern={r"layers\.1\.mlp\.experts\.gate_up_proj": 5, "q_proj": 2},
        alpha_pattern={"down_proj": 4}, use_rslora=True,
    )  # fmt: skip
    adapted.save_pretrained(str(tmp_path))
    ours = example()
    merge(ours, tmp_path)
    expect_alike(ours, adapted.merge_and_unload(), example())


@pytest.mark.parametrize("targets", [PARAMETERS, PARAMETERS[:1], PARAMETERS[1:]])
def test_loaded_for_training(targets: list[str], tmp_path: Path) -> None:
    adapted = by_peft(example(), targets)
    adapted.save_pretrained(str(tmp_path))
    model = example()
    projections: list[Any] = ["gate", "up"] if targets == PARAMETERS[:1] else ["down"]
    if targets == PARAMETERS:
        projections = ["gate", "up", "down"]
    prepared = prepare(model, rank=3, alpha=6, targets=projections)
    load(model, tmp_path)
    assert apart(logits(model), logits(adapted)) < 0.005
    assert apart(logits(model), logits(example())) > 0.02
    if targets == PARAMETERS:  # expert slowest in A, fastest in B
        stored, lora = load_file(tmp_path / WEIGHTS), prepared.lora[1].matrices()
        assert torch.equal(lora["gate_a"][5], stored[INNER.format("A")][15:18])
        assert torch.equal(lora["up_a"][5], stored[INNER.format("A")][15:18])
        assert torch.equal(lora["up_b"][5], stored[INNER.format("B")][256:, 5::8])
        assert torch.equal(lora["down_b"][5], stored[OUTER.format("B")][:, 5::8])


@pytest.mark.parametrize(
    "name", ["qwen3_moe", "gpt_oss", "mixtral", "nemotron_h", "aria", "granitemoe", "longcat_flash"]
)
def test_written(name: str, tmp_path: Path) -> None:
    """PEFT computes what the experts with LoRA do; and what is read again is the same."""
    found = next((one for one in SAVED if one.startswith(name)), None)
    if found is None:
        pytest.skip(f"no model {name} is among the families")
    model = build(SAVED[found]).float().eval()
    base = copy.deepcopy(model)
    train_a_little(prepare(model, rank=4, alpha=8, dropout=0.1))
    save(model, tmp_path, layout="parameters")
    config = json.loads((tmp_path / CONFIG).read_text())
    assert config["lora_dropout"] == 0 and not config["target_modules"]
    merged = copy.deepcopy(base)
    merge(merged, tmp_path)
    assert apart(logits(merged), logits(model)) < 0.01 < apart(logits(base), logits(model))
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).merge_and_unload()
    expect_alike(merged, theirs, base)
    by_experts = copy.deepcopy(base)
    save(model, tmp_path / "experts")
    merge(by_experts, tmp_path / "experts")
    expect_alike(merged, by_experts, base)


def test_an_adapter_that_was_read_keeps_its_rank(tmp_path: Path) -> None:
    """Where gate and up have an A in common: the bytes of PEFT's file are written again."""
    adapted = by_peft(example(), PARAMETERS)
    adapted.save_pretrained(str(tmp_path / "theirs"))
    model = example()
    prepare(model, rank=3, alpha=6)
    load(model, tmp_path / "theirs")
    save(model, tmp_path / "ours", layout="parameters")
    theirs, ours = (load_file(tmp_path / one / WEIGHTS) for one in ("theirs", "ours"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    config = json.loads((tmp_path / "ours" / CONFIG).read_text())
    assert config["rank_pattern"] == {} and config["target_parameters"] == sorted(PARAMETERS)


def test_written_beside_peft(tmp_path: Path) -> None:
    adapted = peft.get_peft_model(
        example(), peft.LoraConfig(target_modules=["q_proj"], r=2, lora_alpha=6)
    )
    train_a_little(prepare(adapted, rank=4, alpha=8))
    for name, one in adapted.named_parameters():
        if "lora_B" in name:
            one.data.fill_(0.05)
    save(adapted, tmp_path, layout="parameters")
    expected = logits(adapted.eval())
    merged = example()
    merge(merged, tmp_path)
    assert apart(logits(merged), expected) < 0.005
    theirs = peft.PeftModel.from_pretrained(example(), tmp_path)
    assert apart(logits(theirs), logits(merged)) < 1e-5


# ---- Unsloth -----------------------------------------------------------------------------


def grouped(directory: Path) -> None:
    """lora_B expert after expert, as Unsloth wrote it."""
    stored = load_file(directory / WEIGHTS)
    for name, one in stored.items():
        if "experts" in name and "lora_B" in name:
            turned = one.reshape(len(one), -1, 8).transpose(1, 2)
            stored[name] = turned.reshape(one.shape).contiguous()
    save_file(stored, directory / WEIGHTS)


def change(directory: Path, **settings: Any) -> None:
    config = json.loads((directory / CONFIG).read_text())
    (directory / CONFIG).write_text(json.dumps(config | settings))


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Any]:
    adapted = by_peft(example(), PARAMETERS)
    adapted.save_pretrained(str(tmp_path / "adapter"))
    return tmp_path / "adapter", adapted.merge_and_unload()


@pytest.mark.parametrize(
    ("layout", "trace"),
    [("grouped_by_expert", "base"), ("rank_major", "mapping"), ("grouped_by_expert", "card")],
)
def test_unsloth(
    layout: Literal["rank_major", "grouped_by_expert"], trace: str, saved: tuple[Path, Any]
) -> None:
    """Says how lora_B is ordered, or must be told."""
    directory, expected = saved
    if layout == "grouped_by_expert":
        grouped(directory)
    if trace == "base":
        change(directory, base_model_name_or_path="unsloth/Qwen3-30B-A3B")
    elif trace == "mapping":
        change(directory, auto_mapping={"unsloth_fixed": True})
    else:
        (directory / "README.md").write_text("tags:\n- Unsloth\n")
    ours = example()
    before = [one.clone() for one in ours.parameters()]
    with pytest.raises(UsageError, match="does not say how lora_B of its experts is ordered"):
        merge(ours, directory)
    assert all(map(torch.equal, before, ours.parameters()))
    merge(ours, directory, lora_b_layout=layout)
    expect_alike(ours, expected, example())
    change(directory, lora_B_layout=layout)
    ours = example()
    merge(ours, directory)
    expect_alike(ours, expected, example())
    model = example()
    prepare(model, rank=3, alpha=6)
    load(model, directory, lora_b_layout=layout)
    assert apart(logits(model), logits(expected)) < 0.005
    other = "rank_major" if layout != "rank_major" else "grouped_by_expert"
    with pytest.raises(UsageError, match=f"says lora_B_layout {layout}, not {other}"):
        merge(example(), directory, lora_b_layout=other)  # type: ignore[arg-type]


def test_one_rank_has_one_order(tmp_path: Path) -> None:
    adapted = by_peft(example(), PARAMETERS, r=1)
    adapted.save_pretrained(str(tmp_path))
    change(tmp_path, base_model_name_or_path="unsloth/Qwen3-30B-A3B")
    ours = example()
    merge(ours, tmp_path)
    expect_alike(ours, adapted.merge_and_unload(), example())


def test_ours_of_a_model_of_unsloth(tmp_path: Path) -> None:
    """Is read again without being asked."""
    model = example()
    model.name_or_path = "unsloth/Qwen3-30B-A3B"
    train_a_little(prepare(model, rank=4, alpha=8))
    save(model, tmp_path, layout="parameters")
    merged = example()
    merge(merged, tmp_path)
    assert apart(logits(merged), logits(model)) < 0.005


# ---- what is refused ---------------------------------------------------------------------


def no_b(stored: dict[str, Any]) -> None:
    del stored[OUTER.format("B")]


def other_experts(stored: dict[str, Any]) -> None:
    stored[INNER.format("A")] = stored[INNER.format("A")][:-1].clone()


def turned(stored: dict[str, Any]) -> None:
    name = OUTER.format("A")
    stored[name] = torch.ones(24, 3)


def three(stored: dict[str, Any]) -> None:
    for side in "AB":
        name = INNER.format(side)
        stored[name.replace("lora_", "base_layer.lora_")] = stored[name].clone()


def also_alone(stored: dict[str, Any]) -> None:
    stored["base_model.model.model.layers.1.mlp.experts.3.up_proj.lora_A.weight"] = torch.ones(
        3, 128
    )


def inner_alone(stored: dict[str, Any]) -> None:
    for name in [one for one in stored if "base_layer" in one]:
        del stored[name]


BAD = {
    no_b: r"does not contain .*layers\.1\.mlp\.experts\.lora_B\.weight",
    other_experts: r"experts\.base_layer\.lora_A.* no adapter of 8 experts",
    turned: r"A of model\.layers\.1\.mlp\.experts\.down_proj .* is \[8, 3, 3\], but .*3, 256\]",
    three: r"does not say which 3 of the parameters .*gate_up_proj, .*down_proj",
    also_alone: r"experts\.3\.up_proj.* of a matrix whose parameter has an adapter, too",
    inner_alone: r"does not say which 1 of the parameters",
}  # fmt: skip


@pytest.mark.parametrize("damage", BAD)
def test_damaged(damage: Any, saved: tuple[Path, Any]) -> None:
    directory = saved[0]
    stored = load_file(directory / WEIGHTS)
    damage(stored)
    save_file(stored, directory / WEIGHTS)
    model, plain = example(), example()
    prepare(model, rank=3, alpha=6)
    for call, one in ((load, model), (merge, plain)):
        before = [tensor.clone() for tensor in one.parameters()]
        with pytest.raises(KtconvError, match=BAD[damage]):
            call(one, directory)
        assert all(map(torch.equal, before, one.parameters()))


def test_words_that_are_no_layout(saved: tuple[Path, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="lora_b_layout is 'peft', not rank_major or"):
        merge(example(), saved[0], lora_b_layout="peft")  # type: ignore[arg-type]
    change(saved[0], lora_B_layout=3)
    with pytest.raises(UsageError, match=r"lora_B_layout of .* is 3, not rank_major or"):
        merge(example(), saved[0])
    model = example()
    prepare(model, rank=4)
    with pytest.raises(UsageError, match="layout must be experts or parameters, not 'both'"):
        save(model, tmp_path / "a", layout="both")  # type: ignore[arg-type]


def test_lists_of_experts_have_no_such_parameters(tmp_path: Path) -> None:
    model = example()
    for site in find_experts(model).values():
        matrices = [site.own.matrices(number) for number in range(8)]
        block = listed.Indexed(
            site.parent.get_submodule("gate"), nn.ModuleList(map(listed.Expert, matrices))
        )
        model.model.layers[site.layer].mlp = block
    prepare(model, rank=4)
    with pytest.raises(UsageError, match="are no parameters with all matrices"):
        save(model, tmp_path / "a", layout="parameters")
    assert not (tmp_path / "a").exists()
