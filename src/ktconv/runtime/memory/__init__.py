"""Memory of a converted model's weights while layers compute with them: mapped from their files,
copied, or shared by processes; each part on the NUMA node whose threads compute it."""

from ktconv.runtime.memory.held import Held, Mapped, Say, held_weights, warn
from ktconv.runtime.memory.needs import MEMORY, check_memory, layer_needs, needs_of
from ktconv.runtime.memory.residence import Residence, residence_of

__all__ = [
    "MEMORY", "Held", "Mapped", "Residence", "Say", "check_memory", "held_weights", "layer_needs",
    "needs_of", "residence_of", "warn",
]  # fmt: skip
