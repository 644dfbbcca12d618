"""Records of a conversion in run.json and in the manifest."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from msgspec import Struct, field

from ktconv import __version__
from ktconv.conversion.plan import Plan
from ktconv.conversion.target import Target
from ktconv.families.family import ExpertActivation, Projection
from ktconv.source import Checkpoint, MoELayer, source_identity
from ktconv.source.activations import usual
from ktconv.source.adapter.recorded import ENCODED_AGAIN, names_of
from ktconv.source.pruning.kept import RECORD as PRUNED
from ktconv.system.text import valid_unicode
from ktconv.system.units import counted, format_ranges, listed
from ktconv.writer.journal import Record


def run_record(plan: Plan[Target]) -> Record:
    """The record of a conversion: two runs with the same record write the same bytes."""
    return {
        "schema": 1,
        "ktconv_version": __version__,
        "options": valid_unicode(plan.target.options.as_dict()),  # names of files, too
        "source": {"files": {file["name"]: file for file in source_identity(plan.checkpoint)}}
        | chosen_record(plan.checkpoint),
        "geometry": geometry(plan.checkpoint, plan),
    }


def chosen_record(checkpoint: Checkpoint) -> Record:
    """The map of the source's names, where one was given, the tower of several, and the experts
    that stay, where some are dropped."""
    mapped, tower = checkpoint.mapped, checkpoint.tower
    found: Record = {} if mapped is None else {"map": mapped.naming.record()}
    if checkpoint.pruning is not None:
        found[PRUNED] = checkpoint.pruning.record()
    return found if tower is None else {**found, "tower": tower}


def adapters_record(plan: Plan[Target]) -> Record:
    """Names and weights of the adapters that were added to the source, for who reads it again, and
    the weights that are no expert's which were encoded again for them, by the source's names.
    The adapters' checksums are among those of the source."""
    checkpoint = plan.checkpoint
    found: Record = {"adapters": names_of(checkpoint.adapters)} if checkpoint.adapters else {}
    again = list(checkpoint.encoded_again) if plan.others else []
    return {**found, ENCODED_AGAIN: again} if again else found


def geometry(checkpoint: Checkpoint, plan: Plan[Target]) -> Record:
    """Family, activation and dimensions of the converted layers. A layer has an activation of its
    own where that of most layers is another."""
    most = usual({layer.index: layer.activation for layer in plan.moe_layers})
    return {
        "model_type": checkpoint.config.model_type,
        "activation": most.as_record(),
        "layers": {
            str(unit.layer.index): {
                "experts": len(unit.layer.experts),
                "hidden_size": unit.layer.hidden_size,
                "intermediate_size": unit.layer.intermediate_size,
                "encoding": unit.layer.encoding,
                "mtp": unit.layer.is_mtp,
                "source": unit.layer.source,
            }
            | ({} if unit.layer.gated else {"gated": False})
            | ({"expert_ids": format_ranges(list(unit.experts))} if unit.omitted else {})
            | _own_activation(unit.layer, most)
            for unit in plan.layers
        },
    }


def _own_activation(layer: MoELayer, most: ExpertActivation) -> Record:
    other = layer.activation != most
    return {"activation": layer.activation.as_record()} if other else {}


ZERO_SCALES = "zero_scales"  # of a unit's record: how many scales of the source are zero
NEARLY_ALL = 0.99  # of the weights of a matrix
LOST_NAMED = 5


def is_lost(errors: Mapping[str, Any]) -> bool:
    """Whether (nearly) all codes of a matrix with these errors became zero, which its weights are
    not: as one huge weight makes those that share its scale."""
    share, error = errors.get("zero_share"), errors.get("relative_rms_error")
    return share is not None and share >= NEARLY_ALL and error != 0


class ErrorSummary(Struct):
    """Relative RMS errors of all weights of the finished units, in whatever order they finish."""

    count: int = 0
    totals: list[float] = field(default_factory=list)  # by unit
    worst: tuple[str, float] | None = None
    zero_scales: int = 0  # of the source
    lost: int = 0  # matrices that became nearly all zeros
    lost_names: list[str] = field(default_factory=list)  # of their tensors, the first of all

    def add(self, record: Record) -> None:
        self.zero_scales += record.get(ZERO_SCALES, 0)
        tensors = record["tensors"].items()
        errors = {name: entry.get("relative_rms_error") for name, entry in tensors}
        lost = [name for name, entry in tensors if is_lost(entry)]
        self.lost += len(lost)
        self.lost_names = sorted([*self.lost_names, *lost])[:LOST_NAMED]
        known = {name: error for name, error in errors.items() if error is not None}
        if not known:
            return
        self.count += len(known)
        self.totals.append(math.fsum(known.values()))
        found = [*known.items(), *([self.worst] if self.worst else [])]
        self.worst = min(found, key=lambda one: (-one[1], one[0]))

    def lost_line(self, layers: Sequence[MoELayer], quote: str = "") -> str:
        """See `lost_line`; tensors have the names of the model, whose `layers` these are."""
        names = [name_in_model(name, layers) for name in self.lost_names]
        return lost_line(self.lost, names, quote)

    @property
    def mean(self) -> float | None:
        """The sum is rounded once, so that no order of the units changes it."""
        return math.fsum(self.totals) / self.count if self.count else None


_PACKED_NAME = re.compile(r"blk\.([0-9]+)\.ffn_(gate|up|down)_exps\.([0-9]+)\.")


def name_in_model(name: str, layers: Iterable[MoELayer]) -> str:
    """The name that the model has for a tensor of an output: of a tensor named as KTransformers
    and GGUF files do, that of the model's own, with the number of an expert of a stack."""
    found = _PACKED_NAME.match(name)
    layer = next((one for one in layers if found and one.index == int(found[1])), None)
    if found is None or layer is None or int(found[3]) >= len(layer.experts):
        return name
    tensors = [expert.get(cast(Projection, found[2])) for expert in layer.experts]
    matrix = tensors[int(found[3])]
    if matrix is None:
        return name
    stacked = sum(one is not None and one.tensor == matrix.tensor for one in tensors) > 1
    return f"{matrix.tensor.name}, expert {found[3]}" if stacked else matrix.tensor.name


def zero_scales_in_words(count: int) -> str:
    """ "1,024, whose weights are all 0" """
    return f"{count:,}, whose weights are all 0"


def lost_line(count: int, names: Sequence[str], quote: str = "") -> str:
    """A sentence that warns of matrices that became nearly all zeros; names are between quotes."""
    more = f" and {count - len(names)} more" if count > len(names) else ""
    listed = ", ".join(f"{quote}{name}{quote}" for name in names)
    return (
        f"{counted(count, 'matrix')} became nearly all zeros, although the source's weights are "
        f"not: {listed}{more}"
    )


def describe_units(keys: Sequence[str]) -> str:
    """ "layers 3-5 and non-expert tensors" """
    layers = [int(key.split("-")[1]) for key in keys if key.startswith("layer-")]
    words = [listed("layer", layers)] if layers else []
    if len(layers) < len(keys):
        words.append("non-expert tensors")
    return " and ".join(words)


def peak_rss() -> int:
    """Largest resident memory of this process so far, in bytes."""
    with contextlib.suppress(OSError):
        # ru_maxrss can be the parent's: Linux lets it survive fork and exec.
        status = Path("/proc/self/status").read_text()
        if match := re.search(r"VmHWM:\s+([0-9]+) kB", status):
            return int(match[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
