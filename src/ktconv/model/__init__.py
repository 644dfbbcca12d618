"""Run models on packed experts, and compare their predictions with the original's.

    model, tokenizer = load_model(source)
    with replace_experts(model, output, keep=True) as replaced:
        report = predictions_of_both(model, replaced, windows(tokenizer, text, 512, 40)).result()

`evaluate` loads and compares models, `replace` puts packed experts into them, `devices` moves what
is no expert, `load` keeps the code of checkpoints out. PyTorch and transformers are imported when a
name is first used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ktconv.errors import UsageError

if TYPE_CHECKING:
    from ktconv.model.adapters import ModelAdapters, add_adapters
    from ktconv.model.devices import Moved, expert_device, move_non_experts
    from ktconv.model.evaluate import load_model
    from ktconv.model.replace import replace_experts
    from ktconv.model.streamed.stream import stream

__all__ = [
    "ModelAdapters",
    "Moved",
    "add_adapters",
    "expert_device",
    "load_model",
    "move_non_experts",
    "replace_experts",
    "stream",
]
_PACKAGES = ("torch", "transformers", "greenlet")
_MODULES = {
    "ModelAdapters": "adapters",
    "Moved": "devices",
    "add_adapters": "adapters",
    "expert_device": "devices",
    "load_model": "evaluate",
    "move_non_experts": "devices",
    "replace_experts": "replace",
    "stream": "streamed.stream",
}


def __getattr__(name: str) -> Any:
    """UsageError where PyTorch or transformers is not installed."""
    return named_in(__name__, _MODULES, name, _not_installed)


def named_in(
    package: str, modules: Mapping[str, str], name: str, refusal: Callable[[str], UsageError]
) -> Any:
    """A name of `package`, from the module of it that is imported now. `refusal`: the error for one
    of the packages that running a model needs."""
    if name not in modules:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{package}.{modules[name]}"), name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _PACKAGES:
            raise
        raise refusal(missing) from None


def require_packages() -> None:
    """UsageError where a package is missing that running a model needs."""
    for name in _PACKAGES:
        if find_spec(name) is None:
            raise _not_installed(name)


def _not_installed(package: str) -> UsageError:
    return UsageError(
        f"running the model itself needs {package}, which is not installed",
        "install it with: pip install 'ktconv[model]'",
    )
