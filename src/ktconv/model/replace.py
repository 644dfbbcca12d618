"""Puts packed experts into a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from torch import nn

from ktconv import native
from ktconv.errors import CheckpointError, UnknownNamesError, UsageError
from ktconv.model.fitting import (
    check_elsewhere,
    check_place,
    compare,
    converted_experts,
    elsewhere,
    settings_of,
    stored_experts,
)
from ktconv.model.forms import packed_class
from ktconv.model.module import PackedExperts
from ktconv.model.sites import Site, find_experts
from ktconv.runtime.layers.load import moe_layers
from ktconv.runtime.layers.native_load import open_stored
from ktconv.runtime.sources import holder
from ktconv.source import Checkpoint
from ktconv.source.remote.urls import no_directory
from ktconv.system.pool import Pool
from ktconv.targets.packed.weights import may_hold_packed


class ReplacedExperts:
    """Result of `replace_experts`. `layers` are on packed experts, `method` is their format;
    `own` are the ids, by layer, of experts that run on the model's own weights as before. `untried`
    are layers whose packed experts could not be compared with the model's own, since those are not
    loaded, or are codes that only the library which made them can read.

    As a context manager it puts the model's own experts back at the end if they were kept, and
    is closed.
    """

    def __init__(
        self,
        sites: Mapping[int, Site],
        packed: Mapping[int, PackedExperts],
        keep: bool,
        used: ExitStack,
        untried: Sequence[int] = (),
    ) -> None:
        self.untried = tuple(untried)
        self.layers = tuple(sorted(sites))
        self.method = packed[self.layers[0]].experts.format.key
        self.own = {layer: elsewhere(packed[layer].experts) for layer in self.layers}
        self._sites, self._packed = sites, packed
        self._used = used  # the threads, and the instruction set that was in use before
        self._originals = {n: site.module for n, site in sites.items()} if keep else None
        self._put(packed)

    @property
    def pool(self) -> Pool:
        """The threads that compute."""
        return self._packed[self.layers[0]].pool or Pool.shared()

    def _put(self, modules: Mapping[int, nn.Module]) -> None:
        for layer, site in self._sites.items():
            setattr(site.parent, site.name, modules[layer])

    def _kept(self) -> Mapping[int, nn.Module]:
        if self._originals is None:
            raise UsageError(
                "the model's own experts were not kept", "call replace_experts with keep=True"
            )
        return self._originals

    def restore(self) -> None:
        """The model as it was before; UsageError unless its experts were kept."""
        self._put(self._kept())
        self.close()

    @contextmanager
    def originals(self) -> Iterator[None]:
        """The model's own experts for a while; UsageError unless they were kept."""
        self._put(self._kept())
        try:
            yield
        finally:
            self._put(self._packed)

    def close(self) -> None:
        """Ends threads of our own and gives the instruction set back.

        Packed experts that are still in the model use the process's own pool from then on.
        """
        for module in self._packed.values():
            module.pool = None
        self._used.close()

    def __enter__(self) -> ReplacedExperts:
        return self

    def __exit__(self, *_: object) -> None:
        if self._originals is not None:
            self._put(self._originals)
        self.close()


def replace_experts(
    model: nn.Module,
    output: str | Path,
    *,
    threads: int | None = None,
    isa: str | None = None,
    keep: bool = False,
    memory: str = "auto",
) -> ReplacedExperts:
    """Run the experts of every MoE layer of `model` on the packed weights in `output`.

    `model` is of transformers or of your own code, bare or wrapped (PEFT, DistributedDataParallel,
    torch.compile); its experts are one module per layer with the matrices of all, or a list of
    modules. The model's own routers stay. Its parts may be on any device: experts get their inputs
    from there, run on the CPU, and send outputs back. Its own experts need not be loaded (meta).

    `output` is what ktconv quantize-cpu made of the model's checkpoint, or a checkpoint whose
    numbers a kernel computes with, as for `MoELayer.load`: then weights are copied. Layers of
    `output` beyond the model's own (multi-token prediction) are left out. Experts that `output`
    leaves out (quantize-cpu --exclude-experts) run on the model's own weights. The replaced
    parameters are freed, unless `keep` or such experts need them. `memory` is where weights go, as
    for `MoELayer.load`. `threads`: size of a thread pool of its own, else the shared one is used;
    `isa` applies to the whole process until the result is closed.

    The result computes in bf16, has no gradients, and cannot be saved as a model.

    Raises CheckpointError, and leaves the model as it was, where no experts are found, or layers,
    sizes, activation or the experts' answers to a trial do not match; UsageError for options that
    cannot be used and for experts under an adapter.
    """
    directory = Path(output)
    if not directory.is_dir():
        raise UsageError(no_directory(directory))
    sites, settings = find_experts(model), settings_of(model)
    for site in sites.values():
        check_place(site)
    with ExitStack() as used:
        pool = used.enter_context(Pool(threads)) if threads is not None else None
        computing, source = pool or Pool.shared(), _checkpoint_in(directory)
        if source is None:
            hold = holder(computing, memory)
            experts = converted_experts(model, sites, settings, directory, hold)
        else:
            experts = stored_experts(model, sites, settings, source, computing, memory)
        for layer, site in sites.items():
            check_elsewhere(site, experts[layer])
        if isa is not None:
            _use_isa(isa, used)
        packed = {
            layer: packed_class(site.own)(experts[layer], pool, site.own).eval()
            for layer, site in sites.items()
        }
        untried = [
            layer
            for layer, site in sites.items()
            if not compare(site, packed[layer], directory, bool(settings))
        ]
        return ReplacedExperts(sites, packed, keep, used.pop_all(), untried)


def _checkpoint_in(directory: Path) -> Checkpoint | None:
    """The checkpoint of a directory without packed experts; None for one with them, and for a
    directory that has no experts at all, or only some."""
    if may_hold_packed(directory) and moe_layers(directory):
        return None
    try:
        return open_stored(directory)
    except UnknownNamesError:
        return None
    except CheckpointError:
        if any(directory.glob("*.safetensors")):
            raise
        return None


def _use_isa(name: str, used: ExitStack) -> None:
    """Uses this level until `used` ends."""
    if name not in native.isa_available():
        raise UsageError(
            f"this machine does not support {name}", f"it has: {', '.join(native.isa_available())}"
        )
    used.callback(native.use_isa, native.isa())
    native.use_isa(name)
