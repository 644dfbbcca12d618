"""Options of packed experts, at the path that earlier examples import."""

from ktconv.targets.packed.target import Options

__all__ = ["Options"]
