"""Weights of sources in every encoding, with what adapters add to them."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.convert import (
    SIDE_FILES,
    all_files,
    assert_output,
    convert,
    matrices_of,
    read_json,
    read_model,
)
from helpers.encoded import HIDDEN, INNER, KINDS, SOURCE, encoded_model
from helpers.families import Weights, bf16, random_weights, simple_config, write_checkpoint
from helpers.lora import WEIGHTS, Sides, sides, with_lora, write_adapter, write_config
from safetensors.numpy import load_file, save_file

import ktconv as library
from ktconv.errors import CheckpointError, OutputError
from ktconv.formats.decode import E4M3FN_VALUES, bf16_to_f32
from ktconv.quantize.packed import Request, quantize_cpu
from ktconv.source import ModelSource, open_checkpoint, source_identity
from ktconv.source.others import OtherWeights
from ktconv.source.reading import encoded_sums, merged
from ktconv.source.reading.matrices import MatrixReader, buffer_bytes
from ktconv.source.reading.merged import exact
from ktconv.source.reading.reader import BOUNCE_BYTES, SourceReader
from ktconv.source.reading.tensors import SourceTensors
from ktconv.system.stores import MadePath
from ktconv.targets.packed.target import Options

pytestmark = pytest.mark.slow

Key = tuple[int, str]
NAMES = ("gate", "up", "down")


def pairs_of(experts: int, inner: int, hidden: int, seed: int = 1) -> dict[Key, Sides]:
    rng = np.random.default_rng(seed)
    return {
        (expert, name): sides(rng, *((hidden, inner) if name == "down" else (inner, hidden)))
        for expert in range(experts)
        for name in NAMES
    }


def modules_of(pairs: dict[Key, Sides]) -> dict[str, Sides]:
    return {f"{SOURCE}.{expert}.{name}_proj": pair for (expert, name), pair in pairs.items()}


def weights_with(weights: Weights, *added: tuple[dict[Key, Sides], float]) -> Weights:
    """The values of all experts with s B A of adapters."""
    stacks = []
    for name in NAMES:
        own = getattr(weights, name)
        stacks.append(
            np.stack(
                [
                    with_lora(one, [(pairs[expert, name], s) for pairs, s in added])
                    for expert, one in enumerate(own)
                ]
            )
        )
    return Weights(*stacks)


def converted(model: Path, output: Path, *adapters: object, **options: Any) -> None:
    source = ModelSource(str(model), adapter=tuple(map(str, adapters)) or None)
    chosen = Options(**{"numa": 1, "requantize": True, **options})
    quantize_cpu(Request(source, output, chosen, threads=1))


@pytest.mark.parametrize("kind", KINDS)
def test_every_encoding(kind: str, tmp_path: Path) -> None:
    """Packed bytes are those of W + 2 B A in float32; a search for scales, in the tests below, sees
    the same numbers."""
    model, weights, _ = encoded_model(tmp_path / "model", kind)
    pairs = pairs_of(2, INNER, HIDDEN)
    adapter = write_adapter(tmp_path / "adapter", modules_of(pairs))
    converted(model, tmp_path / "out", adapter, method="int8", scale="amax")
    truth = matrices_of({0: weights_with(weights, (pairs, 2.0))})
    assert_output(tmp_path / "out", truth, {}, method="int8", numa=1, scale="amax")


@pytest.fixture
def model(tmp_path: Path) -> tuple[Path, Weights]:
    """Two experts in bf16, a router, attention and embeddings."""
    weights = random_weights(inner=INNER, hidden=HIDDEN, experts=2, seed=4)
    tensors: dict[str, Any] = {
        f"{SOURCE}.{expert}.{name}_proj.weight": bf16(getattr(weights, name)[expert])
        for expert in range(2)
        for name in NAMES
    }
    rng = np.random.default_rng(8)
    for name, shape in {
        "model.layers.0.mlp.gate.weight": (2, HIDDEN),
        "model.layers.0.self_attn.q_proj.weight": (320, HIDDEN),
        "model.embed_tokens.weight": (50, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }.items():
        tensors[name] = bf16(rng.standard_normal(shape, np.float32))
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts": 2}
    return write_checkpoint(tmp_path / "model", tensors, simple_config(**sizes)), weights


def bits(values: Any) -> bytes:
    """Rounded once to bf16, ties to even."""
    wide = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return bytes(((wide + 0x7FFF + (wide >> 16 & 1)) >> 16).astype("<u2").tobytes())


def test_other_tensors_are_rounded_once(model: tuple[Path, Weights], tmp_path: Path) -> None:
    """Attention, a router and an embedding, in their own dtype; others are copied."""
    rng = np.random.default_rng(2)
    before = read_model(model[0])
    values = {
        name: np.frombuffer(one.data, np.uint16).astype(np.uint32) << np.uint32(16)
        for name, one in before.items()
    }
    query, router = sides(rng, 320, HIDDEN), sides(rng, 2, HIDDEN)
    modules = {"model.layers.0.self_attn.q_proj": query, "model.layers.0.mlp.gate": router}
    adapter = write_adapter(tmp_path / "adapter", modules)
    a, b = sides(rng, 50, HIDDEN)
    stored = load_file(adapter / WEIGHTS)
    start = "base_model.model.model.embed_tokens.lora_embedding_"
    stored |= {f"{start}A": np.ascontiguousarray(b.T), f"{start}B": np.ascontiguousarray(a.T)}
    save_file(stored, adapter / WEIGHTS)
    converted(model[0], tmp_path / "out", adapter)
    found = read_model(tmp_path / "out")
    for name, pair, out in (
        ("model.layers.0.self_attn.q_proj.weight", query, "blk.0.self_attn.q_proj.weight"),
        ("model.layers.0.mlp.gate.weight", router, "blk.0.mlp.gate.weight"),
        ("model.embed_tokens.weight", (a, b), "embed_tokens.weight"),
    ):
        weight = values[name].view(np.float32).reshape(before[name].shape)
        assert found[out].data == bits(with_lora(weight, [(pair, 2.0)])), name
        assert found[out].data != before[name].data
    assert found["norm.weight"].data == before["model.norm.weight"].data


def test_tied_embeddings_are_refused(model: tuple[Path, Weights], tmp_path: Path) -> None:
    config = json.loads((model[0] / "config.json").read_text())
    (model[0] / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    modules = {"model.embed_tokens": sides(np.random.default_rng(1), 50, HIDDEN)}
    adapter = write_adapter(tmp_path / "adapter", modules)
    with pytest.raises(CheckpointError, match="of embeddings that are the model's head, too"):
        open_checkpoint(ModelSource(model[0], adapter=(str(adapter),)))


QUERY = "model.layers.0.self_attn.q_proj"


def encoded_query(kind: str, directory: Path, rows: int = 384) -> tuple[Path, Path, Any, Sides]:
    """A model with attention in an encoding, an adapter of it, the weights and A and B."""
    parts, values = KINDS[kind].of(np.random.default_rng(0), rows, HIDDEN)
    more = {f"{QUERY}.{part}": one for part, one in parts.items()}
    model, _, _ = encoded_model(directory / "model", kind, **more)
    pair = sides(np.random.default_rng(1), rows, HIDDEN)
    return model, write_adapter(directory / "adapter", {QUERY: pair}), values, pair


FP8 = [name for name, kind in KINDS.items() if kind.name.startswith("fp8")]


@pytest.mark.parametrize("kind", FP8)
def test_fp8_beside_the_experts_is_encoded_again(kind: str, tmp_path: Path) -> None:
    """Sums to half a step of E4M3, which is a sixteenth of a number, or of the largest of a block;
    scales of powers of two may be twice as large. `verify` proves scales and codes."""
    model, adapter, values, pair = encoded_query(kind, tmp_path)
    checkpoint = open_checkpoint(ModelSource(model, adapter=(str(adapter),)))
    weights = OtherWeights(checkpoint)
    parts = weights.find(f"{QUERY}.weight")
    assert parts is not None
    one = weights.matrix(parts)
    assert one.encoding == KINDS[kind].name
    reader = MatrixReader(SourceReader(checkpoint.files, checkpoint.sources), one.matrix)
    data = np.empty(buffer_bytes(one.matrix, one.matrix.rows), np.uint8)
    chunks = [own.copy() for _, own in reader.decoded(data, np.empty(BOUNCE_BYTES, np.uint8))]
    found, expected = np.concatenate(chunks), with_lora(np.asarray(values), [(pair, 2.0)])
    assert (found != np.asarray(values)).any()
    bound = np.abs(expected) / 16 + np.abs(expected).max() * 2.0**-16
    assert (np.abs(found - expected) <= bound * 1.01).all()
    library.quantize_cpu(model, tmp_path / "out", adapter=adapter)
    report = library.verify(tmp_path / "out", source=model, adapter=adapter, level="weights")
    assert report["passed"], report["failures"]
    assert library.inspect(tmp_path / "out")["encoded_again"] == [f"{QUERY}.weight"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "- Encoded in FP8 again, with LoRA: 1 weight outside the experts" in card


def test_the_manifest_says_what_is_encoded_again(tmp_path: Path) -> None:
    """In every form of output that has the weight; one of the experts alone has not."""
    model, adapter, _, _ = encoded_query(FP8[0], tmp_path)
    given: list[dict[str, Any]] = [{"method": "fp8"}, {"experts_only": True}]
    for number, options in enumerate(given):
        library.quantize_cpu(model, tmp_path / f"{number}", adapter=adapter, **options)
    said = [read_json(tmp_path / f"{number}" / "ktconv.json") for number in range(2)]
    assert [one.get("encoded_again") for one in said] == [[f"{QUERY}.weight"], None]
    cards = [(tmp_path / f"{number}" / "README.md").read_text() for number in range(2)]
    assert ["Encoded in FP8 again" in one for one in cards] == [True, False]


@pytest.mark.parametrize("kind", ["fp8 block", "fp8 block, Qwen", "fp8 group"])
def test_scales_that_config_says_are_powers_of_two_stay_so(kind: str, tmp_path: Path) -> None:
    """Kernels read the exponents alone of such scales (scale_fmt ue8m0), in whatever dtype."""
    model, adapter, _, _ = encoded_query(kind, tmp_path)
    said = read_json(model / "config.json")
    said.setdefault("quantization_config", {"quant_method": "fp8"})["scale_fmt"] = "ue8m0"
    (model / "config.json").write_text(json.dumps(said))
    library.quantize_cpu(model, tmp_path / "out", adapter=adapter)
    report = library.verify(tmp_path / "out", source=model, adapter=adapter, level="weights")
    assert report["passed"], report["failures"]
    stored = read_model(tmp_path / "out")
    weight = QUERY.replace("model.layers", "blk") + ".weight"
    (scale,) = (name for name in stored if name.startswith(f"{weight}_"))
    codes, scales = stored[weight], stored[scale]
    kinds = {"F32": lambda data: np.frombuffer(data, "<f4"),
             "F16": lambda data: np.frombuffer(data, "<f2").astype(np.float32),
             "BF16": lambda data: bf16_to_f32(np.frombuffer(data, "<u2"))}  # fmt: skip
    assert (np.frexp(kinds[scales.dtype](scales.data))[0] == 0.5).all()
    sizes = np.abs(E4M3FN_VALUES[np.frombuffer(codes.data, np.uint8)]).reshape(codes.shape)
    blocks = zip(codes.shape, scales.shape, strict=True)
    at = [np.arange(0, size, size // count) for size, count in blocks]
    largest = np.maximum.reduceat(np.maximum.reduceat(sizes, at[0], axis=0), at[1], axis=1)
    assert ((largest >= 224) & (largest <= 448)).all()  # no scale could be half as large


@pytest.mark.parametrize("what", ["codes", "scales"])
def test_wrong_codes_and_scales_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """What the converter's way makes is not what verify trusts."""
    model, adapter, _, _ = encoded_query(FP8[0], tmp_path)
    real = encoded_sums.EncodedSums.codes, encoded_sums._scales

    def codes(self: Any, rows: range, sums: Any, scales: Any) -> Any:
        found = real[0](self, rows, sums, scales)
        found[0, 5] ^= 0x80 if found[0, 5] & 0x7F else 0x30
        return found

    def scales(number: str, largest: Any) -> Any:
        return real[1](number, largest * np.float32(1.1))

    if what == "codes":
        monkeypatch.setattr(encoded_sums.EncodedSums, "codes", codes)
    else:
        monkeypatch.setattr(encoded_sums, "_scales", scales)
    library.quantize_cpu(model, tmp_path / "out", adapter=adapter)
    report = library.verify(tmp_path / "out", source=model, adapter=adapter, level="weights")
    said = {"codes": "by verify's own way", "scales": "has the scale"}[what]
    assert not report["passed"]
    assert any(said in one["message"] for one in report["failures"])


def test_other_codes_beside_the_experts_are_refused(tmp_path: Path) -> None:
    model, adapter, _, _ = encoded_query("int4 packed, channel", tmp_path)
    with pytest.raises(CheckpointError, match=r"only FP8 is encoded again"):
        open_checkpoint(ModelSource(model, adapter=(str(adapter),)))


def test_several_adapters(model: tuple[Path, Weights], tmp_path: Path) -> None:
    """Sums of all, each times its weight; the scale of one is that of rslora."""
    first, second = (pairs_of(2, INNER, HIDDEN, seed) for seed in (1, 2))
    one = write_adapter(tmp_path / "one", modules_of(first))
    other = write_adapter(tmp_path / "other", modules_of(second), use_rslora=True)
    converted(model[0], tmp_path / "out", f"{one}:0.5", f"{other}:-0.25", experts_only=True)
    truth = weights_with(model[1], (first, 0.5 * 2), (second, -0.25 * 8 / 2))
    assert_output(tmp_path / "out", matrices_of({0: truth}), {}, method="int4", numa=1)


def test_layouts_of_files(model: tuple[Path, Weights], tmp_path: Path) -> None:
    """Of each expert, of KTransformers, and of parameters in both orders: the same weights."""
    pairs = pairs_of(2, INNER, HIDDEN)
    for expert in range(2):  # parameters have one A for gate and up
        pairs[expert, "up"] = pairs[expert, "gate"][0], pairs[expert, "up"][1]
    plain = write_adapter(tmp_path / "plain", modules_of(pairs))
    fused = tmp_path / "fused"
    fused.mkdir()
    stacked = {
        f"layers.0.experts.{name}_lora_{side}": np.stack([pairs[e, name][i] for e in range(2)])
        for name in NAMES
        for i, side in enumerate("ab")
    }
    save_file(stacked, fused / "fused_expert_lora.safetensors")
    write_config(fused)
    both = [np.concatenate([pairs[e, "gate"][1], pairs[e, "up"][1]]) for e in range(2)]
    down = [pairs[e, "down"][1] for e in range(2)]
    a = np.concatenate([pairs[e, "gate"][0] for e in range(2)])
    a_down = np.concatenate([pairs[e, "down"][0] for e in range(2)])
    directories = [plain, fused]
    for order in ("rank_major", "grouped_by_expert"):
        axis = 2 if order == "rank_major" else 1
        b, b_down = (np.stack(one, axis=axis).reshape(len(one[0]), -1) for one in (both, down))
        modules = {f"{SOURCE}.base_layer": (a, b), SOURCE: (a_down, b_down)}
        settings: Any = {"lora_B_layout": order, "target_parameters": ["experts.gate_up_proj"]}
        directories.append(write_adapter(tmp_path / order, modules, **settings))
    outputs = []
    for number, directory in enumerate(directories):
        converted(model[0], tmp_path / str(number), directory, experts_only=True)
        outputs.append(read_model(tmp_path / str(number)))
    truth = matrices_of({0: weights_with(model[1], (pairs, 2.0))})
    assert_output(tmp_path / "0", truth, {}, method="int4", numa=1)
    assert all(one == outputs[0] for one in outputs)


def test_some_projections(model: tuple[Path, Weights], tmp_path: Path) -> None:
    """Of the others the bytes of the source are read; both encodings are named."""
    pairs = {key: one for key, one in pairs_of(2, INNER, HIDDEN).items() if key[1] == "down"}
    adapter = write_adapter(tmp_path / "adapter", modules_of(pairs))
    checkpoint = open_checkpoint(ModelSource(model[0], adapter=(str(adapter),)))
    plain = open_checkpoint(model[0])
    assert checkpoint.layers[0].encodings == ["bf16", "fp32"]
    assert checkpoint.layers[0].experts[1]["up"] == plain.layers[0].experts[1]["up"]
    down = SourceTensors(checkpoint).expert(checkpoint.layers[0], 1)[2].values()
    np.testing.assert_array_equal(down, with_lora(model[1].down[1], [(pairs[1, "down"], 2.0)]))


def test_what_nothing_uses_is_freed(model: tuple[Path, Weights], tmp_path: Path) -> None:
    """Made files and their store name each other, which the collector of cycles must see."""
    adapter = write_adapter(tmp_path / "adapter", modules_of(pairs_of(2, INNER, HIDDEN)))
    checkpoint = open_checkpoint(ModelSource(model[0], adapter=(str(adapter),)))
    path = checkpoint.layers[0].experts[0]["down"].tensor.file
    assert isinstance(path, MadePath)
    store = weakref.ref(path.store)
    del checkpoint, path
    gc.collect()
    assert store() is None


def test_any_part_of_a_made_file(
    model: tuple[Path, Weights], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within rows, across matrices and pieces: the same bytes as of all of it."""
    adapter = write_adapter(tmp_path / "adapter", modules_of(pairs_of(2, INNER, HIDDEN)))
    monkeypatch.setattr(merged, "_PIECE_BYTES", 128 * 8 * HIDDEN)
    checkpoint = open_checkpoint(ModelSource(model[0], adapter=(str(adapter),)))
    tensors = [m.tensor for expert in checkpoint.layers[0].experts for m in expert.values()]
    reader = SourceReader(checkpoint.files, checkpoint.sources)
    size = sum(one.nbytes for one in tensors)
    with reader.open(tensors[0].file) as fd:
        whole = fd.take(size, 0)
        rng = np.random.default_rng(0)
        for start, stop in np.sort(rng.integers(0, size, (20, 2)), axis=1).tolist():
            assert fd.take(stop - start, start) == whole[start:stop]
    assert tensors[0].file.name.endswith(".safetensors")
    assert str(adapter) in str(tensors[0].file)


def test_sums_do_not_depend_on_their_order() -> None:
    """Numbers of all magnitudes: sums of the products are exact, and near to those of the numbers
    that were given."""
    rng = np.random.default_rng(5)
    for rank in (1, 16, 1024):
        a, b = (
            (rng.standard_normal(shape) * 2.0 ** rng.integers(-40, 3, shape)).astype(np.float32)
            for shape in ((rank, 7), (5, rank))
        )
        exact_a, exact_b, _ = exact(a, b, 1.0)
        turned = exact_b[:, ::-1] @ exact_a[::-1]
        one_by_one = sum(np.outer(exact_b[:, r], exact_a[r]) for r in range(rank))
        np.testing.assert_array_equal(exact_b @ exact_a, turned)
        np.testing.assert_array_equal(exact_b @ exact_a, one_by_one)
        given = b.astype(np.float64) @ a.astype(np.float64)
        largest = np.abs(b).max(axis=1)[:, None] * np.abs(a).max(axis=0) * rank
        assert (np.abs(exact_b @ exact_a - given) <= largest * 2.0**-20).all()
    zeros, _, _ = exact(np.zeros((4, 3), np.float32), np.zeros((2, 4), np.float32), 1.0)
    assert not zeros.any()


def test_what_a_record_says(model: tuple[Path, Weights], tmp_path: Path) -> None:
    """Weights and checksums are what an output is compared by; places are not."""
    pairs = pairs_of(2, INNER, HIDDEN)
    adapter = write_adapter(tmp_path / "adapter", modules_of(pairs))
    converted(model[0], tmp_path / "out", f"{adapter}:0.5")
    manifest = read_json(tmp_path / "out" / "ktconv.json")
    assert manifest["adapters"] == ["adapter:0.5"]
    names = [name for name in manifest["source"]["files"] if name.startswith("adapter ")]
    assert names == ["adapter 1 x 0.5/adapter_config.json", f"adapter 1 x 0.5/{WEIGHTS}"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "- LoRA in all weights: adapter, times 0.5\n" in card
    assert "--adapter adapter:0.5" in card
    assert str(tmp_path) not in card
    moved = adapter.rename(tmp_path / "moved")
    converted(model[0], tmp_path / "out", f"{moved}:0.5")  # there is nothing to do
    for other in ((), (str(moved),)):
        with pytest.raises(OutputError, match="was begun with other settings or another source"):
            converted(model[0], tmp_path / "out", *other)
    write_adapter(moved, modules_of(pairs_of(2, INNER, HIDDEN, seed=9)))
    with pytest.raises(OutputError, match=r"adapter 1 x 0\.5/adapter_model"):
        converted(model[0], tmp_path / "out", f"{moved}:0.5")


def test_an_interrupted_run_goes_on(model: tuple[Path, Weights], tmp_path: Path) -> None:
    """Layer by layer, with the same bytes as in one run."""
    adapter = write_adapter(tmp_path / "adapter", modules_of(pairs_of(2, INNER, HIDDEN)))
    converted(model[0], tmp_path / "once", adapter)
    source = ModelSource(str(model[0]), adapter=(str(adapter),))
    options = Options(numa=1, requantize=True)
    quantize_cpu(Request(source, tmp_path / "out", options, layers=[0], threads=1))
    converted(model[0], tmp_path / "out", adapter)
    once, out = (all_files(tmp_path / name) for name in ("once", "out"))
    assert {name: one for name, one in out.items() if name not in SIDE_FILES} == {
        name: one for name, one in once.items() if name not in SIDE_FILES
    }


def test_other_readings_of_a_model_are_other_models(
    model: tuple[Path, Weights], tmp_path: Path
) -> None:
    """What is kept of a pass over a text is not that of the model without the adapter."""
    adapter = write_adapter(tmp_path / "adapter", modules_of(pairs_of(2, INNER, HIDDEN)))
    found = [
        source_identity(open_checkpoint(ModelSource(model[0], adapter=given)))
        for given in (None, (str(adapter),), (f"{adapter}:2",))
    ]
    assert found[0] != found[1] != found[2]


def test_a_plain_conversion_is_as_before(model: tuple[Path, Weights], tmp_path: Path) -> None:
    convert(model[0], tmp_path / "out")
    manifest = read_json(tmp_path / "out" / "ktconv.json")
    assert "adapters" not in manifest
    assert "LoRA" not in (tmp_path / "out" / "README.md").read_text()
