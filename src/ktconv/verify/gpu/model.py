"""Level 4 for experts on GPUs: the source model against the checkpoint, reading the same text.

A checkpoint with every expert is loaded by transformers, as a user would: compressed-tensors
unpacks it. One that holds only some experts is no model by itself; its experts are dequantized by
us and put into the source model, whose other experts stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from importlib import import_module
from logging import getLogger
from typing import TYPE_CHECKING, Any

from ktconv.checkpoint import PROJECTIONS
from ktconv.errors import CheckpointError, ResourceError
from ktconv.model.load import load_config, running, way_out
from ktconv.system import machine
from ktconv.system.units import format_size
from ktconv.verify.findings import Facts, Findings
from ktconv.verify.gpu.opened import GpuOutput
from ktconv.verify.gpu.weights import dequantized
from ktconv.verify.model import (
    MODEL_PACKAGES,
    MORE_MEMORY,
    NEW_TOKENS,
    PROMPT_CHARACTERS,
    WINDOW,
    WITHOUT_MODEL,
    judge,
    require,
)
from ktconv.verify.subject import Subject
from ktconv.verify.text import read_text

if TYPE_CHECKING:
    from torch import Tensor

# Relative increase of perplexity and mean KL divergence in nats, by bits per weight. Small trained
# models lie at 0.01 and 0.01 (W4A16), 0.001 and 0.0001 (W8A16); larger ones lie lower.
DEFAULTS = {4: (0.05, 0.05), 8: (0.01, 0.01)}
_WITH_BARS = (
    "compressed_tensors.compressors.model_compressors.model_compressor",
    "compressed_tensors.offload.dispatch",
    "compressed_tensors.quantization.lifecycle.apply",
)
_BESIDE = 1.1  # of a model's weights while it is loaded


def refuse_impossible(subject: Subject) -> None:
    """Before anything is read: UsageError without the packages, ResourceError for models that do
    not fit into memory together, CheckpointError for what transformers does not have."""
    assert isinstance(subject, GpuOutput) and subject.checkpoint is not None
    more = {} if _is_partial(subject) else {"compressed_tensors": "compressed-tensors"}
    require(**MODEL_PACKAGES, **more)
    with way_out(WITHOUT_MODEL):
        load_config(subject.checkpoint.path)
    # Two models as the source has them: experts are unpacked when they are loaded.
    size = sum(source.nbytes for source in subject.checkpoint.sources)
    free, total = machine.available_memory(), int(2 * _BESIDE * size)
    if total > free:
        raise ResourceError(
            f"--level model needs about {format_size(total)} of memory for both models, and "
            f"{format_size(free)} are free",
            MORE_MEMORY,
        )


def check_model(
    subject: Subject, request: Any, findings: Findings, say: Callable[[str], None]
) -> Facts | None:
    """Perplexities, divergence and a generation; facts for the report.

    Raises CheckpointError where the model's own code fails.
    """
    assert isinstance(subject, GpuOutput) and subject.checkpoint is not None
    quiet = nullcontext() if _is_partial(subject) else _quiet()
    with way_out(WITHOUT_MODEL, MORE_MEMORY), running(subject.directory), quiet:
        return _check(subject, request, findings, say)


def _check(
    output: GpuOutput, request: Any, findings: Findings, say: Callable[[str], None]
) -> Facts:
    from ktconv.model import greedy_side_by_side, load_model, perplexity_and_divergence, windows

    assert output.checkpoint is not None
    text, name = read_text(request.text)
    say("loading the source model")
    model, tokenizer = load_model(output.checkpoint.path)
    length = min(WINDOW, getattr(model.config, "max_position_embeddings", None) or WINDOW)
    runs = windows(tokenizer, text, length, request.windows)
    both: Any
    if _is_partial(output):
        say("putting the dequantized experts into it")
        both = _Swapped(model, output)
        own = both.experts_of_source
        findings.note(
            f"level model: {own} experts that are not in this output ran on the source's weights"
        )
    else:
        say("loading the converted model")
        both, own = _Pair(model, load_model(output.directory)[0]), 0
    say(f"reading {len(runs)} windows of {runs[0].shape[1]} tokens with both")
    found = perplexity_and_divergence(both, both, runs)
    say(f"writing {NEW_TOKENS} tokens with both")
    prompt = text[:PROMPT_CHARACTERS]
    source, converted = greedy_side_by_side(both, both, tokenizer, prompt, NEW_TOKENS)
    limits = thresholds(output, request.thresholds)
    facts = asdict(found) | {
        "text": name,
        "windows": len(runs),
        "experts_of_source": own,
        "loaded_by": "ktconv" if _is_partial(output) else "transformers",
        "perplexity_increase": found.perplexity_converted / found.perplexity_source - 1,
        "thresholds": limits,
        "generation": {"prompt": prompt, "source": source, "converted": converted},
    }
    judge(facts, limits, findings)
    return facts


def thresholds(output: GpuOutput, wanted: Any) -> dict[str, float]:
    """What is accepted: as asked for, else the default of the fewest bits."""
    increase, divergence = DEFAULTS[min(group.bits for group in output.quantization.groups)]
    asked = wanted.max_ppl_increase, wanted.max_kl
    return {
        "max_ppl_increase": increase if asked[0] is None else asked[0],
        "max_kl": divergence if asked[1] is None else asked[1],
    }


def _is_partial(output: GpuOutput) -> bool:
    """Whether experts of the source are missing on purpose."""
    here = output.layers()
    return any(
        len(here.get(index, ())) < len(layer.experts) for index, layer in output.sources().items()
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without compressed-tensors' bars, which it draws when a model is first called, too, and its
    warnings of names that only engines know."""
    from transformers.utils import logging as untyped

    from ktconv.quantize_gpu.llm_compressor import replaced

    logging: Any = untyped
    verbosity = logging.get_verbosity()
    with ExitStack() as stack:
        for module in map(import_module, _WITH_BARS):
            stack.enter_context(replaced(module, "tqdm", lambda items, *_, **__: items))
        stack.enter_context(replaced(getLogger("compressed_tensors.utils.match"), "disabled", True))
        stack.callback(logging.set_verbosity, verbosity)
        logging.set_verbosity_error()
        yield


class _Pair:
    """Two models, of which one answers: what `ktconv.model.evaluate` compares."""

    def __init__(self, source: Any, converted: Any) -> None:
        self._source, self._current = source, converted

    @contextmanager
    def originals(self) -> Iterator[None]:
        """The source's model for a while."""
        converted, self._current = self._current, self._source
        try:
            yield
        finally:
            self._current = converted

    def __call__(self, **arguments: Any) -> Any:
        return self._current(**arguments)

    def generate(self, *arguments: Any, **named: Any) -> Any:
        return self._current.generate(*arguments, **named)


class _Swapped(_Pair):
    """One model, with dequantized experts in place of some of its own."""

    def __init__(self, model: Any, output: GpuOutput) -> None:
        super().__init__(model, model)
        self._kept: list[tuple[Tensor, Tensor]] = []  # of a parameter: view, and other content
        self.experts_of_source = 0
        self._put_all(model, output)

    @contextmanager
    def originals(self) -> Iterator[None]:
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for view, other in self._kept:
            now = view.clone()
            view.copy_(other)
            other.copy_(now)

    def _put_all(self, model: Any, output: GpuOutput) -> None:
        import torch

        from ktconv.model import find_experts

        sources, here = output.sources(), output.layers()
        modules = {
            (module.layer, module.where.expert, module.where.proj): module
            for module in output.modules.values()
            if module.where is not None
        }
        with torch.no_grad():
            for index, site in find_experts(model).items():
                layer = sources[index]
                self.experts_of_source += len(layer.experts) - len(here.get(index, ()))
                for expert in here.get(index, ()):
                    views = _views(site.module, expert, layer.hidden_size, layer.intermediate_size)
                    for proj, view in zip(PROJECTIONS, views, strict=True):
                        matrix = layer.experts[expert][proj]
                        found = dequantized(output, modules[index, expert, proj], matrix).values()
                        self._kept.append((view, torch.from_numpy(found).to(view.dtype)))
        self._exchange()


def _views(module: Any, expert: int, hidden: int, inner: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gate [I, H], up [I, H] and down [H, I] of one expert within fused parameters, which may be
    transposed. CheckpointError for any other form."""
    gate_up, down = module.gate_up_proj.data[expert], module.down_proj.data[expert]
    if tuple(gate_up.shape) == (2 * inner, hidden) and tuple(down.shape) == (hidden, inner):
        return gate_up[:inner], gate_up[inner:], down
    raise CheckpointError(
        f"{type(module).__name__} stores its experts in a way that ktconv does not fill",
        "run --level layers",
    )
