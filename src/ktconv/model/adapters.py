"""Adapters (LoRA) of a model on packed experts, applied while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ktconv.errors import CheckpointError, UsageError
from ktconv.families.family import Family
from ktconv.model.fitting import settings_of
from ktconv.model.module import PackedExperts, expect_sequences
from ktconv.model.sites import Site, find_experts
from ktconv.runtime.adapter_files import AdapterDirectory, ModelSizes, by_name
from ktconv.runtime.adapters import LayerAdapter, LayerAdapters
from ktconv.source.adapter.layers import LayerSizes
from ktconv.source.adapter.names import PREFIX, LayerNames, source_of, words_of
from ktconv.system.units import counted

Choice = str | Sequence[str | None] | None


class _Linear(NamedTuple):
    """LoRA of a linear layer, float32."""

    a: Tensor  # [rank, inputs]
    b: Tensor  # [outputs, rank]
    scale: float

    def of(self, x: Tensor) -> Tensor:
        """The term added to the layer's output, in float32."""
        a, b = self.a.to(x.device), self.b.to(x.device)
        return self.scale * nn.functional.linear(nn.functional.linear(x.float(), a), b)


class ModelAdapters:
    """Adapters that `add_adapters` has put into a model, by name. None is used until `using` says
    which."""

    def __init__(self, model: nn.Module, adapters: Mapping[str, str | Path]) -> None:
        self.names = tuple(adapters)
        self._choice: Choice = None
        self._modules: list[PackedExperts] = []
        self._linear: dict[nn.Module, dict[str, _Linear]] = {}
        self._hooks: list[Any] = []
        sites, family = _packed(model), settings_of(model).family
        sizes = _sizes(sites, family)
        names = {layer: layer_names(site, family) for layer, site in sites.items()}
        opened = {name: AdapterDirectory(one, sizes, names=names) for name, one in adapters.items()}
        for name, directory in opened.items():
            for other in directory.others:
                self._add_linear(model, name, directory, other)
        found = {layer: _adapters_of(site, opened, layer) for layer, site in sites.items()}
        for layer, site in sites.items():  # nothing is raised from here on
            module: Any = site.module
            module.adapters = found[layer]
            self._modules.append(module)
        self._hooks.append(model.register_forward_pre_hook(self._check_batch, with_kwargs=True))
        for linear in self._linear:
            self._hooks.append(linear.register_forward_hook(self._hook(linear)))

    def _add_linear(
        self, model: nn.Module, name: str, directory: AdapterDirectory, module: str
    ) -> None:
        try:
            found = model.get_submodule(module)
        except AttributeError:
            found = None
        if not isinstance(found, nn.Linear):
            raise CheckpointError(
                f"{directory.directory} has LoRA of {module}, which is no linear layer of this "
                f"{type(model).__name__}",
                "merge it before converting, with quantize-cpu --adapter or ktconv.train.merge",
            )
        low = directory.linear(module, (found.out_features, found.in_features))
        a, b = torch.from_numpy(low.a), torch.from_numpy(low.b)
        self._linear.setdefault(found, {})[name] = _Linear(a, b, low.scale)

    @contextmanager
    def using(self, adapter: Choice) -> Iterator[None]:
        """Run the model with an adapter by its name, or with one for each sequence of a batch: a
        list of names, None for a sequence without. Calls within it are for one thread at a time.
        UsageError for a name that is not there."""
        for name in adapter if isinstance(adapter, list | tuple) else [adapter]:
            if name is not None and name not in self.names:
                raise UsageError(
                    f"the model has no adapter {name!r:.60}", f"it has {', '.join(self.names)}"
                )
        before = self._choice
        self._choose(adapter)
        try:
            yield
        finally:
            self._choose(before)

    def _choose(self, adapter: Choice) -> None:
        self._choice = adapter
        for module in self._modules:
            module.adapter = adapter

    def remove(self) -> None:
        """The model without adapters."""
        for hook in self._hooks:
            hook.remove()
        for module in self._modules:
            module.adapters, module.adapter = None, None
        self._hooks, self._modules, self._choice = [], [], None

    def _check_batch(self, _: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        """UsageError for names of another number of sequences than a batch has: experts see tokens
        alone. Beams of a sequence, which lie one behind the other, have its name."""
        if not isinstance(self._choice, list | tuple):
            return
        every = (*given, named.get("input_ids"), named.get("inputs_embeds"))
        first = next((one for one in every if isinstance(one, Tensor) and one.dim() > 1), None)
        if first is not None and (not self._choice or len(first) % len(self._choice)):
            raise UsageError(
                f"the batch has {counted(len(first), 'sequence')}, and using() was given "
                f"{counted(len(self._choice), 'name')}",
                "give using() a name for each sequence of the batch",
            )

    def _hook(self, linear: nn.Module) -> Callable[..., Tensor | None]:
        def added(_: nn.Module, given: tuple[Any, ...], output: Tensor) -> Tensor | None:
            x, choice, own = given[0], self._choice, self._linear[linear]
            if choice is None or isinstance(choice, str):
                one = None if choice is None else own.get(choice)
                return None if one is None else (output + one.of(x)).to(output.dtype)
            expect_sequences(x.numel() // x.shape[-1], len(choice))
            rows = x.reshape(len(choice), -1, x.shape[-1])
            sums = output.float().reshape(len(choice), -1, output.shape[-1])
            for name, lora in own.items():
                these = [n for n, wanted in enumerate(choice) if wanted == name]
                if these:
                    sums[these] += lora.of(rows[these])
            return sums.reshape(output.shape).to(output.dtype)

        return added


def add_adapters(model: nn.Module, adapters: Mapping[str, str | Path]) -> ModelAdapters:
    """Put LoRA adapters next to the weights of a model with packed experts (`replace_experts`):
    those of experts run on the kernels, those of other linear layers in torch.

        adapters = add_adapters(model, {"code": "ADAPTER"})
        with adapters.using("code"):
            model.generate(...)

    `adapters`: directories of PEFT's or KTransformers' adapters by name. CheckpointError, and the
    model is as before, for adapters that are damaged or of another model, and for LoRA of what is
    neither an expert nor a linear layer (routers, embeddings); UsageError for a model whose experts
    are not packed or have adapters already.
    """
    given = by_name(adapters)
    if not given:
        raise UsageError("no adapter is given", "give {name: directory}")
    return ModelAdapters(model, given)


def _packed(model: nn.Module) -> dict[int, Site]:
    sites = find_experts(model)
    for site in sites.values():
        module = site.module
        if not isinstance(module, PackedExperts):
            raise UsageError(
                f"{site.path} has no packed experts", "call ktconv.model.replace_experts first"
            )
        if module.lora is not None or module.adapters is not None:
            raise UsageError(
                f"{site.path} has LoRA already",
                "remove() it first; what is trained is saved with ktconv.train.save",
            )
    return sites


def _sizes(sites: Mapping[int, Site], family: Family | None) -> ModelSizes:
    found = {}
    for layer, site in sites.items():
        module: Any = site.module
        experts = module.experts
        found[layer] = LayerSizes(
            layer, site.bare_path, experts.count, experts.hidden, experts.intermediate,
            experts.activation.gated,
        )  # fmt: skip
    return ModelSizes(found, family)


def layer_names(site: Site, family: Family | None) -> LayerNames:
    """PEFT's names for a layer: those of a model that has a linear layer for each matrix.

    Of lists these are the model's own. Where it has all experts in one module they are those that
    checkpoints of its family have (Mixtral: block_sparse_moe.experts.3.w1), by which engines and
    PEFT know them.
    """
    path = site.bare_path.removeprefix(PREFIX)
    words, source = site.names, path
    if not words:
        words = words_of(family)
        source = source_of(path, site.layer, family) if family else path
    return LayerNames(site.layer, source, path, words, site.parameters_of_all)


def _adapters_of(site: Site, opened: Mapping[str, AdapterDirectory], layer: int) -> LayerAdapters:
    module: Any = site.module
    own = {name: one.layer(layer) or LayerAdapter([]) for name, one in opened.items()}
    return LayerAdapters(module.experts.origins, own)
