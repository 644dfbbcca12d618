"""PEFT's names for the experts of a model in memory."""

from __future__ import annotations

from ktconv.model.sites import Site
from ktconv.source.adapter import names
from ktconv.source.adapter.names import PREFIX as PREFIX
from ktconv.source.adapter.names import SIDES as SIDES
from ktconv.source.adapter.names import source_of, words_of
from ktconv.source.settings import ModelSettings


class LayerNames(names.LayerNames):
    """PEFT's names for a layer: those of a model that has a linear layer for each matrix.

    Of lists these are the model's own. Where it has all experts in one module they are those that
    checkpoints of its family have (Mixtral: block_sparse_moe.experts.3.w1), by which engines and
    PEFT know them.
    """

    def __init__(self, site: Site, config: ModelSettings) -> None:
        path, family = site.bare_path.removeprefix(PREFIX), config.family
        words, source = site.names, path
        if not words:
            words = words_of(family)
            source = source_of(path, site.layer, family) if family else path
        super().__init__(site.layer, source, path, words, site.parameters_of_all)
