"""`--gradients`: LoRA on the packed experts of a layer, and every gradient of it.

Compared with autograd in float32 on the same packed weights, where a bound holds, and on the
source's, which shows what quantization does to training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from msgspec import Struct
from msgspec.structs import replace

from ktconv import native
from ktconv.bench.limits import level_kept
from ktconv.formats import Format
from ktconv.formats.decode import f32_to_bf16
from ktconv.native.training import Lora, Training
from ktconv.runtime import MoELayer
from ktconv.runtime.layers import Experts
from ktconv.source.reading.streamed import Streams
from ktconv.system.pool import Pool
from ktconv.system.threads import torch_threads
from ktconv.targets.packed.weights import Geometry
from ktconv.train.gradients import (
    Call,
    Expected,
    base_of,
    bounds,
    errors,
    expected,
    from_bits,
    random_lora,
    rounding_of,
)
from ktconv.train.reference import KernelRounding
from ktconv.train.step import Step
from ktconv.verify.findings import Facts, Findings
from ktconv.verify.hidden_states import LEVEL, Inputs
from ktconv.verify.memory import F32, LayerNeed
from ktconv.verify.request import VerifyRequest

RANK = 8
# Number of float32 arrays at the same time: of an expert's tokens, and of all tokens.
_OF_EXPERT_TOKENS, _OF_ALL_TOKENS = 40, 16

Errors = dict[str, float]  # by gradients.NAMES


class Weights(Struct, frozen=True):
    """Weights of a layer. `packed`: experts of these numbers, in their order; `source`: one
    expert's."""

    layer: int
    packed: Callable[[Sequence[int]], Experts]
    source: Callable[[int], Streams] | None  # None: LoRA on these would be another adapter


def check_gradients(
    weights: Weights,
    inputs: Inputs,
    at_once: Callable[[int], int],
    pool: Pool,
    findings: Findings,
    seed: int,
) -> Facts:
    """The layer's gradients in the report: the largest errors of all groups of experts that are in
    memory together, of which there may be `at_once(bytes of an expert)`."""
    kernel: dict[str, Errors] = {}
    source: Errors | None = None
    limits: Errors = {}
    with torch_threads(pool.threads), level_kept():
        for numbers in _groups(weights, inputs, at_once):
            group = _Group(weights, numbers, inputs, seed)
            limits = _largest(limits, group.limits)
            for isa in native.kernel_levels(group.experts.layer.layout):
                native.use_isa(isa)
                of_kernel, of_source = group.errors(pool)
                kernel[isa] = _largest(kernel.get(isa, {}), of_kernel)
                _judge(findings, weights.layer, isa, of_kernel, group.limits)
            source = None if of_source is None else _largest(source or {}, of_source)
            group.experts.release()
    return {"kernel_error": kernel, "source_error": source, "bounds": limits}


def _groups(
    weights: Weights, inputs: Inputs, at_once: Callable[[int], int]
) -> Iterator[Sequence[int]]:
    numbers = inputs.experts
    one = weights.packed(numbers[:1])
    each = lora_bytes(one.hidden, one.intermediate, one.activation.gated)
    count = at_once(one.expert_bytes + each)
    for first in range(0, len(numbers), count):
        yield numbers[first : first + count]


class _Group:
    """A call of some experts, and what it should have for gradients."""

    def __init__(self, weights: Weights, numbers: Sequence[int], inputs: Inputs, seed: int) -> None:
        self.experts = experts = weights.packed(numbers)
        self._call = _call(experts, numbers, inputs, seed)
        self.limits = bounds(self._call)
        how = rounding_of(experts)
        exact: KernelRounding = {**how, "rounding": "none"}
        self._on_packed = self._expected(experts.streams, numbers, how)
        self._on_source = None
        if weights.source is not None:
            self._on_source = self._expected(weights.source, numbers, exact)

    def _expected(
        self, streams: Callable[[int], Streams], numbers: Sequence[int], how: KernelRounding
    ) -> Expected:
        return expected(
            self._call, lambda expert: base_of(streams(numbers[expert])), how, self.experts.norm
        )

    def errors(self, pool: Pool) -> tuple[Errors, Errors | None]:
        """Errors of our gradients at the level in use: from those on packed and on source
        weights."""
        step = Step(MoELayer(self.experts, pool), self._call)
        step.forward(self._call.ids)
        step.backward()
        found = step.found()
        right = self._on_source
        return errors(found, self._on_packed), None if right is None else errors(found, right)


def _call(experts: Experts, numbers: Sequence[int], inputs: Inputs, seed: int) -> Call:
    """Their calls among `inputs`, by their places in `numbers`."""
    ids = inputs.only(numbers).ids
    places = np.where(ids >= 0, np.searchsorted(numbers, ids), -1)
    rng = np.random.default_rng([seed, numbers[0]])
    dy = f32_to_bf16(rng.standard_normal(inputs.x.shape, np.float32))
    return Call(
        from_bits(inputs.x),
        torch.from_numpy(places),
        torch.from_numpy(inputs.weights),
        from_bits(dy),
        random_lora(
            len(numbers),
            experts.hidden,
            experts.intermediate,
            RANK,
            torch.Generator().manual_seed(seed + numbers[0]),
            experts.activation.gated,
        ),
    )


def _largest(before: Errors, now: Errors) -> Errors:
    """NaN stays."""
    return {name: float(np.maximum(before.get(name, 0.0), error)) for name, error in now.items()}


def _judge(findings: Findings, layer: int, isa: str, found: Errors, limits: Errors) -> None:
    for name, error in found.items():
        if not error <= limits[name]:
            what = "the result" if name == "y" else f"the gradient {name}"
            message = (
                f"layer {layer} on {isa}: {what} with LoRA has an error of {error:.3g} from "
                f"float32 arithmetic on the same packed weights; the limit is {limits[name]:g}."
            )
            findings.fail(LEVEL, "gradient", message, layer=layer, value=error)


# ---- memory ----


def with_gradients(
    need: LayerNeed, geometries: Iterable[Geometry], request: VerifyRequest, top_k: int
) -> LayerNeed:
    """The need of a level layers that checks gradients, too."""
    known = [(one.format, one) for one in geometries if one.format]
    with Pool(request.threads) as pool:
        fixed = [_fixed_bytes(fmt, one, request.tokens, top_k, pool) for fmt, one in known]
    each = (lora_bytes(one.hidden, one.intermediate, one.gated) for _, one in known)
    more = max(each, default=0)
    return replace(need, fixed=need.fixed + max(fixed, default=0), expert=need.expert + more)


def _fixed_bytes(fmt: Format, geometry: Geometry, tokens: int, top_k: int, pool: Pool) -> int:
    """Bytes besides LoRA: an expert's weights in fp32, tokens of an expert in autograd, results,
    and what the kernels save and use."""
    hidden, inner = geometry.hidden, geometry.intermediate
    weights = len(geometry.projections) * hidden * inner
    arrays = tokens * (_OF_EXPERT_TOKENS * (hidden + inner) + _OF_ALL_TOKENS * hidden)
    activation = native.Activation("swiglu" if geometry.gated else "relu2")
    nobody: list[list[native.Expert | None]] = [[None] * geometry.experts] * geometry.parts
    layer = native.Layer(fmt.layout, activation, hidden, inner, nobody)
    sizes = Training(layer, Lora(RANK, {}, "bf16", 1.0), pool)
    kernels = sizes.saved_size(tokens, top_k) + sizes.scratch_size(tokens, top_k)
    return F32 * (weights + arrays) + kernels


def lora_bytes(hidden: int, intermediate: int, gated: bool) -> int:
    """Bytes of an expert's LoRA: its matrices in the call and in the module, their gradients, those
    that are expected on packed and source weights, in fp32 and, while they are compared,
    float64."""
    each = 2 + 2 + 4 + 2 + 3 * 4 + 3 * 8
    return each * (3 if gated else 2) * RANK * (hidden + intermediate)
