"""Level 3: each MoE layer computed by our kernels on the packed weights, and in float32.

Two questions: do the kernels compute what the packed weights stand for, on every level of
this machine (tight), and how far is that from the source's weights (reported).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktconv import machine, native
from ktconv.checkpoint import PROJECTIONS, MoELayer
from ktconv.errors import CheckpointError, KtconvError
from ktconv.formats.decode import bf16_to_f32, f32_to_bf16
from ktconv.model import route, router_of, router_tensors, shared_expert_tensors
from ktconv.moe import KERNEL_BOUND, Experts
from ktconv.moe.experts import gated
from ktconv.moe.opened import activation_of, packed_experts
from ktconv.plan import matrix_source_bytes
from ktconv.pool import Pool
from ktconv.units import format_size
from ktconv.verify.dense import SourceTensors
from ktconv.verify.findings import Findings
from ktconv.verify.subject import Subject
from ktconv.verify.text import read_text

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
U16 = NDArray[np.uint16]

LEVEL = "layers"
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


def check_layers(
    subject: Subject,
    request: Any,
    findings: Findings,
    progression: Callable[[dict[str, int]], AbstractContextManager[Any]],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Runs the layers; facts for the report."""
    assert subject.checkpoint is not None
    captured = _captured(subject, request, findings, say)
    check = _Layers(subject, request, findings, captured)
    rows = []
    sizes = {_unit(layer): _bytes_of(layer) for layer in _sampled(subject, request)}
    if any(geometry.elsewhere for geometry in subject.packed.layers.values()):
        findings.note("level layers: tokens skip the experts that are not in this output")
    say("kernels against float32")
    with progression(sizes) as observer:
        if observer:
            observer.begin(list(sizes))
        for layer in _sampled(subject, request):
            if observer:
                observer.unit_started(_unit(layer))
            rows.append(check.layer(layer))
            if observer:
                observer.advanced(sizes[_unit(layer)])
                observer.unit_finished(_unit(layer))
    return {
        "states": "captured" if captured else "random",
        "states_are": _STATES["captured" if captured else "random"],
        "tokens": request.tokens,
        "isas": native.isa_available(),
        "kernel_bound": KERNEL_BOUND,
        "layers": rows,
    }


def _unit(layer: MoELayer) -> str:
    return f"layer-{layer.index:05d}"


def _bytes_of(layer: MoELayer) -> int:
    return sum(matrix_source_bytes(layer, 0, proj) for proj in PROJECTIONS) * len(layer.experts)


def _sampled(subject: Subject, request: Any) -> list[MoELayer]:
    assert subject.checkpoint is not None
    layers = [one for one in subject.checkpoint.layers if one.index in subject.packed.layers]
    count = max(1, round(len(layers) * request.sample))
    chosen = random.Random(request.seed).sample(range(len(layers)), count)
    return [layers[index] for index in sorted(chosen)]


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


class _Layers:
    """The check of one layer after the other."""

    def __init__(
        self, subject: Subject, request: Any, findings: Findings, captured: dict[int, Any]
    ) -> None:
        assert subject.checkpoint is not None
        self._subject, self._request, self._findings = subject, request, findings
        self._config = subject.checkpoint.config
        self._source = SourceTensors(subject.checkpoint)
        self._captured = captured
        self._rng = np.random.default_rng(request.seed)

    def layer(self, layer: MoELayer) -> dict[str, Any]:
        experts = packed_experts(self._subject.packed, layer.index, activation_of(self._config))
        inputs = self._here(layer, self._inputs(layer))
        with np.errstate(all="ignore"):  # damaged scales are named by level weights
            return self._compare(layer, experts, inputs)

    def _compare(self, layer: MoELayer, experts: Experts, inputs: Inputs) -> dict[str, Any]:
        truth = _Truth(experts, inputs, lambda expert: self._source.expert(layer, expert))
        kernel_error, y = {}, truth.rounded
        for isa, y in self._outputs(experts, inputs):
            kernel_error[isa] = relative(y, truth.rounded)
            self._judge(layer.index, isa, kernel_error[isa])
        shared = self._shared(layer, bf16_to_f32(inputs.x))
        worst = max(truth.errors, key=lambda expert: truth.errors[expert])
        return {
            "layer": layer.index,
            "kernel_error": kernel_error,
            "quantization_error": relative(y, truth.source),
            "quantization_error_with_shared": None
            if shared is None
            else relative(y + shared, truth.source + shared),
            "weights_error": relative(truth.packed, truth.source),
            "worst_expert": {"expert": worst, "error": truth.errors[worst]},
            "experts_run": len(truth.errors),
            "router_agreement": inputs.router_agreement,
        }

    def _judge(self, layer: int, isa: str, error: float) -> None:
        if error <= KERNEL_BOUND:
            return
        self._findings.fail(
            LEVEL,
            "kernel",
            f"layer {layer} on {isa}: the kernels are off by {error:.3g} from float32 arithmetic "
            f"on the same packed weights, at most {KERNEL_BOUND:g} is right.",
            layer=layer,
            value=error,
        )

    def _outputs(self, experts: Experts, inputs: Inputs) -> Iterator[tuple[str, F32]]:
        before = native.isa()
        with Pool(self._request.threads) as pool:
            try:
                for isa in native.isa_available():
                    native.use_isa(isa)
                    y = experts.forward(inputs.x, inputs.ids, inputs.weights, pool)
                    yield isa, bf16_to_f32(y)
            finally:
                native.use_isa(before)

    # ---- inputs ----

    def _here(self, layer: MoELayer, inputs: Inputs) -> Inputs:
        """Without what goes to experts that were left out of the conversion. Where nothing else
        remains, tokens go to those that are here instead, so that these are computed at all."""
        geometry = self._subject.packed.layers[layer.index]
        ids = np.where(np.isin(inputs.ids, [*geometry.elsewhere]), -1, inputs.ids)
        if not (ids >= 0).any():
            ids = np.resize(np.array(geometry.here, np.int64), ids.shape)
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
        states = self._rng.standard_normal(
            (self._request.tokens, layer.hidden_size), dtype=np.float32
        )
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

    def _shared(self, layer: MoELayer, x: F32) -> F32 | None:
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


class _Truth:
    """Float32 outputs of a layer's routed experts, one expert's matrices in memory at a time."""

    def __init__(self, experts: Experts, inputs: Inputs, source: Callable[[int], Any]) -> None:
        x = bf16_to_f32(inputs.x)
        self.rounded, self.packed, self.source = (np.zeros_like(x) for _ in range(3))
        self.errors: dict[int, float] = {}
        for expert in np.unique(inputs.ids[inputs.ids >= 0]):
            token, slot = np.nonzero(inputs.ids == expert)
            weight = inputs.weights[token, slot, None]
            values, original = experts.values(int(expert)), source(int(expert))
            got = experts.output(values, x[token])
            expected = experts.output(original, x[token])
            rounded = experts.output(values, x[token], rounded=True)
            self.errors[int(expert)] = relative(got, expected)
            for y, part in ((self.rounded, rounded), (self.packed, got), (self.source, expected)):
                np.add.at(y, token, weight * part)


def relative(got: F32, expected: F32) -> float:
    """Norm of the difference over the norm; 0 where both are 0."""
    off, norm = float(np.linalg.norm(got - expected)), float(np.linalg.norm(expected))
    return off / norm if norm else (0.0 if off == 0 else float("inf"))
