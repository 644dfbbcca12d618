"""A model with its experts on the kernels, and everything else by transformers' code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct

from ktconv.errors import PackedExpertsError, UsageError
from ktconv.generate.outside import OnKernels, Watch, on_kernels
from ktconv.model.evaluate import directory_of, load_model, load_without_experts
from ktconv.model.load import check_language_model, context_length, load_config, load_tokenizer
from ktconv.model.matching import check_likeness, trial_token
from ktconv.model.replace import replace_experts
from ktconv.model.sites import find_experts
from ktconv.model.streamed.parts import NotCut
from ktconv.runtime.layers import Experts, expert_output
from ktconv.runtime.layers.load import ConvertedModel
from ktconv.runtime.layers.native_load import expect_formats
from ktconv.runtime.sources import opened
from ktconv.source import Checkpoint, open_checkpoint
from ktconv.source.model_source import ModelSource
from ktconv.source.reading.tensors import SourceTensors
from ktconv.source.remote.urls import no_directory
from ktconv.system import machine
from ktconv.system.stores import MadePath
from ktconv.system.text import Notify
from ktconv.system.threads import torch_threads
from ktconv.writer.manifest import MANIFEST, read_begun

_NO_LIMIT = 1 << 31  # tokens, where a model does not say how many it reads
_GIVE_SOURCE = "give the checkpoint that it was converted from: --source MODEL"


class OpenedModel:
    """A model by its headers, with its tokenizer: `output` has the experts.

    Raises UsageError for an output that needs a source, CheckpointError where there is no tokenizer
    or no class in transformers, and for experts that the kernels cannot run.
    """

    def __init__(self, output: Path, source: ModelSource | None) -> None:
        if not output.is_dir():
            raise UsageError(no_directory(output), "give an output of ktconv on this machine")
        self.output, self._own = output, source is None
        self._experts = opened(output)
        if isinstance(self._experts, Checkpoint):  # before the rest of a model is loaded
            expect_formats(self._experts, (one for one in self._experts.layers if not one.is_mtp))
        self.checkpoint = checkpoint = _checkpoint(output, source)
        self.name = checkpoint.path  # in errors
        directory = directory_of(checkpoint.path, checkpoint.side_directory)
        check_language_model(directory)
        self.tokenizer = load_tokenizer(directory, checkpoint.path)
        self.context = context_length(load_config(directory, checkpoint.path), _NO_LIMIT)

    @contextmanager
    def loaded(
        self,
        notify: Notify,
        *,
        threads: int | None = None,
        memory: str = "auto",
        watch: Watch | None = None,
        outside: bool = True,
    ) -> Iterator[LoadedModel]:
        """The model for a while, with experts on the kernels, and with `outside` what they know
        outside of them; PyTorch uses as many threads as they. `watch`: see `on_kernels`.

        Raises CheckpointError where output and source do not belong together, UsageError for
        `memory` that they cannot have, and as `ktconv.model.load_model`.
        """
        count = threads or machine.usable_cores()
        with ExitStack() as stack:
            stack.enter_context(torch_threads(count))
            notify(f"note: loading {self.name} without its experts")
            model = _rest(self.checkpoint, self._experts, notify)
            notify(f"note: loading the experts of {self.output}")
            replaced = stack.enter_context(
                replace_experts(model, self.output, threads=threads, memory=memory)
            )
            if not self._own:
                _check_alike(self.checkpoint, model, self.output)
            if not outside:
                yield LoadedModel(model, replaced.method, count, None, OnKernels())
                return
            known = stack.enter_context(on_kernels(model, replaced.pool, watch))
            steps = 1 if known.all_linear else count
            yield LoadedModel(model, replaced.method, count, steps, known)


class LoadedModel(Struct, frozen=True):
    """A model that can be called, the format of its experts, the number of threads, and PyTorch's
    own for a single token: others would take the CPU from the kernels' while they wait."""

    model: Any
    method: str
    threads: int
    step_threads: int | None  # None: transformers alone
    outside: OnKernels


def _checkpoint(output: Path, source: ModelSource | None) -> Checkpoint:
    """The checkpoint of everything but the experts."""
    if source is None:
        try:
            return open_checkpoint(output)
        except PackedExpertsError as error:
            raise UsageError(
                f"{output} has experts that were packed for KTransformers, and the rest of the "
                "model is not read from there",
                _GIVE_SOURCE,
            ) from error
    checkpoint = open_checkpoint(read_begun(output).as_converted(source))
    if source.adapter is not None and (output / MANIFEST).is_file():
        _check_adapters(checkpoint, output)
    return checkpoint


def _check_adapters(checkpoint: Checkpoint, output: Path) -> None:
    """UsageError where `--adapter` changes experts, and those of `output` were converted without
    any adapter: one would have half of it."""
    matrices = (one for layer in checkpoint.layers for e in layer.experts for one in e.values())
    changed = any(isinstance(matrix.tensor.file, MadePath) for matrix in matrices)
    if changed and read_begun(output).adapters is None:
        raise UsageError(
            f"--adapter changes experts, and those of {output} were converted without it",
            "convert the model with --adapter, or leave it out",
        )


def _check_alike(checkpoint: Checkpoint, model: Any, output: Path) -> None:
    """UnlikeExperts unless the first expert of `output` answers as the source's does: another
    model can have the same sizes, and its own experts are not there to be tried."""
    layer, site = next(iter(sorted(find_experts(model).items())))
    module: Any = site.module
    experts: Experts = module.experts
    number = int((experts.origins >= 0).argmax())
    found = next(one for one in checkpoint.layers if one.index == layer)
    x = trial_token(experts.hidden, torch.float32).numpy()
    both = SourceTensors(checkpoint).expert(found, number), experts.loaded(number)
    theirs, ours = (torch.from_numpy(expert_output(e, experts.activation, x)) for e in both)
    check_likeness(theirs, ours, layer, output)


def _rest(checkpoint: Checkpoint, experts: ConvertedModel | Checkpoint, notify: Notify) -> Any:
    """The model, without experts where its code allows that."""
    if _leaves_out(experts):
        notify("note: experts that the output leaves out are the model's own, which are loaded too")
        return _whole(checkpoint)
    try:
        return load_without_experts(checkpoint)[0]
    except NotCut as error:
        notify(f"note: the model's own experts are loaded first, because {error}")
        return _whole(checkpoint)


def _whole(checkpoint: Checkpoint) -> Any:
    if checkpoint.pruning is not None:
        raise UsageError(
            f"{checkpoint.path} has to be loaded with its experts, which is not possible where "
            "some were dropped while it was converted",
            "prune the checkpoint first: ktconv prune",
        )
    model, _ = load_model(
        checkpoint.path,
        config_directory=checkpoint.side_directory,
        adapters=checkpoint.adapters,
    )
    return model


def _leaves_out(experts: ConvertedModel | Checkpoint) -> bool:
    """Whether packed experts lack some that the model's own weights have."""
    if isinstance(experts, Checkpoint):
        return False
    return any(experts.packed.geometry(layer).elsewhere for layer in experts.layers)
