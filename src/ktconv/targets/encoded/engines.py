"""Engines that load an output whose matrices have several methods, and why others do not.

Known from the engines' own code: vLLM 0.32 asks for the method of a layer's experts once for each
projection of expert 0, and refuses a layer where these differ. SGLang (sglang-kt 0.7.2) knows one
method for all experts. KTransformers has one --kt-method for all layers. transformers 5.17 and 5.24
were run: they end with an error on a mix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ktconv.errors import UsageError
from ktconv.formats.specs import kernel_of
from ktconv.source import MoELayer
from ktconv.targets.encoded.readers import listed
from ktconv.targets.encoded.recipe import Method, Recipe

Chosen = Sequence[tuple[MoELayer, Sequence[int]]]  # layers, and ids of their experts
# Of a recipe: why the engine cannot load its output, None if it can.
Engine = Callable[[Recipe, Chosen], "str | None"]


def _vllm(recipe: Recipe, chosen: Chosen) -> str | None:
    for layer, experts in chosen:
        methods = _methods(recipe, layer, experts)
        if len(methods) > 1:
            return (
                f"computes all experts of a layer with one method, and layer {layer.index} has "
                f"{listed(method.words for method in methods)}"
            )
    return None


def _ktconv(recipe: Recipe, chosen: Chosen) -> str | None:
    for layer, experts in chosen:
        for method in _methods(recipe, layer, experts):
            scheme = method.scheme(search=False)
            if kernel_of(scheme.row.kind, scheme.group_size) is None:
                return f"has no kernels for {method.words}, which layer {layer.index} has"
    return _vllm(recipe, chosen)


def _uniform(why: str) -> Engine:
    def engine(recipe: Recipe, chosen: Chosen) -> str | None:
        found: dict[Method, None] = {}
        for layer, experts in chosen:
            found |= _methods(recipe, layer, experts)
        if len(found) > 1:
            return f"{why}, and these have {listed(method.words for method in found)}"
        return None

    return engine


def _any(recipe: Recipe, chosen: Chosen) -> str | None:
    """The library decodes module by module."""
    return None


ENGINES: Mapping[str, Engine] = {
    "vllm": _vllm,
    "ktconv": _ktconv,
    "compressed-tensors": _any,
    "transformers": _uniform("ends with an error on several methods"),
    "sglang": _uniform("computes all experts with one method"),
    "ktransformers": _uniform("takes one --kt-method for all layers"),
}


def why_not(engine: str, recipe: Recipe, chosen: Chosen) -> str | None:
    """Reason why the engine cannot load what a recipe makes of these experts; None if it can."""
    return ENGINES[engine](recipe, chosen)


def check_engine(recipe: Recipe, chosen: Chosen) -> None:
    """UsageError where the engine that the recipe is for cannot mix as it says."""
    if recipe.engine not in ENGINES:
        raise UsageError(
            f"the recipe is for {recipe.engine!r}, which is not a known engine",
            f"known are {', '.join(ENGINES)}",
        )
    why = why_not(recipe.engine, recipe, chosen)
    if why is None:
        return
    others = [name for name in ENGINES if why_not(name, recipe, chosen) is None]
    hint = "change the rules"
    if others:
        named = " or ".join(f'engine = "{name}"' for name in others)
        hint += f", or write {named} into the recipe: that can"
    raise UsageError(f"the recipe is for {recipe.engine}, which {why}", hint)


def engine_lines(recipe: Recipe, chosen: Chosen) -> list[str]:
    """A note about each engine that cannot load it."""
    found = ((name, why_not(name, recipe, chosen)) for name in ENGINES)
    return [f"{name} cannot load this mix: it {why}" for name, why in found if why]


def _methods(recipe: Recipe, layer: MoELayer, experts: Sequence[int]) -> dict[Method, None]:
    """All of a layer, in order."""
    return {method: None for _, method in recipe.assigned(layer, experts)}
