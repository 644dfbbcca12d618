"""A tiny checkpoint of every model family, and the weights of its experts.

Where transformers has a family, its own class writes the checkpoint: names and config keys are
those that users have. What it does not write (other layouts, encodings, layers for multi-token
prediction, families that it does not have) is made here, as released files have it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from helpers.convert import read_model
from helpers.encoded import Rng, Stored
from helpers.families import Raw, Tensor, bf16, write_checkpoint
from helpers.layouts import Encode, Weights, biases_of, draw, experts_of
from ktconv.source import Projection

VOCAB, HIDDEN, INNER, EXPERTS, TOP_K = 64, 128, 256, 4, 2
F32 = NDArray[np.float32]
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Model:
    """A checkpoint: what its row in the table of families is, and what must be found in it."""

    type: str  # model_type of the section about experts
    at: str  # where a layer's experts are; {} is its number
    layers: tuple[int, ...]  # with experts, without those for multi-token prediction
    layout: str = "N"
    activation: str = "silu"
    router: str = "S1"  # code of its rule
    mtp: str = ""  # the start of names of such a layer, whose number is that of all layers
    experts: int = EXPERTS
    hidden: int = HIDDEN
    inner: int = INNER
    encoding: str = "bf16"  # ktconv's name for it
    biases: bool = False  # of experts
    post_norm: bool = False  # an RMS norm of each expert's output
    router_apart: bool = False  # it has another input than the experts, or is not computed
    # class of a model in transformers, or of the config of one without a class of its own; if it is
    # empty, the checkpoint is made here
    saved_by: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    of: Encode | None = None  # encodes a matrix; bf16
    beside: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # in each layer
    more: Mapping[str, tuple[int, ...] | None] = field(default_factory=dict)  # elsewhere

    @property
    def sources(self) -> Mapping[int, str]:
        """Where the experts of each layer are."""
        found = {index: self.at.format(index) for index in self.layers}
        if self.mtp:
            last = max(self.layers)
            found[last + 1] = found[last].replace(self.layer(last), self.mtp)
        return found

    def layer(self, index: int) -> str:
        """The start of names of a layer."""
        return self.at.partition("{}")[0] + f"{index}."

    def others(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of tensors that are not experts, of a checkpoint that is made here."""
        found: dict[str, tuple[int, ...] | None] = {}
        for index in self.sources:
            layer = self.mtp if index not in self.layers else self.layer(index)
            found |= {f"{layer}{name}": shape for name, shape in self.beside.items()}
        return {name: shape for name, shape in {**found, **self.more}.items() if shape is not None}

    @property
    def gated(self) -> bool:
        return self.layout not in ("U", "F11", "F13")

    @property
    def for_ktransformers(self) -> bool:
        """Whether its methods INT4 and INT8 compute these experts: SiLU, and nothing else."""
        plain = not (self.biases or self.post_norm or self.router == "L4")
        return self.activation == "silu" and self.gated and plain


# ---- written by transformers -----------------------------------------------------------

# Values for the keys that a config class has.
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": INNER,
    "moe_intermediate_size": INNER, "num_experts": EXPERTS, "n_routed_experts": EXPERTS,
    "num_local_experts": EXPERTS, "moe_num_experts": EXPERTS, "num_experts_per_tok": TOP_K,
    "moe_topk": TOP_K, "moe_k": TOP_K, "top_k_experts": TOP_K, "n_shared_experts": 1,
    "num_shared_experts": 1, "moe_num_shared_experts": 1, "first_k_dense_replace": 1,
    "num_dense_layers": 1, "n_group": 2, "topk_group": 1, "kv_lora_rank": 32, "q_lora_rank": 32,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "index_head_dim": 32,
    "index_n_heads": 2, "shared_expert_intermediate_size": INNER,
    "shared_intermediate_size": INNER, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_heads": 2,
    "linear_head_dim": 32, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
    "max_position_embeddings": 128, "unpadded_vocab_size": VOCAB,
}  # fmt: skip
_VISION: dict[str, Any] = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
    "num_attention_heads": 2, "num_hidden_layers": 1, "out_hidden_size": HIDDEN,
    "num_position_embeddings": 16, "image_size": 28, "patch_size": 14,
    "deepstack_visual_indexes": [0], "vision_output_dim": 32, "projector_input_dim": 32,
    "projector_output_dim": 32, "d_model": 32, "encoder_layers": 1, "output_dim": HIDDEN,
    "projection_intermediate_size": 32,
}  # fmt: skip


def _saved(
    saved_by: str, type_: str, at: str, layers: tuple[int, ...], layout: str = "N", **more: Any
) -> Model:
    return Model(type_, at, layers, layout, saved_by=saved_by, **more)


def tiny_config(model: Model) -> Any:
    """The config of a model that transformers writes."""
    import transformers

    saved_by = getattr(transformers, model.saved_by)
    kind = getattr(saved_by, "config_class", saved_by)
    return kind(**_tiny(kind(), _TEXT, model.config))


def _tiny(usual: Any, small: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that make a config small: those of `small` that it knows, and `settings`."""
    from transformers import PreTrainedConfig

    known = {*usual.to_dict(), *usual.attribute_map}
    found = {key: value for key, value in small.items() if key in known}
    for key in known:
        inner = None if key in settings and settings[key] is None else _section(usual, key)
        if isinstance(inner, PreTrainedConfig):
            text = hasattr(inner, "vocab_size") or key == "ffn_config"
            found[key] = _tiny(inner, _TEXT if text else _VISION, settings.get(key, {}))
            if inner.model_type:
                found[key]["model_type"] = inner.model_type
    own = {key: value for key, value in settings.items() if key not in found or value is None}
    flat = {key: value for key, value in settings.items() if not isinstance(value, dict)}
    return {**found, **own, **flat}


def _section(config: Any, key: str) -> Any:
    return config.__dict__.get(key)


def build(model: Model) -> Any:
    """The model that is written, with random weights wherever it has zeros or nothing."""
    import torch
    import transformers

    torch.manual_seed(sum(model.saved_by.encode()))
    config, kind = tiny_config(model), getattr(transformers, model.saved_by)
    if issubclass(kind, transformers.PreTrainedConfig):
        kind = transformers.AutoModelForCausalLM.from_config
    built = kind(config)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Casting complex values")  # of Llama 4's frequencies
        built.to(torch.bfloat16)
    with torch.no_grad():
        for name, tensor in (*built.named_parameters(), *built.named_buffers()):
            if "bias" in name or (tensor.dim() > 1 and tensor.requires_grad):
                tensor.copy_(torch.randn(tensor.shape) / 8)
            elif "norm" in name and tensor.requires_grad:
                tensor.copy_(1 + torch.randn(tensor.shape) / 8)
    return built


def reading_text(model: Any) -> Any:
    """The part of a model that reads a text. Transformers 5.24 wants images of Llama 4's whole."""
    return model.language_model if type(model).__name__.startswith("Llama4ForCond") else model


# A character is a token.
_LETTERS = ("<unk>", *(chr(ord("?") + number) for number in range(1, VOCAB)))
_TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {
        "type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False
    },
    "model": {
        "type": "WordLevel", "unk_token": "<unk>",
        "vocab": {letter: number for number, letter in enumerate(_LETTERS)},
    },
}  # fmt: skip


kept: Path | None = None  # where checkpoints stay that transformers has written; see conftest.py


def _copy_saved(model: Model, directory: Path) -> None:
    """The checkpoint as `_save` writes it, which it does once in a run of the tests."""
    if kept is None:
        _save(model, directory)
        return
    first = kept / hashlib.sha256(repr(model).encode()).hexdigest()
    if not first.exists():
        mine = kept / f"{first.name}.{os.getpid()}"
        _save(model, mine)
        try:
            mine.rename(first)
        except OSError:  # another process was faster
            shutil.rmtree(mine)
    shutil.copytree(first, directory, dirs_exist_ok=True)


def _save(model: Model, directory: Path) -> None:
    import transformers

    transformers.logging.disable_progress_bar()
    build(model).save_pretrained(directory)
    (directory / "tokenizer.json").write_text(json.dumps(_TOKENIZER))
    if model.mtp:
        tensors = read_model(directory)
        last = max(model.layers)
        for name, tensor in list(tensors.items()):
            if name.startswith(model.layer(last)):
                tensors[name.replace(model.layer(last), model.mtp)] = _reversed(tensor)
        for file in directory.glob("*.safetensors"):
            file.unlink()
        config = json.loads((directory / "config.json").read_text())
        text = config.get("text_config", config)
        text["num_nextn_predict_layers"] = 1  # transformers drops it together with the layers
        write_checkpoint(directory, tensors, config)


def _reversed(tensor: Raw) -> Raw:
    """The same numbers in another order."""
    dtype, shape, data = tensor
    count = max(1, int(np.prod(shape)))
    return Raw(dtype, shape, np.frombuffer(data, f"V{len(data) // count}")[::-1].tobytes())


# ---- made here -------------------------------------------------------------------------


def of_bf16(rng: Rng, rows: int, cols: int) -> Stored:
    values = rng.standard_normal((rows, cols), dtype=np.float32) / 8
    values = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return {"weight": bf16(values)}, values


class Written(NamedTuple):
    """What a checkpoint contains, by layer, expert and projection."""

    matrices: dict[tuple[int, int, Projection], F32]
    biases: dict[tuple[int, int, Projection], F32]
    others: dict[str, Raw]  # tensors that are not of routed experts


def write(model: Model, directory: Path) -> Written:
    """Write the checkpoint of `model`."""
    if model.saved_by:
        _copy_saved(model, directory)
        stored = read_model(directory)
        found = {
            index: experts_of(model.layout, source, model.experts, stored)
            for index, source in model.sources.items()
        }
        experts = {name for one in found.values() for name in one.names}
        weights = {index: one.weights for index, one in found.items()}
    else:
        tensors, weights = _draw(model)
        experts = set(tensors)
        config = {key: value for key, value in model.config.items() if value is not None}
        write_checkpoint(directory, {**tensors, **_others(model)}, config)
        stored = read_model(directory)
    biases = {}
    if model.biases:
        for index, source in model.sources.items():
            biases[index], names = biases_of(model.layout, source, stored)
            experts |= names
    others = {
        name: one
        for name, one in stored.items()
        if name not in experts and not name.endswith("activation_scale")
    }
    return Written(_by_expert(weights), _by_expert(biases), others)


def _by_expert(found: Mapping[int, Weights]) -> dict[tuple[int, int, Projection], F32]:
    return {
        (index, expert, projection): values
        for index, weights in found.items()
        for projection, stack in weights.items()
        for expert, values in enumerate(stack)
    }


def _draw(model: Model) -> tuple[Tensors, dict[int, Weights]]:
    """Tensors of all experts, and the weights in them."""
    rng = np.random.default_rng(len(model.at) + model.inner)
    sizes = model.experts, model.inner, model.hidden
    tensors: Tensors = {}
    weights = {}
    for index, source in model.sources.items():
        stored, weights[index] = draw(model.layout, source, sizes, rng, model.of or of_bf16)
        tensors |= stored
    return tensors, weights


def _others(model: Model) -> Tensors:
    rng = np.random.default_rng(1)
    tensors: Tensors = {}
    for name, shape in model.others().items():
        if name.endswith("tid2eid"):  # experts by token
            tensors[name] = rng.integers(0, model.experts, shape, np.int64)
        else:
            values = rng.standard_normal(shape, dtype=np.float32) / 8
            tensors[name] = values if name.endswith("bias") else bf16(values)
    return tensors
