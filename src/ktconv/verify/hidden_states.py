"""Hidden states, expert ids and weights that level layers calls the experts of a layer with."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from threadpoolctl import threadpool_limits

from ktconv.errors import CheckpointError, KtconvError
from ktconv.families.names import is_gguf
from ktconv.families.routing import Stored, route
from ktconv.formats.decode import bf16_to_f32, f32_to_bf16
from ktconv.model.decoded import loaded_bytes
from ktconv.model.text import read_text
from ktconv.runtime.layers.experts import expert_output, in_blocks
from ktconv.runtime.layers.load import kernel_activation
from ktconv.runtime.layers.output_norms import norm_tensor
from ktconv.source import Checkpoint, MoELayer
from ktconv.source.reading.tensors import SourceTensors, norm_scale
from ktconv.system import machine
from ktconv.system.arrays import F32, I64, U16
from ktconv.system.text import Notify
from ktconv.system.units import format_size, listed
from ktconv.verify.layer_tensors import WEIGHTS, LayerTensors, Router, top_k_of_layer
from ktconv.verify.output import OpenedOutput

if TYPE_CHECKING:
    from ktconv.verify.verifier import OutputVerifier

LayerInput = tuple[F32, I64, F32]  # hidden states, ids and weights, as the model has them

LEVEL = "layers"
_SHARE_OF_MEMORY = 4  # a model is loaded for its hidden states if it takes at most 1 / 4
_STATES = {
    "captured": "hidden states captured from a text",
    "random": "random hidden states with the scale of each channel",
}


class Inputs(Struct, frozen=True):
    """Arguments of a call of a layer's experts."""

    x: U16  # [M, H], bf16 bits
    ids: I64  # [M, K], -1 is skipped
    weights: F32  # [M, K]
    routing: str  # what chose the experts: model, router (ours) or random
    router_agreement: float | None = None  # of our router with the model's own, where known

    def only(self, experts: Sequence[int]) -> Inputs:
        """Inputs without calls of other experts, among them those that return their input."""
        return replace(self, ids=np.where(np.isin(self.ids, experts), self.ids, -1))

    @property
    def experts(self) -> list[int]:
        """Ids of the experts that have tokens, ascending."""
        return [int(expert) for expert in np.unique(self.ids[self.ids >= 0])]


def check_source(output: OpenedOutput) -> None:
    """Raises KtconvError, before anything is read, for an activation that kernels do not have, a
    layer without a router, or a config.json that contradicts itself about them."""
    try:
        for layer in output.source_layers.values():
            kernel_activation(layer.activation)
            norm_tensor(SourceTensors(output.source), layer)
        _tensors_of(output)
    except CheckpointError as error:
        error.hint = error.hint or "run --level weights, which does not need it"
        raise


def experts_per_token(output: OpenedOutput) -> int:
    """The largest number of any layer."""
    config, layers = output.source.config, output.source_layers.values()
    return max((top_k_of_layer(config, layer) for layer in layers), default=1)


def _tensors_of(output: OpenedOutput) -> dict[int, LayerTensors]:
    source, config = SourceTensors(output.source), output.source.config
    layers = output.source_layers.items()
    return {index: LayerTensors(source, config, layer) for index, layer in layers}


class HiddenStates:
    """Inputs of every layer: captured from the source model if possible, else random."""

    def __init__(self, verifier: OutputVerifier, notify: Notify) -> None:
        source, request = verifier.output.source, verifier.request
        self._config, self._source = source.config, SourceTensors(source)
        self._tensors = _tensors_of(verifier.output)
        self._findings, self._request = verifier.findings, request
        self._report_faults()
        self._tokens, self._rng = request.tokens, np.random.default_rng(request.seed)
        self._read: I64 | None = None  # the tokens [M] that captured states are of
        self._captured = self._capture(source, verifier.budget.why_not_captured, notify)

    def _capture(
        self, source: Checkpoint, reason: str | None, notify: Notify
    ) -> dict[int, LayerInput]:
        """Inputs of every layer when the source model reads a text; empty if it cannot."""
        if source.pruning is not None:
            reason = "the model is pruned while it is converted"
        if source.mapped is not None:
            reason = "transformers does not load a model by the names of a map"
        if reason is None:
            notify("loading the source model for its hidden states")
            try:
                from ktconv.model import load_model
                from ktconv.model.evaluate import capture_layer_inputs, windows

                text, _ = read_text(self._request.text)
                model, tokenizer = load_model(
                    source.path, config_directory=source.side_directory, adapters=source.adapters
                )
                self._read = windows(tokenizer, text, self._tokens, 1)[0][0].numpy()
                return capture_layer_inputs(model, tokenizer, text, self._tokens)
            except MemoryError:
                raise
            except Exception as error:  # of a model's own code; random states are enough
                reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        self._findings.note(f"level layers: {_STATES['random']}, because {reason}")
        return {}

    def _report_faults(self) -> None:
        findings, layers_of = self._findings, dict[str, list[int]]()
        for index, found in self._tensors.items():
            for fault in found.faults:
                findings.fail(LEVEL, fault.check, fault.message, tensor=fault.tensor, layer=index)
            for note in found.notes:
                layers_of.setdefault(note, []).append(index)
        for note, layers in layers_of.items():
            findings.note(f"level layers, {listed('layer', layers)}: {note}")

    @property
    def facts(self) -> dict[str, Any]:
        kind = "captured" if self._captured else "random"
        return {"states": kind, "states_are": _STATES[kind], "tokens": self._tokens}

    def of(self, layer: MoELayer, here: Sequence[int]) -> Inputs:
        """Inputs for the experts `here` alone. If no token goes to these, all tokens are sent to
        them, so that they are computed at all."""
        inputs = self._inputs(layer).only(here)
        if not inputs.experts:
            inputs = replace(inputs, ids=np.resize(np.array(here, np.int64), inputs.ids.shape))
        return inputs

    def _inputs(self, layer: MoELayer) -> Inputs:
        """Captured with the model's own choice of experts, or random and routed by us."""
        router = self._tensors[layer.index].router
        if layer.index in self._captured:
            hidden, ids, weights = self._captured[layer.index]
            agreement = self._agreement(layer, router, hidden, ids) if router else None
            return Inputs(f32_to_bf16(hidden), ids, weights, "model", agreement)
        x, routed = self._random_states(layer, router)
        if router is None:
            return Inputs(x, *self._random_routing(layer), "random")
        try:
            ids, weights = self._route(router, routed)
        except CheckpointError as error:  # for what its tensors contain
            self._findings.fail(
                LEVEL, "router", f"{error}.", tensor=router.weight.name, layer=layer.index
            )
            return Inputs(x, *self._random_routing(layer), "random")
        if router.spec.weight_on_input:  # a row for each expert of a token
            rows = bf16_to_f32(x)[:, None, :] * weights[:, :, None]
            x = f32_to_bf16(rows.reshape(-1, rows.shape[2]))
            ids, weights = ids.reshape(-1, 1), np.ones((len(x), 1), np.float32)
        return Inputs(x, ids, weights, "router")

    def _random_states(self, layer: MoELayer, router: Router | None) -> tuple[U16, F32]:
        """Inputs of the experts (bf16 bits) and of the router: normal values, each channel scaled
        by its weight in the RMS norm."""
        states = self._normal(layer.hidden_size)
        x = f32_to_bf16(self._scaled(layer, states))
        if router is None:
            return x, states
        if router.width != layer.hidden_size:  # what is between them is no part of the experts
            return x, self._scaled(layer, self._normal(router.width))
        return x, bf16_to_f32(x) if router.spec.input_norm is None else states

    def _normal(self, width: int) -> F32:
        return self._rng.standard_normal((self._tokens, width), dtype=np.float32)

    def _scaled(self, layer: MoELayer, states: F32) -> F32:
        norm = self._tensors[layer.index].norm
        if norm is None or norm.shape != states.shape[1:]:
            return states
        return states * norm_scale(self._source, self._config, layer, norm)

    def _random_routing(self, layer: MoELayer) -> tuple[I64, F32]:
        """Different experts for each token, with weights that add up to 1."""
        scores = self._rng.random((self._tokens, len(layer.experts)), dtype=np.float32)
        top_k = top_k_of_layer(self._config, layer)
        ids = np.argsort(scores, axis=1)[:, :top_k].astype(np.int64)
        weights = 1 + np.take_along_axis(scores, ids, axis=1)
        return ids, weights / weights.sum(axis=1, keepdims=True)

    def _route(self, router: Router, x: F32, tokens: I64 | None = None) -> tuple[I64, F32]:
        """Route tokens; where experts follow from the token and none are given, tokens drawn at
        random."""
        read = self._source
        gate = router.weight
        weight = read.plain(gate) if router.plain else read.matrix(gate).values()
        stored: dict[str, Any] = {
            field: read.vector(tensor) if field in WEIGHTS else read.plain(tensor)
            for field, tensor in router.stored.items()
        }
        if "table" in stored and tokens is None:
            tokens = self._rng.integers(0, len(stored["table"]), len(x))
        weight = weight.T if router.transposed else weight
        return route(router.spec, x, weight, Stored(**stored), tokens)

    def _agreement(self, layer: MoELayer, router: Router, x: F32, ids: I64) -> float | None:
        """None where the router cannot be run on what is known."""
        if router.spec.input_norm is not None:  # it reads what the norm before the experts reads
            norm = self._tensors[layer.index].norm
            if norm is None or is_gguf(layer.source):
                return None
            scale = self._source.vector(norm)
            x = np.divide(x, scale, where=scale != 0, out=np.zeros_like(x))
        try:
            ours, _ = self._route(router, x, self._read)
        except KtconvError:
            return None
        return float(np.mean(np.sort(ours, axis=1) == np.sort(ids, axis=1)))

    def shared(self, layer: MoELayer, x: F32) -> F32 | None:
        """The output of the shared expert, if there is one."""
        found = self._tensors[layer.index].shared
        if found is None:
            return None
        gate = None if found.gate is None else self._source.matrix(found.gate)
        up, down = self._source.matrix(found.up), self._source.matrix(found.down)
        activation = kernel_activation(self._config.shared_activation(layer.index))
        with threadpool_limits(limits=1, user_api="blas"):  # as in LayerReference
            (y,) = in_blocks(lambda rows: (expert_output((gate, up, down), activation, rows),), x)
        if found.gating is not None:
            y /= 1 + np.exp(-self._source.matrix(found.gating).product(x))
        return y


def why_not_captured(output: OpenedOutput) -> str | None:
    """Reason why the source model cannot be loaded for hidden states, apart from --max-memory."""
    source = output.source
    if source.is_gguf and source.side_directory is None:
        return "a GGUF model can only be loaded with --config DIR"
    for package in ("torch", "transformers"):
        if find_spec(package) is None:
            return f"{package} is not installed"
    size = loaded_bytes(source)
    if size * _SHARE_OF_MEMORY > machine.available_memory():
        return f"loading {format_size(size)} of source would need too much memory"
    return None
