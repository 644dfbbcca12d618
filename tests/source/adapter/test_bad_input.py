"""Adapters that cannot be added: one sentence each, and nothing is written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.cli import write_model
from helpers.paths import EXAMPLE
from safetensors.numpy import load_file, save_file

from ktconv.errors import CheckpointError, KtconvError, SourceChangedError, UsageError
from ktconv.quantize.packed import Request, prepare, quantize_cpu
from ktconv.source import ModelSource, open_checkpoint
from ktconv.source.reading.tensors import SourceTensors
from ktconv.targets.packed.target import Options

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
START = "base_model.model.model.layers."
HIDDEN, INNER, EXPERTS, RANK = 128, 256, 8, 3
Stored = dict[str, Any]
Config = dict[str, Any]


def adapter_of_example(directory: Path) -> Path:
    """LoRA of all experts of layer 1 and of an attention's projection."""
    rng, stored = np.random.default_rng(3), {}
    shapes = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    modules = {
        f"1.mlp.experts.{expert}.{name}_proj": shape
        for expert in range(EXPERTS)
        for name, shape in shapes.items()
    }
    modules["0.self_attn.q_proj"] = (HIDDEN, HIDDEN)
    for module, (outputs, inputs) in modules.items():
        for side, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
            values = rng.standard_normal(shape, np.float32) / 10
            stored[f"{START}{module}.lora_{side}.weight"] = values
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "bias": "none"}
    directory.mkdir()
    save_file(stored, directory / WEIGHTS)
    (directory / CONFIG).write_text(json.dumps(config))
    return directory


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return adapter_of_example(tmp_path / "adapter")


def opened(*adapters: object, model: Path = EXAMPLE) -> Any:
    return open_checkpoint(ModelSource(model, adapter=tuple(map(str, adapters))))


def of(part: str) -> str:
    return START + part


def _renamed(old: str, new: str) -> Callable[[Stored, Config], None]:
    def change(stored: Stored, _: Config) -> None:
        stored[of(new)] = stored.pop(of(old))

    return change


def _without(name: str) -> Callable[[Stored, Config], None]:
    return lambda stored, _: stored.pop(of(name))


def _as(name: str, values: Any) -> Callable[[Stored, Config], None]:
    return lambda stored, _: stored.update({of(name): values})


def _says(**settings: Any) -> Callable[[Stored, Config], None]:
    return lambda _, config: config.update(settings)


def _nan(value: float) -> Callable[[Stored, Config], None]:
    def change(stored: Stored, _: Config) -> None:
        stored[of("1.mlp.experts.5.up_proj.lora_B.weight")][7, 1] = value

    return change


UP = "1.mlp.experts.5.up_proj.lora_"
Q = "0.self_attn.q_proj.lora_"
CHANGES: list[tuple[Callable[[Stored, Config], Any], str]] = [
    (_nan(np.nan), "experts.5.up_proj.lora_B.weight in .* has a NaN or an infinity"),
    (_nan(np.inf), "experts.5.up_proj.lora_B.weight in .* has a NaN or an infinity"),
    (_without(f"{UP}A.weight"), "does not contain .*experts.5.up_proj.lora_A.weight"),
    (_without(f"{Q}B.weight"), "does not contain .*0.self_attn.q_proj.lora_B.weight"),
    (_renamed(f"{UP}A.weight", "1.mlp.experts.8.up_proj.lora_A.weight"), "does not contain"),
    (
        lambda s, c: [
            _as(f"1.mlp.experts.8.{p}_proj.lora_{x}.weight", s[of(f"{UP}{x}.weight")])(s, c)
            for p in ("gate", "up", "down")
            for x in "AB"
        ],
        "contains .*experts.8.*, but the model has 8 experts",
    ),
    (
        _as("7.mlp.experts.0.up_proj.lora_A.weight", np.ones((RANK, HIDDEN), np.float32)),
        "layer 7 of the model has no experts",
    ),
    (
        _as("7.mlp.experts.base_layer.lora_A.weight", np.ones((RANK, HIDDEN), np.float32)),
        "has .*7.mlp.experts.base_layer.lora_A.weight, but layer 7 of the model has no experts",
    ),
    (
        _as("1.mlp.experts.w13_lora.lora_A.weight", np.ones((RANK, HIDDEN), np.float32)),
        "1.mlp.experts.w13_lora.lora_A.weight .* is of experts, in a layout that is not known",
    ),
    (
        _as("0.mlp.nonsense.lora_A.weight", np.ones((RANK, HIDDEN), np.float32)),
        "0.mlp.nonsense.lora_A.weight .* is of a module that the model does not have",
    ),
    (_as("0.self_attn.q_proj.bias", np.ones(HIDDEN, np.float32)), "is no matrix of LoRA"),
    (
        _as("0.self_attn.q_proj.lora_magnitude_vector.weight", np.ones(HIDDEN, np.float32)),
        "lora_magnitude_vector.weight .* is no matrix of LoRA",
    ),
    (
        _as("0.self_attn.k_proj.base_layer.weight", np.ones((HIDDEN, HIDDEN), np.float32)),
        "k_proj.base_layer.weight in .* is another weight than model.layers.0.self_attn.k_proj",
    ),
    (
        _as(f"{Q}A.weight", np.ones((RANK, HIDDEN + 1), np.float32)),
        r"A of .*q_proj in .* is \[1, 3, 129\], but the model needs \[1, 3, 128\]",
    ),
    (
        _as(f"{Q}B.weight", np.ones((HIDDEN, RANK + 1), np.float32)),
        r"B of .*q_proj in .* is \[1, 128, 4\], but the model needs \[1, 128, 3\]",
    ),
    (
        _as(f"{UP}B.weight", np.ones((INNER, 4), np.float32)),
        r"is F32 \[256, 4\], but .* \[256, 3\]",
    ),
    (_as(f"{Q}A.weight", np.ones((RANK, HIDDEN), np.int8)), "q_proj.lora_A.weight in .* is I8"),
    (
        lambda s, _: s.update({"layers.1.experts.up_lora_a": np.ones((8, 3, 128), np.float32)}),
        "are the same matrix",
    ),
    (_says(r=4), "says rank 4 of .*, whose matrices have 3"),
    (_says(lora_alpha=0), "says lora_alpha 0, not a number above 0"),
    (_says(lora_alpha="6"), "says lora_alpha '6', not a number above 0"),
    (_says(rank_pattern=[1]), r"says rank_pattern \[1\], not an object"),
    (_says(rank_pattern={"(x+x+)+y": 3}, r=3, alpha_pattern={"(": 3}), "the patterns of"),
    (
        _says(alpha_pattern={r"experts\.3\.up_proj": 8}),
        "has another alpha for .* than for .*",
    ),
    (_says(peft_type="IA3"), "is of an adapter of type 'IA3', not LORA"),
    (_says(use_dora=True), "says use_dora, which is more than a product to add to each weight"),
    (_says(fan_in_fan_out=True), "says fan_in_fan_out, which is more than a product"),
    (_says(use_dora_v9=True), "says use_dora_v9, which is more than a product"),
    (_says(bias="lora_only"), "says bias 'lora_only': biases were trained, too"),
    (_says(modules_to_save=["lm_head"]), "says modules_to_save"),
    (_says(trainable_token_indices=[1, 2]), "says trainable_token_indices"),
    (_says(layer_replication=[[0, 1]]), "says layer_replication"),
    (_says(alora_invocation_tokens=[5]), "says alora_invocation_tokens"),
    (_says(init_lora_weights="pissa_niter_4"), "says init_lora_weights 'pissa_niter_4'"),
    (_says(init_lora_weights="loftq"), "which changed the base's weights before training"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_changed_adapters(number: int, adapter: Path, tmp_path: Path) -> None:
    change, said = CHANGES[number]
    stored, config = load_file(adapter / WEIGHTS), json.loads((adapter / CONFIG).read_text())
    change(stored, config)
    save_file(stored, adapter / WEIGHTS)
    (adapter / CONFIG).write_text(json.dumps(config))
    source, output = ModelSource(EXAMPLE, adapter=(str(adapter),)), tmp_path / "output"
    with pytest.raises(KtconvError, match=said) as caught:
        prepare(Request(source, output, Options()))
    assert caught.value.hint
    assert "\n" not in str(caught.value)
    assert not output.exists()


@pytest.mark.parametrize("setting", ["use_dora", "fan_in_fan_out", "use_dora_v9"])
def test_peft_merges_other_kinds(setting: str, adapter: Path) -> None:
    config = json.loads((adapter / CONFIG).read_text()) | {setting: True}
    (adapter / CONFIG).write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as caught:
        opened(adapter)
    assert "merge_and_unload" in (caught.value.hint or "")


def test_a_plain_adapter_is_added(adapter: Path) -> None:
    """The changes above are what is wrong with them."""
    opened(adapter)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}:abc", "the weight 'abc' is not a number from -1e6 to 1e6 other than 0"),
        ("{}:nan", "the weight 'nan' is not a number from -1e6 to 1e6 other than 0"),
        ("{}:-inf", "the weight '-inf' is not a number from -1e6 to 1e6 other than 0"),
        ("{}:0", "the weight '0' is not a number from -1e6 to 1e6 other than 0"),
        ("{}:", "the weight '' is not a number from -1e6 to 1e6 other than 0"),
        ("{}:1e30", "the weight '1e30' is not a number from -1e6 to 1e6 other than 0"),
        ("{}x", "adapterx does not exist"),
        ("{}/adapter_config.json", "adapter_config.json is not a directory"),
    ],
)
def test_words_of_the_option(text: str, said: str, adapter: Path) -> None:
    with pytest.raises(KtconvError, match=said):
        opened(text.format(adapter))


def test_an_adapter_twice(adapter: Path) -> None:
    (adapter.parent / "again").symlink_to(adapter)
    with pytest.raises(UsageError, match=r"is given twice"):
        opened(adapter, f"{adapter.parent / 'again'}:0.5")


def test_a_colon_in_a_name(adapter: Path) -> None:
    """Of a directory that there is."""
    named = adapter.rename(adapter.parent / "of:2")
    assert opened(named).adapters == [f"{named}:1.0"]
    assert opened(f"{named}:2").adapters == [f"{named}:2.0"]


def test_files_that_are_not_there(adapter: Path) -> None:
    (adapter / WEIGHTS).rename(adapter / "adapter_model.bin")
    with pytest.raises(
        CheckpointError, match=r"has no adapter_model.safetensors, but .*bin"
    ) as one:
        opened(adapter)
    assert "files of other kinds could run code" in str(one.value.hint)
    (adapter / CONFIG).unlink()
    with pytest.raises(CheckpointError, match=r"has no adapter_config.json"):
        opened(adapter)


@pytest.mark.parametrize("name", [WEIGHTS, CONFIG])
def test_links_that_leave_the_directory(name: str, adapter: Path, tmp_path: Path) -> None:
    (adapter / name).rename(tmp_path / "elsewhere")
    (adapter / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"which is outside of"):
        opened(adapter)


def test_a_pipe_and_a_device(adapter: Path) -> None:
    (adapter / WEIGHTS).unlink()
    os.mkfifo(adapter / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"is not a regular file"):
        opened(adapter)
    (adapter / WEIGHTS).unlink()
    (adapter / WEIGHTS).symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=r"is not a regular file"):
        opened(adapter)


def test_bombs(adapter: Path) -> None:
    """A header that is larger than the format's limit, and shapes beyond the file."""
    (adapter / WEIGHTS).write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match=r"declares a header of"):
        opened(adapter)
    entry = {"dtype": "F32", "shape": [1 << 40, 128], "data_offsets": [0, 1 << 49]}
    header = json.dumps({of(f"{Q}A.weight"): entry}).encode()
    (adapter / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match=r"is truncated"):
        opened(adapter)
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{}}'
    (adapter / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + b"0000")
    with pytest.raises(CheckpointError, match=r"twice"):
        opened(adapter)


def test_another_model(adapter: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"layer 1 of the model has no experts|but the model"):
        opened(adapter, model=model)


def test_a_sum_beyond_the_dtype(adapter: Path) -> None:
    """Found when it is read."""
    stored = load_file(adapter / WEIGHTS)
    for side in "AB":
        stored[of(f"{Q}{side}.weight")] *= 1e25
    save_file(stored, adapter / WEIGHTS)
    checkpoint = opened(adapter)
    source = SourceTensors(checkpoint)
    tensor = source.find(["model.layers.0.self_attn.q_proj.weight"])
    assert tensor is not None
    with pytest.raises(CheckpointError, match=r"q_proj.weight in .* with .* is beyond BF16"):
        source.matrix(tensor).values()


def test_an_adapter_that_changes_while_it_is_used(adapter: Path, tmp_path: Path) -> None:
    source = ModelSource(EXAMPLE, adapter=(str(adapter),))
    request = Request(source, tmp_path / "output", Options())
    preflight = prepare(request)
    stored = load_file(adapter / WEIGHTS)
    save_file({name: one * 2 for name, one in stored.items()}, adapter / WEIGHTS)
    with pytest.raises(SourceChangedError, match=r"adapter_model.safetensors changed"):
        quantize_cpu(request, preflight=preflight)
    assert not (tmp_path / "output" / "ktconv.json").exists()
