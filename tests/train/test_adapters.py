"""Adapters in files: written, read, merged, refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from helpers.paths import EXAMPLE

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from helpers.adapted import apart, example, logits, train_a_little
from helpers.disk_calls import hooked
from safetensors.torch import load_file, save_file
from torch import Tensor

from ktconv.errors import CheckpointError, KtconvError, ResourceError, UsageError
from ktconv.model import load_model
from ktconv.model.sites import find_experts
from ktconv.system.patterns import MAX_CHARACTERS
from ktconv.train import load, merge, prepare, save

pytestmark = [pytest.mark.slow, pytest.mark.torch]

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
KEY = "base_model.model.model.layers.{}.mlp.experts.{}.{}_proj.lora_{}.weight"


def prepared_example(**options: Any) -> tuple[Any, Any]:
    model = example()
    return model, prepare(model, **{"rank": 4, "alpha": 8, **options})


@pytest.fixture(scope="module")
def trained() -> tuple[Any, Any]:
    """The example with LoRA that makes a difference; nobody changes it."""
    model, prepared = prepared_example()
    train_a_little(prepared)
    return model, prepared


@pytest.fixture
def saved(trained: tuple[Any, Any], tmp_path: Path) -> Path:
    save(trained[0], tmp_path / "adapter")
    return tmp_path / "adapter"


def test_saved_and_loaded(trained: tuple[Any, Any], saved: Path) -> None:
    """The same numbers, and the same answers bit for bit."""
    model, _ = prepared_example()
    assert not torch.equal(logits(model), logits(trained[0]))
    load(model, saved)
    assert torch.equal(logits(model), logits(trained[0]))
    for one, other in zip(model.parameters(), trained[0].parameters(), strict=True):
        assert torch.equal(one, other)


def test_saved_and_merged(trained: tuple[Any, Any], saved: Path) -> None:
    """Into weights that are rounded once, or not at all."""
    model, expected = example(), logits(trained[0])
    without = logits(model)
    merge(model, saved)
    assert apart(logits(model), expected) < 0.005
    assert apart(without, expected) > 0.05
    rounded, _ = load_model(EXAMPLE, "bfloat16")
    merge(rounded, saved)
    weight = find_experts(rounded)[0].own.matrices(1)["down"]
    exact = find_experts(model)[0].own.matrices(1)["down"]
    assert weight.dtype == torch.bfloat16
    assert torch.equal(weight, exact.bfloat16())


def test_what_is_in_the_files(trained: tuple[Any, Any], saved: Path) -> None:
    """Every expert has names of its own, and its matrices are those of the model."""
    stored = load_file(saved / WEIGHTS)
    lora = trained[1].lora[1]
    assert len(stored) == 2 * 8 * 3 * 2
    assert torch.equal(stored[KEY.format(1, 5, "gate", "A")], lora.gate_a[5])
    assert torch.equal(stored[KEY.format(1, 5, "down", "B")], lora.down_b[5])
    config = json.loads((saved / CONFIG).read_text())
    assert {key: config[key] for key in ("r", "lora_alpha", "bias", "peft_type")} == {
        "r": 4, "lora_alpha": 8, "bias": "none", "peft_type": "LORA",
    }  # fmt: skip
    assert config["target_modules"] == ["down_proj", "gate_proj", "up_proj"]
    assert config["base_model_name_or_path"] == str(EXAMPLE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    """bf16 goes into float32, and not the other way round, which would round it."""
    model, prepared = prepared_example(dtype=dtype)
    train_a_little(prepared)
    save(model, tmp_path)
    assert {one.dtype for one in load_file(tmp_path / WEIGHTS).values()} == {dtype}
    other, _ = prepared_example()
    load(other, tmp_path)
    narrow, _ = prepared_example(dtype=torch.bfloat16)
    if dtype == torch.bfloat16:
        load(narrow, tmp_path)
        assert torch.equal(logits(narrow), logits(model))
    else:
        with pytest.raises(CheckpointError, match=r"is torch.float32 in .* which would round it"):
            load(narrow, tmp_path)


def test_some_targets(tmp_path: Path) -> None:
    model, prepared = prepared_example(targets=("down",))
    train_a_little(prepared)
    save(model, tmp_path)
    assert json.loads((tmp_path / CONFIG).read_text())["target_modules"] == ["down_proj"]
    other, _ = prepared_example(targets=("down",))
    load(other, tmp_path)
    assert torch.equal(logits(other), logits(model))
    merged = example()
    merge(merged, tmp_path)
    assert apart(logits(merged), logits(model)) < 0.005
    with pytest.raises(
        CheckpointError, match=r"LoRA of down in layer 0, the model of gate, up, do"
    ):
        load(prepared_example()[0], tmp_path)


# ---- KTransformers' file -----------------------------------------------------------------


def write_fused(trained: tuple[Any, Any], directory: Path, config: dict[str, Any] | None) -> None:
    """layers.L.experts.gate_lora_a [E, r, H] and so on: without alpha and rank."""
    directory.mkdir()
    tensors = {
        f"layers.{layer}.experts.{name[:-2]}_lora_{name[-1]}": one.detach().clone()
        for layer, lora in trained[1].lora.items()
        for name, one in lora.named_parameters()
    }
    save_file(tensors, directory / "fused_expert_lora.safetensors")
    if config is not None:
        (directory / CONFIG).write_text(json.dumps({"peft_type": "LORA", **config}))


@pytest.mark.parametrize(
    ("config", "alpha"), [(None, 8), ({"r": 4, "lora_alpha": 8}, None), ({"r": 4}, 8)]
)
def test_fused_files(
    config: dict[str, Any] | None, alpha: float | None, trained: tuple[Any, Any], tmp_path: Path
) -> None:
    write_fused(trained, tmp_path / "fused", config)
    model, _ = prepared_example()
    load(model, tmp_path / "fused", alpha=alpha)
    assert torch.equal(logits(model), logits(trained[0]))
    merged = example()
    merge(merged, tmp_path / "fused", alpha=alpha)
    assert apart(logits(merged), logits(trained[0])) < 0.005


@pytest.mark.parametrize("config", [None, {"r": 16, "lora_alpha": 32}])
def test_a_fused_file_needs_an_alpha(
    config: dict[str, Any] | None, trained: tuple[Any, Any], tmp_path: Path
) -> None:
    """Also where what is beside it says that of an adapter of another rank."""
    write_fused(trained, tmp_path / "fused", config)
    with pytest.raises(UsageError, match=r"does not say the alpha of .*, whose rank is 4"):
        load(prepared_example()[0], tmp_path / "fused")


# ---- what is refused ---------------------------------------------------------------------

Stored = dict[str, Tensor]


def lacking(stored: Stored, config: dict[str, Any]) -> None:
    del stored[KEY.format(1, 3, "up", "B")]


def beyond(stored: Stored, config: dict[str, Any]) -> None:
    stored[KEY.format(1, 8, "up", "B")] = stored[KEY.format(1, 3, "up", "B")].clone()


def other_layer(stored: Stored, config: dict[str, Any]) -> None:
    stored[KEY.format(2, 0, "up", "B")] = stored[KEY.format(1, 3, "up", "B")].clone()


def other_module(stored: Stored, config: dict[str, Any]) -> None:
    for side in "AB":
        stored[f"base_model.model.model.nothing.lora_{side}.weight"] = torch.ones(4, 4)


def one_rank_less(stored: Stored, config: dict[str, Any]) -> None:
    stored[KEY.format(1, 3, "up", "B")] = torch.ones(256, 3)


def turned(stored: Stored, config: dict[str, Any]) -> None:
    for expert in range(8):
        name = KEY.format(0, expert, "down", "A")
        stored[name] = stored[name].T.contiguous()


def whole_numbers(stored: Stored, config: dict[str, Any]) -> None:
    stored[KEY.format(1, 3, "up", "B")] = torch.ones(256, 4, dtype=torch.int32)


def wrong_rank(stored: Stored, config: dict[str, Any]) -> None:
    config["r"] = 8


def no_number(stored: Stored, config: dict[str, Any]) -> None:
    config["lora_alpha"] = "8"


def huge_rank(stored: Stored, config: dict[str, Any]) -> None:
    config["r"] = 10**400


def alpha_of_nothing(stored: Stored, config: dict[str, Any]) -> None:
    config["lora_alpha"] = 0


def no_alpha(stored: Stored, config: dict[str, Any]) -> None:
    del config["lora_alpha"]


def other_type(stored: Stored, config: dict[str, Any]) -> None:
    config["peft_type"] = "IA3"


def dora(stored: Stored, config: dict[str, Any]) -> None:
    config["use_dora"] = True


def pattern(stored: Stored, config: dict[str, Any]) -> None:
    config["alpha_pattern"] = {"(": 3}


def bomb(stored: Stored, config: dict[str, Any]) -> None:
    """Which `re` would try for longer than there is time."""
    config["rank_pattern"] = {"(((.+)+)+)+=": 3}
    config["alpha_pattern"] = {"((.+)+)+=": 3, ".*": "3"}


def many_bombs(stored: Stored, config: dict[str, Any]) -> None:
    config["rank_pattern"] = {f"(x+x+)+{n}": 3 for n in range(200_000)}


def pattern_list(stored: Stored, config: dict[str, Any]) -> None:
    config["rank_pattern"] = ["gate_proj"]


def twice(stored: Stored, config: dict[str, Any]) -> None:
    """Under the names of another family."""
    name = KEY.format(1, 3, "up", "B")
    stored[name.replace("mlp", "block_sparse_moe").replace("up_proj", "w3")] = stored[name].clone()


def no_table(stored: Stored, config: dict[str, Any]) -> None:
    config["rank_pattern"] = ["gate_proj"]


def endless_alpha(stored: Stored, config: dict[str, Any]) -> None:
    config["lora_alpha"] = 10**400


def negative_alpha(stored: Stored, config: dict[str, Any]) -> None:
    config["lora_alpha"] = -8


def diverged(stored: Stored, config: dict[str, Any]) -> None:
    stored[KEY.format(1, 3, "up", "B")][2, 1] = float("inf")


BAD: dict[Callable[[Stored, dict[str, Any]], None], str] = {
    lacking: r"does not contain .*layers\.1\.mlp\.experts\.3\.up_proj\.lora_B",
    beyond: r"experts\.8\.up_proj\.lora_B\.weight, but the model has 8 experts",
    other_layer: r"layers\.2\..*layer 2 of the model has no experts",
    other_module: r"model\.nothing\.lora_[AB]\.weight",
    one_rank_less: r"experts\.3\.up_proj\.lora_B.* is F32 \[256, 3\]",
    turned: r"A of down in layer 0 .* is \[8, 256, 4\], but the model needs \[8, 256, 256\]",
    whole_numbers: r"experts\.3\.up_proj\.lora_B.* is I32",
    wrong_rank: r"adapter_config.json says rank 8 of .* have 4",
    no_number: "lora_alpha '8', not a number",
    huge_rank: "says r 10000.*, not a number above 0",
    alpha_of_nothing: "says lora_alpha 0, not a number above 0",
    no_alpha: "does not say the alpha of .*, whose rank is 4",
    other_type: "of type 'IA3', not LORA",
    dora: "says use_dora",
    pattern_list: r"says rank_pattern \['gate_proj'\]",
    twice: r"experts\.3\.up_proj\..* and .*experts\.3\.w3\..* are the same matrix",
    no_table: r"says rank_pattern \['gate_proj'\]",
    endless_alpha: "says lora_alpha 1000.*, not a number above 0",
    negative_alpha: "says lora_alpha -8, not a number above 0",
    diverged: r"experts\.3\.up_proj\.lora_B\.weight in .* has a NaN or an infinity",
    pattern: r"patterns of alpha_pattern include '\(', which is no regular expression",
    bomb: r"says alpha_pattern \.\* '3', not a number",
    many_bombs: "the patterns of rank_pattern are too many or too long to be matched",
}


@pytest.mark.parametrize("damage", BAD)
def test_damaged_adapters(damage: Callable[[Stored, dict[str, Any]], None], saved: Path) -> None:
    """Neither a model with LoRA nor one to merge into has changed after a refusal."""
    stored, config = load_file(saved / WEIGHTS), json.loads((saved / CONFIG).read_text())
    damage(stored, config)
    save_file(stored, saved / WEIGHTS)
    (saved / CONFIG).write_text(json.dumps(config))
    model, plain = prepared_example()[0], example()
    for change, one in ((load, model), (merge, plain)):
        before = [tensor.clone() for tensor in one.parameters()]
        with pytest.raises(KtconvError, match=BAD[damage]):
            change(one, saved)
        assert all(map(torch.equal, before, one.parameters()))


def test_other_ranks_and_alphas(saved: Path) -> None:
    """The message says what to give `prepare`."""
    for option, own in (("rank", 4), ("alpha", 8)):
        with pytest.raises(KtconvError, match=f"{option} {own} in .*, and 5 in the") as refusal:
            load(prepared_example(**{option: 5})[0], saved)
        assert refusal.value.hint == f"call ktconv.train.prepare with {option}={own}"
    with pytest.raises(UsageError, match=r"says alpha 8 of .*, not 3") as contradiction:
        load(prepared_example()[0], saved, alpha=3)
    assert contradiction.value.hint == "leave alpha out"


def test_rank_stabilized_adapters(saved: Path, trained: tuple[Any, Any]) -> None:
    """PEFT's use_rslora divides alpha by the root of the rank: 4 / 2 is 8 / 4."""
    config = json.loads((saved / CONFIG).read_text())
    (saved / CONFIG).write_text(json.dumps(config | {"use_rslora": True, "lora_alpha": 4}))
    model = prepared_example()[0]
    load(model, saved)
    assert torch.equal(logits(model), logits(trained[0]))


def test_a_pattern_for_each_module(saved: Path, trained: tuple[Any, Any]) -> None:
    """And one for experts, which have a rank and an alpha of their own; others than names would be
    too many to be matched (tests/system/test_patterns.py has 200 000)."""
    config = json.loads((saved / CONFIG).read_text())
    names = [f"model.layers.{n}.self_attn.q_proj" for n in range(8_000)]
    assert sum(map(len, names)) > MAX_CHARACTERS
    config["r"], config["lora_alpha"] = 64, 7
    config["rank_pattern"] = dict.fromkeys(names, 3) | {r"experts\.\d+\.\w+": 4}
    config["alpha_pattern"] = dict.fromkeys(names, 3) | {"mlp.experts.*(gate|up|down)_proj": 8}
    (saved / CONFIG).write_text(json.dumps(config))
    model = prepared_example()[0]
    load(model, saved)
    assert torch.equal(logits(model), logits(trained[0]))


def test_files_that_are_not_there(saved: Path, tmp_path: Path) -> None:
    model = prepared_example()[0]
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name, what in (
        ("nowhere", "does not exist"),
        ("file", "is not a directory"),
        ("empty", r"has no adapter_config\.json"),
    ):
        with pytest.raises(CheckpointError, match=what):
            load(model, tmp_path / name)
    with pytest.raises(UsageError, match="alpha must be a number, not 'x'"):
        load(model, saved, alpha=cast(Any, "x"))
    (saved / WEIGHTS).rename(saved / "aside")
    with pytest.raises(CheckpointError, match=r"has no adapter_model\.safetensors"):
        load(model, saved)
    (saved / "adapter_model.bin").write_bytes(b"a pickle")
    with pytest.raises(CheckpointError, match=r"but adapter_model\.bin") as refusal:
        load(model, saved)
    assert refusal.value.hint is not None
    assert "could run code" in refusal.value.hint
    (saved / WEIGHTS).write_bytes((saved / "aside").read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors"):
        load(model, saved)


def test_one_matrix_in_two_files(trained: tuple[Any, Any], saved: Path) -> None:
    write_fused(trained, saved.parent / "fused", None)
    (saved.parent / "fused/fused_expert_lora.safetensors").rename(
        saved / "fused_expert_lora.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"layers\.\d\.experts\.\w+ in .* the same matrix"):
        load(prepared_example()[0], saved)


def test_a_pipe_in_the_place_of_a_file(saved: Path) -> None:
    """Is not waited for."""
    for name in (WEIGHTS, CONFIG):
        (saved / name).unlink()
        os.mkfifo(saved / name)
        with pytest.raises(CheckpointError, match=f"{name} is not a regular file"):
            load(prepared_example()[0], saved)


def test_models_that_have_no_lora(saved: Path, tmp_path: Path) -> None:
    model = example()
    for call in (save, load):
        with pytest.raises(UsageError, match="have no LoRA") as refusal:
            call(model, saved)
        assert refusal.value.hint == "call ktconv.train.prepare first"
    prepare(model, rank=None)
    with pytest.raises(UsageError, match="rank=None"):
        save(model, tmp_path / "none")
    assert not (tmp_path / "none").exists()
    with pytest.raises(UsageError, match="packed experts, to which nothing can be added"):
        merge(model, saved)


@pytest.mark.parametrize("how", ["sharded", "flat"])
def test_parameters_that_are_cut_up(how: str, tmp_path: Path) -> None:
    """As FSDP and DeepSpeed have them outside of a forward: no part is saved for the whole."""
    model, prepared = prepared_example()
    one = prepared.lora[1].up_b
    if how == "sharded":
        one.device_mesh = None  # DTensor has it
    else:
        one.data = one.data[:4].clone()
    with pytest.raises(UsageError, match=r"up_b is (cut up among|\[4, 256, 4\], but must be)"):
        save(model, tmp_path / "a")
    assert not (tmp_path / "a").exists()


class Killed(BaseException):
    """In the place of a signal."""


def test_a_kill_leaves_no_matrices_with_the_alpha_of_others(saved: Path) -> None:
    """Where an adapter of another alpha was before: one is whole, or there is none to load."""
    other, _ = prepared_example(alpha=80)
    first = {name: (saved / name).read_bytes() for name in (WEIGHTS, CONFIG)}
    states = []
    for stop in range(1, 20):
        for name, data in first.items():
            (saved / name).write_bytes(data)
        calls = iter(range(1, 20))

        def before(
            name: str, arguments: tuple[Any, ...], calls: Any = calls, n: int = stop
        ) -> None:
            if next(calls) == n:
                raise Killed

        try:
            with hooked(before):
                save(other, saved)
        except Killed:
            states.append([_old(saved / name, data) for name, data in first.items()])
        else:
            break
    assert [True, True] in states and [False, None] in states  # and nothing that is half of each
    assert not [one for one in states if one[1] is not None and one[0] != one[1]]
    load(other, saved)


def _old(path: Path, data: bytes) -> bool | None:
    return path.read_bytes() == data if path.exists() else None


def test_a_disk_that_is_full(
    trained: tuple[Any, Any], saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was there before is there still, and nothing else."""
    before = {path.name: path.read_bytes() for path in saved.iterdir()}

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResourceError, match="the disk is full"):
        save(trained[0], saved)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ("lora_gate_and_up_A", (8, 256, 4)),  # a module of its own for grouped products
        ("lora_down_B", (8, 4, 256)),
        ("gate_up_proj.lora_A.weight", (8, 4, 256)),
        ("down_proj.lora_B.weight", (8 * 256, 4)),
        ("gate_up_proj.lora_A.default.weight", (32, 256)),
        ("3.gate_up_proj.lora_A.weight", (4, 256)),
        ("3.up_proj.lora_embedding_A", (4, 256)),
        ("w13.lora_A.weight", (4, 256)),
    ],
)
def test_layouts_that_are_not_known(key: str, shape: tuple[int, ...], saved: Path) -> None:
    """Matrices of experts are never taken for those of another module."""
    whole = f"base_model.model.model.layers.1.mlp.experts.{key}"
    stored = load_file(saved / WEIGHTS) | {whole: torch.zeros(shape)}
    save_file(stored, saved / WEIGHTS)
    for change, one in ((load, prepared_example()[0]), (merge, example())):
        with pytest.raises(CheckpointError) as caught:
            change(one, saved)
        assert str(caught.value) == (
            f"{whole} {list(shape)} in {saved / WEIGHTS} is of experts, in a layout that is not "
            "known"
        )
        assert "target_parameters" in (caught.value.hint or "")
