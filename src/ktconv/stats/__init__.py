"""Statistics of a model's own router and experts on a text: how often each expert is chosen, and
what its matrices are multiplied with.

recorder = Recorder(Path("model"))
with recorder.prepare(text_pieces(None), 20480) as recording:
    statistics, _ = recording.run()
    recording.complete()
statistics.layers[0].hottest(32)            # the ids of the 32 most used experts
write_expert_set(statistics.hot(32), Path("hot.json"))
"""

from ktconv import callable_module
from ktconv.model.text import text_pieces
from ktconv.stats.counts import LayerCounts, Statistics
from ktconv.stats.hessian import Hessians, open_hessians
from ktconv.stats.importance import Importance, read_importance
from ktconv.stats.record import Recorder, Recording, Wanted

__all__ = [
    "Hessians",
    "Importance",
    "LayerCounts",
    "Recorder",
    "Recording",
    "Statistics",
    "Wanted",
    "open_hessians",
    "read_importance",
    "text_pieces",
]

callable_module(__name__)
