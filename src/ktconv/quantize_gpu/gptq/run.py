"""`--method gptq`: the whole model is calibrated, and each layer is final as soon as it is done.

A killed run keeps its finished layers. The next one puts their weights back into the model as the
first run computed with them, lets the samples run through, and goes on behind them; the result is
the same as without the interruption.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktconv.conversion.pipeline import Observer
from ktconv.conversion.plan import LayerUnit, Unit
from ktconv.errors import CheckpointError, UsageError
from ktconv.model.decoded import encoded_weights
from ktconv.quantize_gpu.common import Preflight, Request, device_of
from ktconv.quantize_gpu.gptq.calibration import (
    WITHOUT_MODEL,
    Samples,
    check_settings,
    load_tokenizer,
    read_samples,
)
from ktconv.quantize_gpu.gptq.coverage import LayerCoverage
from ktconv.quantize_gpu.gptq.memory import Need, Placement, estimate, place
from ktconv.quantize_gpu.matrices import write_matrix
from ktconv.quantize_gpu.rtn import Rtn, as_array, decoded
from ktconv.reading.buffers import Buffers
from ktconv.system import machine
from ktconv.system.text import Notify, silent
from ktconv.targets.pack_quantized.module_classes import class_of
from ktconv.targets.pack_quantized.names import module_name
from ktconv.targets.pack_quantized.scheme import PARTS
from ktconv.targets.pack_quantized.target import Plan, weight_dtype
from ktconv.writer.journal import Record
from ktconv.writer.manifest import read_manifest

if TYPE_CHECKING:
    from ktconv.quantize_gpu.gptq.quantize import QuantizedMatrix
    from ktconv.quantize_gpu.gptq.selftest import SelfTest

_LIBRARIES = ("llmcompressor", "compressed-tensors", "torch", "transformers")


def need(plan: Plan) -> Need:
    """The memory that calibration takes."""
    chosen = {unit.layer.index: unit.experts for unit in plan.layers if _is_calibrated(unit)}
    used = plan.target.options.calibration
    assert used is not None
    return estimate(plan.checkpoint, chosen, used.samples, used.max_seq_len)


def coverage_of(output: Path) -> dict[int, LayerCoverage]:
    """Layer -> what its experts saw, from the manifest of a finished output."""
    manifest = read_manifest(output)
    return {
        int(key.split("-")[1]): LayerCoverage.of_record(record["coverage"])
        for key, record in (manifest.units if manifest else {}).items()
        if "coverage" in record
    }


def _is_calibrated(unit: LayerUnit) -> bool:
    """transformers builds no layers for multi-token prediction: those are rounded to nearest."""
    return not unit.layer.is_mtp and len(unit.experts) > 0


class Gptq(Rtn):
    """One calibrated run. Layers that transformers does not build go the way of `Rtn`."""

    _placement: Placement

    @staticmethod
    def check(request: Request, plan: Plan) -> int:
        """Check all that headers and settings show; the memory of a run on the CPU.

        UsageError for options that exclude one another or a missing dataset.
        """
        options = plan.target.options
        if options.calibration is None:
            raise UsageError(
                "--method gptq needs --dataset", "give a .jsonl or .txt file, or a dataset's name"
            )
        if options.dampening is None or not 0 < options.dampening < 10:
            raise UsageError(f"--dampening {options.dampening} is out of range", "use 0.01 to 0.1")
        if request.layers is not None:
            raise UsageError(
                "--layers cannot be given with --method gptq: each layer is calibrated "
                "on the output of the layers before it",
                "omit it; an interrupted run continues where it stopped",
            )
        check_settings(options.calibration)
        return need(plan).cpu(gpu=False)

    def __init__(self, preflight: Preflight, observer: Observer, notify: Notify = silent) -> None:
        super().__init__(preflight, observer, notify)
        options = self.plan.target.options
        assert options.calibration is not None and options.dampening is not None
        self.settings, self.dampening = options.calibration, options.dampening
        self.device = device_of(self.request.device)
        tokenizer = load_tokenizer(self.plan.checkpoint.path)
        self.samples: Samples = read_samples(self.settings, tokenizer)
        self._check_vocabulary()
        self.tested: SelfTest | None = None
        self._coverage: dict[int, LayerCoverage] = {}
        self._calibrated = {u.layer.index: u for u in self.plan.layers if _is_calibrated(u)}
        self._progress = dict.fromkeys(self._calibrated, 0.0)  # fractions that are done

    def _place(self) -> Placement:
        """Where the weights are kept; ResourceError, before loading, if they fit nowhere."""
        request, free_gpu = self.request, None
        if self.device != "cpu":
            import torch

            free_gpu, total = torch.accelerator.get_memory_info(torch.device(self.device).index)
            if request.max_gpu_memory is not None and self.device.startswith("cuda"):
                torch.cuda.set_per_process_memory_fraction(min(1, request.max_gpu_memory / total))
        return place(
            need(self.plan),
            machine.available_memory(),
            request.max_cpu_memory,
            free_gpu,
            request.max_gpu_memory,
            machine.disk_free(request.output),
        )

    def origin(self) -> Record:
        """The samples: a resumed run with others would mix two calibrations."""
        used = {name: version(name) for name in _LIBRARIES}
        return {"calibration": {**self.samples.facts, "libraries": used}}

    def more(self) -> Record:
        """Coverage of all layers, and the self-test of this run."""
        coverage = coverage_of(self.output)
        return {
            "self_test": asdict(self.tested) if self.tested else None,
            "coverage": {str(layer): seen.record() for layer, seen in coverage.items()},
        }

    # ---- converting ----

    def convert(self, pending: Sequence[Unit]) -> None:
        mine = [unit for unit in self._calibrated.values() if unit in pending]
        if mine:
            self._placement = self._place()
            count, wanted = len(self.samples.ids), self.settings.samples
            fewer = f" (the dataset has no more; --samples is {wanted})" if count < wanted else ""
            self.notify(f"calibrating on {count} samples{fewer}, {self.samples.tokens} tokens")
        if mine and not self.done & {unit.key for unit in self._calibrated.values()}:
            self._self_test(mine[0])
        self.observer.begin([unit.key for unit in pending])
        if others := [unit for unit in pending if unit not in mine]:
            self.run_pipeline(others)
        if mine:
            self._calibrate(mine)

    def _check_vocabulary(self) -> None:
        """CheckpointError for a tokenizer with tokens that the model does not know."""
        tensors = self.plan.checkpoint.other_tensors
        rows = [tensor.shape[0] for tensor in tensors if class_of(tensor.name) == "embeddings"]
        size, largest = max(rows, default=None), max(map(max, self.samples.ids))
        if size is not None and largest >= size:
            raise CheckpointError(
                f"the tokenizer of {self.plan.checkpoint.path} makes token {largest}, but the "
                f"model knows {size}",
                "copy tokenizer.json and tokenizer_config.json of this model beside its weights",
            )

    def _self_test(self, unit: LayerUnit) -> None:
        """The self-test, before the first layer: a mistake must show now, not after hours."""
        from ktconv.quantize_gpu.gptq.selftest import self_test

        if self.request.self_test:
            self.observer.unit_started("self-test")
            use_threads(self.preflight.threads)
            self.tested = self_test(
                self.plan.checkpoint, unit.layer.index, unit.experts, self.samples,
                self._weights(), self.dampening, self._scratch("self-test"), self.device,
            )  # fmt: skip
            self.notify(self.tested.words())

    def _calibrate(self, pending: Sequence[LayerUnit]) -> None:
        from ktconv.quantize_gpu.gptq.calibration_model import (
            linear_experts,
            load_linear_model,
            model_dtype,
        )
        from ktconv.quantize_gpu.gptq.quantize import put_back, quantize_layers

        checkpoint, offload = self.plan.checkpoint, self._scratch("offload")
        use_threads(self.preflight.threads)
        self.observer.unit_started("loading")
        self.notify("loading the model")
        try:
            cpu_weights = self._placement.cpu_weights
            model = load_linear_model(
                checkpoint.path, model_dtype(checkpoint), cpu_weights, offload,
                decoded=encoded_weights(checkpoint),
            )  # fmt: skip
            present = linear_experts(model)
            for unit in self._calibrated.values():
                layer = unit.layer.index
                if layer not in present or present[layer].count != len(unit.layer.experts):
                    raise CheckpointError(
                        f"transformers builds other experts for layer {layer} than the checkpoint "
                        "contains",
                        WITHOUT_MODEL,
                    )
                if unit.key in self.done:
                    put_back(present[layer], self._finished_matrices(unit), self._weights())
            chosen = {unit.layer.index: unit.experts for unit in pending}
            quantize_layers(
                model, self.samples, chosen, self._weights(), self.dampening, self, self.device
            )
        finally:
            shutil.rmtree(offload, ignore_errors=True)

    def _weights(self) -> Any:
        from compressed_tensors.quantization import QuantizationArgs

        return QuantizationArgs(**self.plan.target.scheme.weight_arguments())

    def _scratch(self, name: str) -> Path:
        """A folder that no loader looks at, empty."""
        folder = self.journal.directory / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    # ---- `quantize.Events` ----

    def layer_started(self, layer: int) -> None:
        self.observer.unit_started(self._calibrated[layer].key)

    def progressed(self, layer: int, share: float) -> None:
        before, size = self._progress[layer], self._calibrated[layer].source_bytes
        self._progress[layer] = min(1.0, before + share)
        self.observer.advanced(round(size * self._progress[layer]) - round(size * before))

    def layer_done(
        self, layer: int, matrices: Iterator[QuantizedMatrix], coverage: LayerCoverage
    ) -> None:
        unit = self._calibrated[layer]
        self._coverage[layer] = coverage
        reader, buffers = self.reader(), Buffers(self.buffers())
        staging = self.stage(unit)
        tensors: dict[str, Any] = {}
        try:
            for matrix in matrices:
                source = unit.layer.experts[matrix.expert][matrix.projection]
                arrays = {part: as_array(tensor) for part, tensor in matrix.tensors.items()}
                tensors |= write_matrix(
                    staging, self.plan.target.scheme, "gptq",
                    module_name(unit.layer, matrix.expert, matrix.projection),
                    decoded(reader, source, buffers, lambda _: None), arrays, weight_dtype(source),
                    self.request.verify,
                )  # fmt: skip
            files = staging.commit()
        except BaseException:
            staging.abandon()
            raise
        self.finished(unit, files, tensors)
        self.observer.unit_finished(unit.key)

    def unit_facts(self, unit: Unit) -> Record:
        seen = self._coverage.get(unit.layer.index) if isinstance(unit, LayerUnit) else None
        return {"coverage": seen.record()} if seen else {}

    def _finished_matrices(self, unit: LayerUnit) -> Iterator[QuantizedMatrix]:
        """What an earlier run wrote of a layer."""
        from safetensors import safe_open

        from ktconv.quantize_gpu.gptq.quantize import QuantizedMatrix

        with ExitStack() as stack:
            opened = {
                name: stack.enter_context(safe_open(self.output / name, "pt"))
                for name in unit.shard_names
            }
            shard_of = {name: opened[shard.name] for shard in unit.shards for name in shard.offsets}
            for expert in unit.experts:
                for projection in unit.layer.projections:
                    module = module_name(unit.layer, expert, projection)
                    names = {part: f"{module}.{part}" for part in PARTS}
                    tensors = {part: shard_of[n].get_tensor(n) for part, n in names.items()}
                    yield QuantizedMatrix(expert, projection, tensors)


def use_threads(count: int) -> None:
    """Rounding to nearest sets torch to one thread, since its workers are threads already."""
    import torch

    torch.set_num_threads(count)
