"""How often each expert is chosen: by a model's own router on a text, counted per layer.

statistics, _ = Recorder(Path("model")).read(text_pieces(None), 20480)
statistics.layers[0].hottest(32)            # the ids of the 32 most used experts
write_expert_set(statistics.hot(32), Path("hot.json"))
"""

from ktconv.model.text import text_pieces
from ktconv.stats.counts import LayerCounts, Statistics
from ktconv.stats.record import Recorder

__all__ = ["LayerCounts", "Recorder", "Statistics", "text_pieces"]
