"""Options of quantize-cpu for several methods in one output: a recipe, or a size to fit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct, field
from msgspec.structs import replace

from ktconv.cli.exits import NOTHING_WRITTEN, interruptible
from ktconv.cli.output import notify
from ktconv.system.units import parse_size

if TYPE_CHECKING:
    from ktconv.quantize.encoded.request import Request
    from ktconv.quantize.recipes.wish import Wish
    from ktconv.targets.encoded.recipe import Recipe

MixEngine = Literal["vllm", "ktconv", "compressed-tensors"]  # of fit.wish; a test compares them


class Mix(Struct, frozen=True):
    """The options that ask for several methods; false without any."""

    recipe: Path | None = None
    target_size: str | None = None
    target_bits: float | None = None
    engine: str | None = None
    methods: str | None = None
    write: Path | None = None
    importance: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)  # of the choice, once `settled`

    def __bool__(self) -> bool:
        return self.recipe is not None or self.chooses

    @property
    def chooses(self) -> bool:
        return self.target_size is not None or self.target_bits is not None

    def settled(self, request: Request) -> Request:
        """The request with its recipe; for a size, weights are read and methods compared."""
        from ktconv.targets.encoded.recipe import read_recipe

        recipe = self._chosen(request) if self.recipe is None else read_recipe(self.recipe)
        return replace(request, options=replace(request.options, recipe=recipe.toml))

    def _chosen(self, request: Request) -> Recipe:
        from ktconv.cli.options import progress_over
        from ktconv.quantize.recipes.document import document, recipe_file
        from ktconv.quantize.recipes.run import Fitting
        from ktconv.writer.option_files import check_written

        wish = self._wish()
        written = None if self.write is None else recipe_file(self.write)
        others = (*request.source.files(), request.output, self.importance)
        check_written([written], others)
        importance = None if self.importance is None else Path(self.importance)
        with interruptible(lambda: NOTHING_WRITTEN):
            fitting = Fitting(request, wish, importance)
            with progress_over(fitting.stages) as observer:
                fitted = fitting.run(observer)
        for line in fitted.lines():
            notify(line)
        self.facts.update(fit=fitted.facts())
        if written is not None:
            written.write(document(fitted, wish).encode())
            notify(f"wrote {self.write}")
        return fitted.recipe

    def _wish(self) -> Wish:
        from ktconv.quantize.recipes.wish import Wish, methods_named

        size = None
        if self.target_size is not None:
            size = parse_size(self.target_size, "--target-size")
        return Wish(
            nbytes=size,
            bits=self.target_bits,
            engine=self.engine or "vllm",
            methods=methods_named(self.methods) if self.methods else (),
        )
