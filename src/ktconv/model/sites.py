"""Where a model of transformers has the experts of its layers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from ktconv.errors import CheckpointError
from ktconv.families.names import layer_number
from ktconv.model.module import PackedExperts, Routing, packed_class
from ktconv.model.stored import StoredExperts, stored_in

# Words in the paths of parts that are not the language model, but may have experts too.
OTHER_PARTS = re.compile(r"vision|visual|audio|talker")


@dataclass(frozen=True, slots=True)
class Site:
    """Where a model has the experts of a layer."""

    layer: int
    path: str
    parent: nn.Module
    name: str

    @property
    def module(self) -> nn.Module:
        found: nn.Module = getattr(self.parent, self.name)
        return found

    @property
    def own(self) -> StoredExperts:
        """The model's own experts. CheckpointError where packed ones are in their place."""
        found = stored_in(self.module)
        if found is None:
            raise CheckpointError(f"{self.path} has no experts of its own")
        return found

    @property
    def count(self) -> int:
        """The number of experts."""
        module = self.module
        return module.experts.count if isinstance(module, PackedExperts) else self.own.count

    def routing(self, arguments: Sequence[Any]) -> Routing:
        """Which experts a call with these arguments chooses."""
        module = self.module
        kind = type(module) if isinstance(module, PackedExperts) else packed_class(self.own)
        return kind.routing(module, arguments)


def find_experts(model: nn.Module) -> dict[int, Site]:
    """Layer -> where its experts are, whether the model's own or packed ones.

    Those of vision, audio and talker parts are left out where the language model has some. Raises
    CheckpointError if there are none, if experts are not in a numbered layer, or if a layer has
    two.
    """
    found = [
        path
        for path, module in model.named_modules()
        if isinstance(module, PackedExperts) or stored_in(module) is not None
    ]
    if not found:
        raise CheckpointError(
            f"no experts were found in this {type(model).__name__}",
            "a Mixture-of-Experts model of transformers 5 has a module with the matrices of all "
            "experts in each layer",
        )
    sites: dict[int, Site] = {}
    for path in [path for path in found if not OTHER_PARTS.search(path)] or found:
        site = _site(model, path)
        other = sites.setdefault(site.layer, site)
        if other is not site:
            raise CheckpointError(f"{other.path} and {path} both are layer {site.layer}")
    return sites


def _site(model: nn.Module, path: str) -> Site:
    number = layer_number(path)
    if number is None:
        raise CheckpointError(f"the experts {path} are not in a numbered layer")
    parent, _, name = path.rpartition(".")
    return Site(number, path, model.get_submodule(parent), name)


@contextmanager
def experts_watched(
    sites: Mapping[int, Site], called: Callable[[int, Routing], None]
) -> Iterator[None]:
    """Meanwhile `called(layer, routing)` runs before each call of a layer's experts."""

    def watch(site: Site) -> Any:
        module = site.module
        signature = inspect.signature(type(module).forward)  # of the object it may be a wrapper

        def hook(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            called(site.layer, site.routing(signature.bind(module, *args, **named).args[1:]))

        return module.register_forward_pre_hook(hook, with_kwargs=True)

    with ExitStack() as stack:
        for site in sites.values():
            stack.callback(watch(site).remove)
        yield
