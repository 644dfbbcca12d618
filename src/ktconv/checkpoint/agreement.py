"""Whether packed experts agree with a config.json."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ktconv.checkpoint.config import CONFIG_NAME, ModelConfig

# experts, hidden size, intermediate size, and whether experts have gates
Dimensions = tuple[int, int, int, bool]

_SIZES = ("a number of experts of", "a hidden size of", "an intermediate size of")


def contradictions(
    config: ModelConfig, layers: Mapping[int, Dimensions]
) -> Iterator[tuple[str, int]]:
    """Sentences about layers whose sizes or projections differ from config.json, and their
    numbers."""
    for index, (*sizes, gated) in layers.items():
        settings = (config.num_experts, config.width_of(sizes[1]), config.intermediate_size)
        if config.gated not in (None, gated):
            found, expected = ("have", "have none") if gated else ("have no", "have one")
            yield (
                f"the experts of layer {index} {found} gate projection, but those of this "
                f"model {expected} by {CONFIG_NAME}",
                index,
            )
        if fault := config.top_k_fault(sizes[0], index):
            yield fault, index
        for words, size, setting in zip(_SIZES, sizes, settings, strict=True):
            if setting is not None and setting.value != size:
                yield (
                    f"layer {index} has {words} {size}, but {CONFIG_NAME} says {setting.key} "
                    f"{setting.value}",
                    index,
                )


def absent_layers(config: ModelConfig, present: Iterable[int]) -> list[int]:
    """MoE layers of config.json that are not among these; empty if it does not say which layers
    are MoE layers."""
    if config.num_layers is None or config.dense_layers is None:
        return []
    absent = set(range(config.num_layers.value)) - set(present)
    return sorted(index for index in absent if config.dense_layers.key_of(index) is None)
