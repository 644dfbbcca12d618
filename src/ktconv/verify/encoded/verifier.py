"""Every level on experts for GPUs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from math import prod

from msgspec.structs import replace

from ktconv.errors import UsageError
from ktconv.source import ExpertMatrix, TensorRef
from ktconv.source.reading.buffers import Buffers, BufferSizes
from ktconv.source.reading.matrices import buffers_of, chunk_rows
from ktconv.targets.encoded.kept import is_kept
from ktconv.targets.encoded.layouts.packed import PACK_QUANTIZED
from ktconv.targets.encoded.scheme import Scheme
from ktconv.targets.encoded.target import weight_dtype
from ktconv.verify.encoded.encoded import EncodedCheck
from ktconv.verify.encoded.mapping import LEVEL as MAPPING
from ktconv.verify.encoded.mapping import check_mapping, check_sizes
from ktconv.verify.encoded.model import EncodedLayersCheck, EncodedModelCheck
from ktconv.verify.encoded.module_check import ModuleCheck
from ktconv.verify.encoded.output import EncodedOutput, open_gpu_output
from ktconv.verify.encoded.rounding import rules_of
from ktconv.verify.encoded.structure import EncodedStructureCheck
from ktconv.verify.encoded.unrecorded import Rule, rules_by_group
from ktconv.verify.encoded.weights import DecodedCheck, IntegerCheck, largest_error
from ktconv.verify.findings import Facts, Findings
from ktconv.verify.reading import Context
from ktconv.verify.runner import Check
from ktconv.verify.totals import ItemResult, Totals
from ktconv.verify.verifier import OutputVerifier
from ktconv.writer.manifest import MANIFEST

_PER_ELEMENT = 6  # bytes of a chunk: float32, a level, and at most as much of packed words
_ROUNDING_BYTES = 8 << 20
_SOME = 9  # matrices that tell how all were encoded; some of them can be damaged


class EncodedVerifier(OutputVerifier):
    output: EncodedOutput
    structure_class = EncodedStructureCheck
    layers_class = EncodedLayersCheck
    model_class = EncodedModelCheck
    open = staticmethod(open_gpu_output)

    def check_options(self) -> None:
        check_sizes("tp", self.request.tp)
        check_sizes("ep", self.request.ep)
        other, directory = self.request.beside, self.output.directory
        inputs = {"importance": self.request.importance, "calibrate": self.request.calibrate}
        for option in (name for name, given in inputs.items() if given is not None):
            raise UsageError(
                f"--{option} is for an output of quantize-cpu, and {directory} is one of "
                "quantize-gpu",
                "omit it",
            )
        if self.request.gradients:
            raise UsageError(
                f"--gradients is for experts on CPUs, and those of {directory} are for GPUs",
                "leave it out",
            )
        if other is not None:
            raise UsageError(
                f"--with is for an output of quantize-cpu, and {directory} is one of quantize-gpu",
                f"swap them: ktconv verify {other} --with {directory}",
            )

    def check_more(self) -> Facts:
        """Check how engines would load and split the experts."""
        return {MAPPING: check_mapping(self.output, self.request, self.findings)}

    def thread_bytes(self) -> int:
        """Bytes of a thread: its buffers, a chunk as float32 with its levels, and what some of its
        rows take while they are rounded again."""
        sizes = (min(chunk_rows(one), one.rows) * one.cols for one in self._matrices())
        return self.buffer_sizes().nbytes + _PER_ELEMENT * max(sizes, default=0) + _ROUNDING_BYTES

    def buffer_sizes(self) -> BufferSizes:
        return buffers_of(self._matrices())

    def _matrices(self) -> list[ExpertMatrix]:
        """One of each kind that is decoded."""
        layers = self.output.source_layers.values()
        experts = [matrix for layer in layers for matrix in layer.kinds]
        return [*experts, *self.output.decoded.values()]

    def expert_checks(
        self, context: Context, share: float, rng: random.Random
    ) -> Iterator[ModuleCheck]:
        """Also of packed modules that are not routed experts."""
        output = self.output
        chosen = {
            (layer, expert)
            for layer, experts in output.layers.items()
            for expert in rng.sample(experts, max(1, round(len(experts) * share)))
        }
        sources = output.source_layers if context.second else {}
        found = self._unrecorded(context)
        unrecorded = self._unrecorded_way(context)
        output = self.output
        rules = rules_of(output.method, output.ours)
        for module in output.modules.values():
            group = output.quantization.group_of(module.name) or output.quantization.groups[0]
            matrix, layer = None, None
            if module.where is not None and module.layer is not None:
                if (module.layer, module.where.expert) not in chosen:
                    continue
                layer = sources.get(module.layer)
                if layer is not None and module.where.expert < len(layer.experts):
                    matrix = layer.experts[module.where.expert][module.where.proj]
            if (rule := found.get(group.name)) is not None:
                if rule.kept or rule.scheme.search:
                    again = not rule.kept
                    yield EncodedCheck(context, module, matrix, layer, rule.scheme, again)
                else:
                    by_rule = rules_of("rtn", output.ours)
                    yield IntegerCheck(context, module, matrix, layer, group, by_rule)
            elif self._is_encoded(matrix):
                scheme, again = output.scheme_of(module), self.requantized
                if unrecorded is not None:
                    scheme, again = unrecorded
                yield EncodedCheck(context, module, matrix, layer, scheme, again)
            else:
                yield IntegerCheck(context, module, matrix, layer, group, rules)

    def _unrecorded(self, context: Context) -> Mapping[str, Rule | None]:
        """Rules, by group, of packed integers of which no manifest tells it: a recipe tells those
        of GPTQ. A failure where none explains them."""
        output = self.output
        if output.ours or output.scheme or output.method == "gptq" or not context.second:
            return {}
        found = rules_by_group(output, context.reader)
        for name, rule in found.items():
            if rule is None and output.method == "unknown":
                why = f"the codes and scales of quantization group {name} follow no known rule"
                self.findings.fail(
                    "weights",
                    "rule",
                    f"{why}: rounding to nearest, with scales by the largest weight or by the "
                    f"search, explains too few of them. Without {MANIFEST} and recipe.yaml, which "
                    "say how weights were rounded, damage cannot be told from another method.",
                )
        methods = {rule.method for rule in found.values() if rule is not None}
        if found and None not in found.values():
            self.output = replace(output, method="search" if "search" in methods else "rtn")
        elif output.method == "unknown":
            self.findings.note(
                "how these weights were rounded is not known, so only errors of whole "
                "matrices are checked, not every element"
            )
        return found

    def _unrecorded_way(self, context: Context) -> tuple[Scheme, bool] | None:
        """The way of rounding that explains most of a sample of experts, if tensors alone tell the
        format: scales by the largest weight or by the search, codes kept from the source or not.
        The checks hold all experts to it, so that damage is found by whatever it disagrees with."""
        output, scheme = self.output, self.output.scheme
        if output.ours or scheme is None or not context.second:
            return None
        sources = output.source_layers
        some = [
            (module, layer.experts[module.where.expert][module.where.proj], layer)
            for module in output.modules.values()
            if module.where is not None
            and (layer := sources.get(-1 if module.layer is None else module.layer)) is not None
            and module.where.expert < len(layer.experts)
        ]
        some = some[:: max(1, len(some) // _SOME)][:_SOME]
        searches = (True, False) if scheme.row.is_int else (False,)
        ways = [(replace(scheme, search=one), again) for one in searches for again in (False, True)]
        buffers = Buffers(self.buffer_sizes())

        def explained(way: tuple[Scheme, bool]) -> int:
            count = 0
            for module, matrix, layer in some:
                alone = replace(context, findings=Findings())
                EncodedCheck(alone, module, matrix, layer, *way).run(buffers, lambda _: None)
                count += not alone.findings.count()
            return count

        return max(ways, key=explained)

    @property
    def requantized(self) -> bool:
        """Whether codes that the source has already were not kept; GPTQ keeps none."""
        manifest = self.output.manifest
        if manifest is None or self.output.method != "rtn":
            return True
        return bool(manifest.options.get("requantize"))

    def _is_encoded(self, matrix: ExpertMatrix | None) -> bool:
        """Whether a matrix is checked as its scheme says; else as config.json does."""
        scheme = self.output.scheme
        if scheme is None or scheme.layout is not PACK_QUANTIZED:
            return scheme is not None
        if scheme.search:
            return True
        if matrix is None or self.requantized:
            return False
        return is_kept(scheme, matrix, weight_dtype(matrix) == "F16")

    def copy_checks(
        self, context: Context, tensor: TensorRef, origin: TensorRef | None
    ) -> Iterator[Check[ItemResult]]:
        matrix = self.output.decoded.get(tensor.name)
        if matrix is None:
            yield from super().copy_checks(context, tensor, origin)
        elif tensor.dtype == "BF16" and prod(tensor.shape) == matrix.rows * matrix.cols:
            yield DecodedCheck(context, tensor, matrix)

    def weights_facts(self, totals: Totals) -> Facts:
        counts = {index: len(layer.experts) for index, layer in self.output.source_layers.items()}
        return totals.as_dict(largest_error(self.output), counts)
