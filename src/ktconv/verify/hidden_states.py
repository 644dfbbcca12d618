"""What the experts of a layer are called with when level layers computes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktconv import machine
from ktconv.checkpoint import MoELayer
from ktconv.errors import CheckpointError, KtconvError
from ktconv.formats.decode import bf16_to_f32, f32_to_bf16
from ktconv.model import route, router_of, router_tensors, shared_expert_tensors
from ktconv.moe.experts import gated
from ktconv.moe.opened import activation_of
from ktconv.units import format_size
from ktconv.verify.dense import SourceTensors
from ktconv.verify.findings import Findings
from ktconv.verify.subject import Subject
from ktconv.verify.text import read_text

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
U16 = NDArray[np.uint16]

_NORMS = ("post_attention_layernorm", "ffn_norm", "pre_feedforward_layernorm", "norm2")
_SHARE_OF_MEMORY = 4  # a model is loaded for its hidden states if it takes 1 / 4 at most
_STATES = {
    "captured": "hidden states captured from a text",
    "random": "random hidden states with the scale of each channel",
}


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the experts of a layer are called with."""

    x: U16  # [M, H], bf16 bits
    ids: I64  # [M, K]
    weights: F32  # [M, K]
    router_agreement: float | None = None  # of our router with the model's own, where known


def refuse_impossible(subject: Subject) -> None:
    """Before anything is read: KtconvError if a layer has no router that ktconv knows."""
    assert subject.checkpoint is not None
    tensors = SourceTensors(subject.checkpoint)
    activation_of(subject.checkpoint.config)
    for layer in subject.checkpoint.layers:
        router_of(subject.checkpoint.config, layer.index)
        names = router_tensors(layer.source).weight
        if not any(map(tensors.has, names)):
            raise CheckpointError(
                f"layer {layer.index} has no router: none of {', '.join(names)} is there",
                "run --level weights",
            )


class HiddenStates:
    """Inputs of every layer: captured from the source model where that can be, else made up."""

    def __init__(
        self, subject: Subject, request: Any, findings: Findings, say: Callable[[str], None]
    ) -> None:
        assert subject.checkpoint is not None
        self._config = subject.checkpoint.config
        self._source = SourceTensors(subject.checkpoint)
        self._captured = _captured(subject, request, findings, say)
        self._tokens, self._rng = request.tokens, np.random.default_rng(request.seed)

    @property
    def facts(self) -> dict[str, Any]:
        kind = "captured" if self._captured else "random"
        return {"states": kind, "states_are": _STATES[kind], "tokens": self._tokens}

    def of(self, layer: MoELayer, here: Sequence[int]) -> Inputs:
        """Without what goes to experts other than `here`. Where nothing else remains, tokens go
        to those that are here instead, so that these are computed at all."""
        inputs = self._inputs(layer)
        ids = np.where(np.isin(inputs.ids, here), inputs.ids, -1)
        if not (ids >= 0).any():
            ids = np.resize(np.array(here, np.int64), ids.shape)
        return replace(inputs, ids=ids)

    def _inputs(self, layer: MoELayer) -> Inputs:
        """Captured with the model's own choice of experts, or made up and routed by us."""
        if layer.index in self._captured:
            hidden, ids, weights = self._captured[layer.index]
            x = f32_to_bf16(hidden)
            return Inputs(x, ids, weights, self._agreement(layer, hidden, ids))
        x = f32_to_bf16(self._random_states(layer))
        ids, weights = self._route(layer, bf16_to_f32(x))
        if router_of(self._config, layer.index).weight_on_input:
            x, weights = f32_to_bf16(bf16_to_f32(x) * weights), np.ones_like(weights)
        return Inputs(x, ids, weights)

    def _random_states(self, layer: MoELayer) -> F32:
        """Normal values as an RMS norm leaves them: each channel with its weight in the norm."""
        states = self._rng.standard_normal((self._tokens, layer.hidden_size), dtype=np.float32)
        before = layer.source.rsplit(".experts", 1)[0].rsplit(".", 1)[0]
        scale = self._source.first(f"{before}.{norm}.weight" for norm in _NORMS)
        return states if scale is None else states * scale

    def _route(self, layer: MoELayer, x: F32) -> tuple[I64, F32]:
        names = router_tensors(layer.source)
        weight = self._source.first(names.weight)
        assert weight is not None  # refuse_impossible() looked
        return route(
            router_of(self._config, layer.index),
            x,
            weight,
            bias=self._source.first(names.bias),
            correction=self._source.first(names.correction),
        )

    def _agreement(self, layer: MoELayer, x: F32, ids: I64) -> float | None:
        try:
            ours, _ = self._route(layer, x)
        except KtconvError:
            return None
        return float(np.mean(np.sort(ours, axis=1) == np.sort(ids, axis=1)))

    def shared(self, layer: MoELayer, x: F32) -> F32 | None:
        """What the shared expert adds, where there is one."""
        for names in shared_expert_tensors(layer.source):
            gate = self._source.first([names.gate])
            if gate is None:
                continue
            up, down = self._source.read(names.up), self._source.read(names.down)
            y = gated(activation_of(self._config), x @ gate.T, x @ up.T) @ down.T
            gating = self._source.first([names.gating])
            shared: F32 = y if gating is None else y / (1 + np.exp(-(x @ gating.T)))
            return shared
        return None


def _captured(
    subject: Subject, request: Any, findings: Findings, say: Callable[[str], None]
) -> dict[int, Any]:
    """Inputs of every layer when the source model reads a text; empty where that cannot be."""
    reason = _why_not_captured(subject)
    if reason is None:
        say("loading the source model for its hidden states")
        try:
            return _capture(subject, request)
        except MemoryError:
            raise
        except Exception as error:  # whatever a model's own code raises: random states will do
            reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    findings.note(f"level layers: {_STATES['random']}, because {reason}")
    return {}


def _why_not_captured(subject: Subject) -> str | None:
    assert subject.checkpoint is not None
    for package in ("torch", "transformers"):
        if find_spec(package) is None:
            return f"{package} is not installed"
    size = sum(source.nbytes for source in subject.checkpoint.sources)
    if size * _SHARE_OF_MEMORY > machine.available_memory():
        return f"loading {format_size(size)} of source would take too much of the memory"
    return None


def _capture(subject: Subject, request: Any) -> dict[int, Any]:
    from ktconv.model import capture_layer_inputs, load_model

    assert subject.checkpoint is not None
    model, tokenizer = load_model(subject.checkpoint.path)
    text, _ = read_text(request.text)
    found: dict[int, Any] = capture_layer_inputs(model, tokenizer, text, request.tokens)
    return found
