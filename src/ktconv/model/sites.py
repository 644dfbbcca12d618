"""Finds the modules in which a model has the experts of its layers, also under wrappers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from msgspec import Struct
from torch import nn

from ktconv.errors import CheckpointError, UsageError
from ktconv.families import table
from ktconv.families.family import Projection
from ktconv.families.names import known_spellings, layer_number
from ktconv.model.forms import EachExperts, packed_class
from ktconv.model.listed import ListedExperts, listed_in
from ktconv.model.module import PackedExperts, Routing
from ktconv.model.own import ExpertParameter, OwnExperts
from ktconv.model.stored import StoredExperts, stored_in

# Words in the paths of parts that are not the language model, but may have experts too.
OTHER_PARTS = re.compile(r"vision|visual|audio|talker")
_SHARED = "shared"  # in the names of experts that all tokens go through
# What wrappers call the module in them: DistributedDataParallel, torch.compile, FSDP, activation
# checkpointing.
_WRAPPED = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_ADAPTED = "base_layer"  # the module under an adapter, as PEFT calls it


class Site(Struct, frozen=True):
    """The place of a layer's experts in a model: `module` is what is replaced, the experts or a
    wrapper of them alone."""

    layer: int
    path: str
    parent: nn.Module
    name: str

    @property
    def module(self) -> nn.Module:
        found: nn.Module = getattr(self.parent, self.name)
        return found

    @property
    def own(self) -> OwnExperts:
        """The model's own experts. CheckpointError where packed ones are in their place."""
        module = _unwrapped(self.module)
        found = stored_in(module) or listed_in(module)
        if found is None:
            raise CheckpointError(f"{self.path} has no experts of its own")
        return found

    @property
    def stored(self) -> StoredExperts:
        """`own` where they are parameters of one module, which transformers 5 has; else
        CheckpointError."""
        found = self.own
        if not isinstance(found, StoredExperts):
            raise CheckpointError(
                f"{self.path} has a module for each expert, not one with all of them",
                "load the model with transformers 5",
            )
        return found

    @property
    def adapted(self) -> bool:
        """Whether an adapter such as LoRA changes what the experts compute."""
        return _ADAPTED in self.path.split(".") or self.own.adapted

    @property
    def count(self) -> int:
        """The number of experts."""
        module = self.module
        return module.experts.count if isinstance(module, PackedExperts) else self.own.count

    @property
    def names(self) -> dict[Projection, str]:
        """The model's names of the matrices of an expert; empty where they have no own names."""
        module = self.module
        return module.names if isinstance(module, PackedExperts) else self.own.names

    @property
    def parameters_of_all(self) -> tuple[ExpertParameter, ...]:
        """Names of the parameters that hold the matrices of all experts, packed or not."""
        module = self.module
        if isinstance(module, PackedExperts):
            return module.parameters_of_all
        return self.own.parameters_of_all

    @property
    def bare_path(self) -> str:
        """`path` without wrappers around the module, its layer or the model."""
        return ".".join(word for word in self.path.split(".") if word not in _WRAPPED)

    @property
    def layers_path(self) -> str:
        """Path of the list of layers that this one belongs to: model.layers."""
        return f".{self.path}".rpartition(f".{self.layer}.")[0].removeprefix(".")

    def routing(self, arguments: Sequence[Any]) -> Routing:
        """Routing of a call with these arguments."""
        module = self.module
        kind = type(module) if isinstance(module, PackedExperts) else packed_class(self.own)
        return kind.routing(module, arguments)


def find_experts(model: nn.Module) -> dict[int, Site]:
    """Layer -> where its experts are, whether the model's own or packed ones.

    Those of vision, audio and talker parts are left out where the language model has some. Raises
    CheckpointError if there are none, if experts are not in a numbered layer, or if a layer has
    two; UsageError for what is no model.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"the model must be a torch.nn.Module, not {type(model).__name__}",
            "load it with ktconv.model.load_model or transformers",
        )
    found = [path for path, module in model.named_modules() if _has_experts(model, path, module)]
    if not found:
        raise CheckpointError(
            f"no experts were found in this {type(model).__name__}",
            "experts are known as one module with the matrices of all of them, or as a list of "
            f"modules with linear layers {known_spellings()}",
        )
    sites: dict[int, Site] = {}
    for path in [path for path in found if not OTHER_PARTS.search(path)] or found:
        site = _site(model, path)
        other = sites.setdefault(site.layer, site)
        if other.path != site.path:  # a wrapper has the attributes of what is in it
            raise CheckpointError(f"{other.path} and {path} both are layer {site.layer}")
    return sites


def _has_experts(model: nn.Module, path: str, module: nn.Module) -> bool:
    if isinstance(module, PackedExperts) or stored_in(module) is not None:
        return True
    if (listed := listed_in(module)) is None:
        return False
    path, block = _outermost(model, path)
    name = path.rpartition(".")[2]
    known = name in table.FAMILIES.containers
    return known or (_SHARED not in name and _routes(block, listed))


def _routes(block: nn.Module, listed: ListedExperts) -> bool:
    """Whether a matrix in the block, but not in the list, has a row for each expert. LongCat has
    lists of two MLPs that all tokens go through."""
    own = {id(one) for one in listed.module.parameters()}
    counts = listed.count, listed.count + listed.identities
    matrices = (one for one in block.parameters() if one.ndim == 2 and id(one) not in own)
    return any(one.shape[0] in counts for one in matrices)


def _unwrapped(module: nn.Module) -> nn.Module:
    while (inner := _inner(module)) is not None:
        module = inner
    return module


def _inner(wrapper: nn.Module) -> nn.Module | None:
    """The only module in a wrapper that has nothing else; None for other modules."""
    children = dict(wrapper.named_children())
    if len(children) == 1 and children.keys() <= set(_WRAPPED):
        return next(iter(children.values()))
    return None


def _site(model: nn.Module, path: str) -> Site:
    number = layer_number(path)
    if number is None:
        number = _only_number(path)
    if number is None:
        raise CheckpointError(f"the experts {path} are not in a numbered layer")
    # Else a compiled module would go on with its own experts.
    path, parent = _outermost(model, path)
    return Site(number, path, parent, path.rpartition(".")[2])


def _outermost(model: nn.Module, path: str) -> tuple[str, nn.Module]:
    """The path of a module with its wrappers, and the module that these are in."""
    parent = model.get_submodule(path.rpartition(".")[0])
    while _inner(parent) is not None and "." in path:
        path = path.rpartition(".")[0]
        parent = model.get_submodule(path.rpartition(".")[0])
    return path, parent


def _only_number(path: str) -> int | None:
    """Number of a layer in a list whose name no family has."""
    numbers = [word for word in path.split(".") if word.isdecimal()]
    return int(numbers[0]) if len(numbers) == 1 else None


@contextmanager
def experts_watched(
    sites: Mapping[int, Site], called: Callable[[int, Routing], None]
) -> Iterator[None]:
    """Meanwhile `called(layer, routing)` runs before each call of a layer's experts.

    UsageError where experts are called one by one, so that none of the calls shows the routing.
    """

    def watch(site: Site) -> Any:
        module = _unwrapped(site.module)
        _check_called(site, module)
        signature = inspect.signature(type(module).forward)  # of the object it may be a wrapper

        def hook(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            called(site.layer, site.routing(signature.bind(module, *args, **named).args[1:]))

        return module.register_forward_pre_hook(hook, with_kwargs=True)

    with ExitStack() as stack:
        for site in sites.values():
            stack.callback(watch(site).remove)
        yield


def _check_called(site: Site, module: nn.Module) -> None:
    if type(module).forward is nn.Module.forward or isinstance(module, EachExperts):
        raise UsageError(
            f"each expert of {site.path} is called alone, so no call shows how tokens are routed",
            "load the model with transformers 5",
        )
