"""A model of transformers whose weights are read part by part, and freed again.

A part is a decoder layer without the matrices of its experts, or a module outside the layers. The
model is built with parameters on the meta device and real buffers. Names and layouts of a
checkpoint become the model's through transformers' own conversions.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ktconv.errors import CheckpointError
from ktconv.model.decoded import SourceWeights, StateDict, different_counts
from ktconv.model.load import build_empty, check_complete, loading, no_progress
from ktconv.model.sites import OTHER_PARTS, Site, find_experts
from ktconv.model.streamed.calls import ExpertLayer
from ktconv.source import Checkpoint, MoELayer, TensorRef
from ktconv.source.config import CONFIG_NAME
from ktconv.system.opened import store_of
from ktconv.system.units import counted

_WAY_OUT = "load it whole, where memory allows: ktconv.model.load_model"


# Functions of torch, its nn.init and transformers. On the meta device they do nothing, and take
# their time for it.
_FILLS = {"constant_", "copy_", "fill_", "kaiming_uniform_", "normal_", "uniform_", "zero_"}


class _OnMeta(TorchFunctionMode):
    """Context in which `torch.empty`, as parameters use it, makes tensors on the meta device, which
    nothing fills; buffers are computed."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.empty and given.get("device") is None:
            given["device"] = "meta"
        if getattr(func, "__name__", "") in _FILLS:
            filled = args[0] if args else given.get("tensor")
            if isinstance(filled, Tensor) and filled.is_meta:
                return filled
        return func(*args, **given)


class PartedModel:
    """A model, and the weights of its checkpoint.

    `layers` are its decoder layers, in `path`. `experts` are the layers with experts. Raises
    CheckpointError where transformers does not have the family, where the layers of its experts
    are not in one list, and for missing weights or such of other shapes.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype | str = "auto",
        *,
        device: str = "cpu",
    ) -> None:
        # On CPUs with AMX, oneDNN keeps code and buffers for the last 1024 shapes of products, some
        # MB each, and each expert has its own number of tokens. It reads this at its first product.
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "4")
        self.checkpoint, self.name, self.device = checkpoint, checkpoint.path, device
        directory = checkpoint.side_directory or checkpoint.path
        with loading(directory, f"{self.name} as a language model", self.name):
            counts = different_counts(checkpoint.layers)
            with _config_of(checkpoint, directory) as settings:
                self.model, self.dtype = build_empty(settings, self.name, dtype, _OnMeta(), counts)
        for module in self.model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.device.type != "meta":
                    module._parameters[name] = _empty(parameter)
        self._empty = dict(self.model.named_parameters(remove_duplicate=False))
        sites = find_experts(self.model)
        self.path = _list_of(self.name, sites)
        self.layers: nn.ModuleList = self.model.get_submodule(self.path)
        self.experts = self._expert_layers(sites)
        self._tied = dict(getattr(self.model, "all_tied_weights_keys", None) or {})
        source = SourceWeights(checkpoint)
        weights = source.others() | source.biases()
        with loading(directory, f"{self.name} as a language model", self.name), no_progress():
            self._conversions = _Conversions(self.model, self.dtype)
            experts = {
                f"{layer.site.path}.{name}"
                for layer in self.experts.values()
                for name in layer.site.stored.parameter_names
            }
            targets = {name: self._conversions.renamed(name) for name in weights}
            # Of a second tower: those of the first one are not there, and each converts with both.
            weights = {name: one for name, one in weights.items() if targets[name] not in experts}
            self._state = StateDict(checkpoint, weights, self.dtype)
            self._check_complete(experts)
            self._names = self._by_part(weights, targets)

    @property
    def layer_bytes(self) -> list[int]:
        """Bytes in the source of each layer without its experts."""
        return [
            sum(self._state[name].weight.nbytes for name in self._names.get(index, ()))
            for index in range(len(self.layers))
        ]

    @property
    def outside_bytes(self) -> int:
        """Bytes in the source of all weights outside the layers."""
        keys = (key for key in self._names if not isinstance(key, int))
        return sum(self._state[name].weight.nbytes for key in keys for name in self._names[key])

    def tensors(self, index: int) -> Iterator[TensorRef]:
        """The tensors in the source of a layer without its experts; none behind the last one."""
        for name in self._names.get(index, ()):
            yield from self._state[name].weight.tensors

    def on_read(self, read: Callable[[int], None]) -> None:
        """Call `read` from now on with the size in bytes of each read of the source."""
        self._state.read = read

    def check_unchanged(self) -> None:
        """SourceChangedError where a file changed whose weights are used as they lie there, or a
        remote one."""
        self._state.check_mapped()
        store_of(self.checkpoint.path).confirm()

    # ---- materialising ----

    @contextmanager
    def layer(self, index: int) -> Iterator[nn.Module]:
        """A layer with its weights, for a while."""
        layer: nn.Module = self.layers[index]
        self._load(self._names.get(index, ()))
        self._initialise(layer)
        try:
            yield layer
        finally:
            for name in self._dense[index]:
                self._put(name, self._empty[name])

    def load(self) -> nn.Module:
        """The model with all of its weights but those of experts, which stay on the meta device."""
        for index, layer in enumerate(self.layers):
            self._load(self._names.get(index, ()))
            self._initialise(layer)
        for path, module in self.outside():
            if module._parameters:
                self.load_module(path)
        model: nn.Module = self.model
        return model

    def outside(self) -> list[tuple[str, nn.Module]]:
        """Modules that are not in the layers."""
        prefix = f"{self.path}."
        modules = self.model.named_modules()
        return [(path, one) for path, one in modules if not f"{path}.".startswith(prefix)]

    def load_module(self, path: str) -> None:
        """The weights that a module outside the layers has itself."""
        module = self.model.get_submodule(path)
        names = [f"{path}.{name}" if path else name for name in module._parameters]
        for name in names:
            tied = self._tied.get(name)
            if tied is not None and name not in self._reached:
                self.load_module(tied.rpartition(".")[0])
                self._put(name, self._parameter(tied))
        if path in self._names and any(_is_empty(one) for one in module._parameters.values()):
            self._load(self._names[path], mapped=True)

    def _initialise(self, layer: nn.Module) -> None:
        """Initialise what was not loaded, and a part of Zaya's biases that was, as transformers
        does after loading."""
        from transformers.initialization import guard_torch_init_functions

        owner = self._owner
        with torch.no_grad(), guard_torch_init_functions():
            for module in layer.modules():
                owner._init_weights(module)

    @property
    def _owner(self) -> Any:
        """The innermost model that has the layers."""
        from transformers import PreTrainedModel

        parts = self.path.split(".")
        paths = (".".join(parts[:end]) for end in range(len(parts), -1, -1))
        found = map(self.model.get_submodule, paths)
        return next(one for one in found if isinstance(one, PreTrainedModel))

    def _parameter(self, name: str) -> Any:
        path, _, own = name.rpartition(".")
        return self.model.get_submodule(path)._parameters[own]

    def _put(self, name: str, parameter: Any) -> None:
        path, _, own = name.rpartition(".")
        self.model.get_submodule(path)._parameters[own] = parameter

    def _load(self, names: Iterable[str], mapped: bool = False) -> None:
        state: dict[str, Any] = {}
        for name in names:
            found = self._state.mapped(name, self.dtype) if mapped else None
            state[name] = self._state[name] if found is None else found
        if not state:
            return
        try:
            with loading(self.name, f"{self.name} as a language model", self.name), no_progress():
                info = self._conversions.apply(state, self.device)
        except Exception as error:
            if self._state.error is not None:  # of which transformers may keep only the words
                raise self._state.error from error
            raise
        if self._state.error is not None:
            raise self._state.error
        check_complete(self.name, {"mismatched_keys": info.mismatched_keys})
        if info.conversion_errors:
            raise CheckpointError(
                f"{self.name} cannot be loaded by transformers: "
                f"{next(iter(info.conversion_errors.values()))}"
            )

    # ---- what there is ----

    def _expert_layers(self, sites: Mapping[int, Site]) -> dict[int, ExpertLayer]:
        """Layer -> experts in the model and in the checkpoint, which must match."""
        sources = {layer.index: layer for layer in self.checkpoint.layers}
        found = {}
        for index, site in sorted(sites.items()):
            layer = sources.get(index)
            if layer is None:
                raise CheckpointError(
                    f"{self.name} has no experts of layer {index}, which its config.json asks for",
                    "check that config.json and the weights belong together",
                )
            _check_sizes(site, layer)
            found[index] = ExpertLayer.at(index, site, layer)
        return found

    def _check_complete(self, experts: Set[str]) -> None:
        """CheckpointError for missing or wrong weights, by shapes alone; `experts` are streamed."""
        buffers = [(module, dict(module._buffers)) for module in self.model.modules()]
        shapes = {
            name: torch.empty(one.weight.shape, dtype=self.dtype, device="meta")
            for name, one in self._state.items()
        }
        info = self._conversions.apply(shapes, "meta")
        for module, own in buffers:
            module._buffers.update(own)
        # Now in the dtypes that they will have, which the model's code asks for before they are.
        self._empty = dict(self.model.named_parameters(remove_duplicate=False))
        self._reached = set(self._empty) - info.missing_keys
        lent = {name for name, other in self._tied.items() if other not in info.missing_keys}
        patterns = [*(self.model._keys_to_ignore_on_load_missing or ()), OTHER_PARTS.pattern]
        missing = {
            name
            for name in info.missing_keys - experts - lent
            if not any(re.search(pattern, name) for pattern in patterns)
        }
        check_complete(
            self.name, {"missing_keys": missing, "mismatched_keys": info.mismatched_keys}
        )
        self._dense: list[list[str]] = [[] for _ in self.layers]
        for name in self._empty.keys() - experts:
            if name.startswith(f"{self.path}."):
                self._dense[int(name.removeprefix(f"{self.path}.").partition(".")[0])].append(name)

    def _by_part(
        self, weights: Iterable[str], targets: Mapping[str, str]
    ) -> dict[int | str, list[str]]:
        """Number of the layer, or path of the module outside of them -> names in the checkpoint."""
        found: dict[int | str, list[str]] = {}
        known, prefix = set(self._empty) | set(self.model.state_dict()), f"{self.path}."
        for name in weights:
            target = targets[name]
            if target not in known:
                continue
            if target.startswith(prefix):
                number = int(target.removeprefix(prefix).partition(".")[0])
                found.setdefault(number, []).append(name)
            else:
                found.setdefault(target.rpartition(".")[0], []).append(name)
        return found


@contextmanager
def _config_of(checkpoint: Checkpoint, directory: Path) -> Iterator[Path]:
    """A directory with the config.json of a checkpoint, which is another one where experts were
    dropped."""
    if checkpoint.pruning is None:
        yield directory
        return
    with TemporaryDirectory(prefix="ktconv-") as made:
        (Path(made) / CONFIG_NAME).write_bytes(checkpoint.made_files[CONFIG_NAME])
        yield Path(made)


class _Conversions:
    """transformers' own names and conversions of a family's checkpoints."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        self._model, self._dtype = model, dtype
        self._all = get_model_conversion_mapping(model)
        self._converters = [one for one in self._all if isinstance(one, WeightConverter)]
        self._renamings: list[Any] = [
            one for one in self._all if not isinstance(one, WeightConverter)
        ]
        self._places = model.state_dict()
        self._plan = model._get_dtype_plan(dtype)

    def renamed(self, name: str) -> str:
        """The parameter that a tensor goes to, or the first of them."""
        from transformers.core_model_loading import rename_source_key

        prefix, places = self._model.base_model_prefix, self._places
        found, _ = rename_source_key(name, self._renamings, self._converters, prefix, places)
        if found not in places and name in places:
            found, _ = rename_source_key(name, [], [], prefix, places)
        return found

    def apply(self, state: Mapping[str, Any], device: str) -> Any:
        """Put tensors into the model; what transformers reports of that."""
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        settings = LoadStateDictConfig(
            device_map={"": device}, dtype=self._dtype, dtype_plan=self._plan,
            weight_mapping=list[Any](self._all), ignore_mismatched_sizes=True,
        )  # fmt: skip
        info, _ = convert_and_load_state_dict_in_model(self._model, dict(state), settings)
        return info


def _check_sizes(site: Site, layer: MoELayer) -> None:
    own = site.stored
    ours = own.count, own.hidden, own.intermediate, own.gated
    theirs = len(layer.experts), layer.hidden_size, layer.intermediate_size, layer.gated
    if ours != theirs:
        raise CheckpointError(
            f"transformers builds {counted(own.count, 'expert')} of {own.hidden} x "
            f"{own.intermediate} for "
            f"layer {layer.index}, but the checkpoint has {len(layer.experts)} of "
            f"{layer.hidden_size} x {layer.intermediate_size}",
            "check that config.json and the weights belong together",
        )


def _list_of(name: Any, sites: Mapping[int, Site]) -> str:
    """The path of the list with all layers that have experts."""
    lists = {site.layers_path for site in sites.values()}
    if len(lists) > 1:
        raise NotCut(name, f"its experts are in several lists of layers ({', '.join(lists)})")
    return lists.pop()


class NotCut(CheckpointError):
    """A model whose forward pass cannot be cut at its layers."""

    def __init__(self, name: Any, why: str) -> None:
        super().__init__(f"{name} cannot be run layer by layer: {why}", _WAY_OUT)


def _empty(parameter: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)


def _is_empty(parameter: Tensor | None) -> bool:
    return parameter is not None and parameter.device.type == "meta"
