"""Whether packed experts are those that a config.json tells of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ktconv.checkpoint.config import CONFIG_NAME, ModelConfig

Dimensions = tuple[int, int, int]  # experts, hidden size, intermediate size

_SIZES = ("a number of experts of", "a hidden size of", "an intermediate size of")


def contradictions(
    config: ModelConfig, layers: Mapping[int, Dimensions]
) -> Iterator[tuple[str, int]]:
    """Sentences about layers that are not of the sizes of config.json, and their numbers."""
    told = (config.num_experts, config.hidden_size, config.intermediate_size)
    for index, sizes in layers.items():
        if fault := config.top_k_fault(sizes[0]):
            yield fault, index
        for words, size, setting in zip(_SIZES, sizes, told, strict=True):
            if setting is not None and setting.value != size:
                yield (
                    f"layer {index} has {words} {size}, but {CONFIG_NAME} says "
                    f"{setting.key} {setting.value}",
                    index,
                )


def absent_layers(config: ModelConfig, present: Iterable[int]) -> list[int]:
    """MoE layers that config.json has beyond these; empty where it does not tell MoE layers
    from dense ones."""
    if config.num_layers is None or config.dense_layers is None:
        return []
    absent = set(range(config.num_layers.value)) - set(present)
    return sorted(index for index in absent if config.dense_layers.key_of(index) is None)
