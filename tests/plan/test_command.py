"""`ktconv plan` from options to figures, arrays and files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import gguf_files
from helpers.cli import ktconv, ktconv_done, refused, refused_in_json
from helpers.convert import Converted, convert, read_model
from helpers.encoded import HIDDEN, INNER, encoded_model
from helpers.paths import EXAMPLE
from plan.conftest import SKEWED
from plan.models import OTHER_BYTES, write_counts

from ktconv.errors import UsageError
from ktconv.formats import FORMATS
from ktconv.plan import balance, expert_map, hot_experts
from ktconv.plan.command import make_plan, run
from ktconv.plan.request import Hot, PlanRequest, parse_hot
from ktconv.plan.sizes import open_model
from ktconv.source import ModelSource
from ktconv.targets.expert_sets import expert_set, read_expert_set

pytestmark = pytest.mark.slow

EXPERT = 2 * 3 * 128 * 128  # bytes of one of `model`'s
Facts = dict[str, Any]


def planned(model: Path, **options: Any) -> Facts:
    """The document, as it is printed."""
    facts, lines = run(PlanRequest(str(model), **{"numa": 1, **options}))
    assert lines and all(isinstance(line, str) for line in lines)
    document: Facts = json.loads(json.dumps(facts))
    return document


# ---- who holds what --------------------------------------------------------------------


def test_one_gpu_has_everything(model: Path) -> None:
    facts = planned(model)
    assert facts["schema"] == 1 and facts["kind"] == "placement plan"
    assert facts["experts"] == 16 and facts["moe_layers"] == "0-1"
    (rank,) = facts["ranks"]
    assert rank["gpus"] == [0] and rank["experts"] == 16 and rank["load_share"] == 1
    assert rank["expert_bytes"] == 16 * EXPERT and rank["other_bytes"] == OTHER_BYTES
    assert rank["bytes"] == 16 * EXPERT + OTHER_BYTES
    assert facts["load"]["uniform"] and facts["evenness"] == {"before": 1, "after": 1}
    assert facts["layers"][0]["expert_maps"] == [list(range(8))]
    assert facts["warnings"] == [] and facts["tp_slices"] == []


@pytest.mark.parametrize("placement", ["linear", "round_robin"])
def test_expert_parallel(model: Path, placement: Any) -> None:
    facts = planned(model, ep=3, placement=placement)
    assert [rank["experts"] for rank in facts["ranks"]] == [6, 6, 4]
    assert [rank["expert_bytes"] for rank in facts["ranks"]] == [n * EXPERT for n in (6, 6, 4)]
    for layer in facts["layers"]:
        for rank in range(3):
            assert layer["expert_maps"][rank] == expert_map(8, 3, rank, placement).tolist()
    assert facts["evenness"]["after"] == pytest.approx(8 / 9)
    assert facts["warnings"] == [
        "--ep 3: 8 experts give GPUs 2-3 each, the first GPUs more than the last"
    ]


def test_tensor_parallel(model: Path) -> None:
    """The slices, applied to tensors of the checkpoint, are the halves of its experts."""
    facts = planned(model, tp=2, ep=2)
    assert [rank["gpus"] for rank in facts["ranks"]] == [[0, 1], [2, 3]]
    assert facts["ranks"][0]["expert_bytes"] == 8 * EXPERT // 2
    (cut,) = facts["tp_slices"]
    assert cut["experts"] == {"0": "0-7", "1": "0-7"}
    tensors = {
        name: np.frombuffer(one.data, np.uint16).reshape(one.shape)
        for name, one in read_model(model).items()
    }
    prefix = "model.layers.1.mlp.experts.3"
    w13 = [np.zeros(one["shape"], np.uint16) for one in cut["w1"]["weight"]]
    for shard, name in (("w1", "gate_proj"), ("w3", "up_proj")):
        for rank, one in enumerate(cut[shard]["weight"]):
            source, destination = (
                tuple(slice(*ends) for ends in one[key]) for key in ("source", "destination")
            )
            w13[rank][destination] = tensors[f"{prefix}.{name}.weight"][source]
    for half, name in enumerate(("gate_proj", "up_proj")):
        whole = np.concatenate([np.split(one, 2)[half] for one in w13])
        assert (whole == tensors[f"{prefix}.{name}.weight"]).all()


def test_balanced(model: Path, counts: Path) -> None:
    facts = planned(model, ep=4, redundant=4, load=counts)
    assert facts["placement"] == "balanced"
    for layer in facts["layers"]:
        tables = balance(SKEWED[layer["layer"]], 12, gpus=4)
        assert layer["physical_to_logical"] == tables.physical_to_logical.tolist()
        assert layer["logical_to_physical"] == tables.logical_to_physical.tolist()
        assert layer["copies"] == tables.copies.tolist()
        assert layer["rank_loads"] == tables.gpu_loads(SKEWED[layer["layer"]], 4).tolist()
        assert np.concatenate(layer["places"]).tolist() == layer["physical_to_logical"]
        assert layer["evenness"]["after"] > layer["evenness"]["before"]
    assert facts["evenness"]["after"] > 0.8 > 0.5 > facts["evenness"]["before"]
    assert [rank["experts"] for rank in facts["ranks"]] == [6] * 4
    assert [rank["expert_bytes"] for rank in facts["ranks"]] == [6 * EXPERT] * 4
    assert sum(rank["load_share"] for rank in facts["ranks"]) == pytest.approx(1)


def test_layers_that_differ(ragged: Path) -> None:
    facts = planned(ragged, ep=4, redundant=4)
    assert [layer["experts"] for layer in facts["layers"]] == [4, 8, 4]
    assert [layer["mtp"] for layer in facts["layers"]] == [False, False, True]
    assert [len(layer["physical_to_logical"]) for layer in facts["layers"]] == [8, 12, 8]
    assert facts["ranks"][0]["expert_bytes"] == (2 + 2 * 3 + 2) * EXPERT
    experts = [cut["experts"] for cut in planned(ragged, tp=2)["tp_slices"]]
    assert experts == [{"0": "0-3", "2": "0-3"}, {"1": "0-7"}]
    facts = planned(ragged, hot="25%", per_layer=True)
    assert [sum(layer["gpu_mask"]) for layer in facts["layers"]] == [1, 2, 1]


def test_groups_stay_on_their_node(tmp_path: Path, counts: Path, model: Path) -> None:
    """The groups are those of the router by config.json."""
    grouped = tmp_path / "model"
    grouped.mkdir()
    for path in model.iterdir():
        (grouped / path.name).write_bytes(path.read_bytes())
    config = json.loads((grouped / "config.json").read_text())
    config |= {"model_type": "deepseek_v3", "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2}
    (grouped / "config.json").write_text(json.dumps(config))
    counts = write_counts(counts, SKEWED, model_type="deepseek_v3")
    facts = planned(grouped, ep=4, nodes=2, redundant=4, load=counts)
    for layer in facts["layers"]:
        tables = balance(SKEWED[layer["layer"]], 12, groups=4, nodes=2, gpus=4)
        assert layer["physical_to_logical"] == tables.physical_to_logical.tolist()
    assert facts["warnings"] == []
    facts = planned(grouped, ep=3, nodes=3, redundant=1, load=counts)
    (warning,) = facts["warnings"]
    assert warning == (
        "--nodes 3 has no effect: the router has 4 groups of experts, which nodes cannot share out"
    )


# ---- hot and cold ----------------------------------------------------------------------


def test_hot_of_all_layers(model: Path, counts: Path, tmp_path: Path) -> None:
    hot = tmp_path / "hot.json"
    facts = planned(model, hot="5", load=counts, write=hot, method="int8")
    masks = [layer["gpu_mask"] for layer in facts["layers"]]
    assert masks == hot_experts(list(SKEWED.values()), 5).tolist()
    assert read_expert_set(hot).as_dict()["experts"] == {"0": [0, 4], "1": [5, 6, 7]}
    total = sum(map(sum, SKEWED.values()))
    assert facts["gpu"]["load_share"] == pytest.approx((80 + 40 + 60 + 70 + 8) / total)
    assert facts["gpu"]["experts"] == 5
    each = FORMATS["int8"].expert_bytes(128, 128)
    assert facts["cpu"]["bytes_per_node"] == [16 * each]
    assert facts["cpu"]["bytes_per_node_without_hot"] == [11 * each]


def test_as_many_as_fit(model: Path, counts: Path) -> None:
    for fit in (0, 1, 7, 16):
        for spare in (0, EXPERT - 1):
            memory = OTHER_BYTES + fit * EXPERT + spare
            facts = planned(model, gpu_memory=memory, load=counts)
            assert facts["gpu"]["experts"] == min(16, fit)
            assert facts["ranks"][0]["bytes"] <= memory
    assert planned(model, gpu_memory=OTHER_BYTES)["warnings"] == ["no expert fits on the GPUs"]
    # Of each layer, on 2 ranks of 2 halves: 3 experts of a layer give the first rank 2.
    memory = OTHER_BYTES + 2 * 2 * EXPERT // 2
    facts = planned(model, gpu_memory=memory, per_layer=True, ep=2, tp=2, load=counts)
    assert [sum(layer["gpu_mask"]) for layer in facts["layers"]] == [4, 4]
    facts = planned(model, gpu_memory=memory - 1, per_layer=True, ep=2, tp=2, load=counts)
    assert [sum(layer["gpu_mask"]) for layer in facts["layers"]] == [2, 2]


def test_one_more_would_not_fit(ragged: Path) -> None:
    """Where experts differ in size, too."""
    for memory in range(OTHER_BYTES, OTHER_BYTES + 24 * EXPERT, EXPERT // 2):
        facts = planned(ragged, gpu_memory=memory, ep=2, placement="round_robin")
        count = facts["gpu"]["experts"]
        assert max(rank["bytes"] for rank in facts["ranks"]) <= memory
        if count < 16:
            more = planned(ragged, hot=str(count + 1), ep=2, placement="round_robin")
            assert max(rank["bytes"] for rank in more["ranks"]) > memory


def test_numbers_and_shares() -> None:
    assert parse_hot("640") == Hot(640)
    assert parse_hot("20%").of(64) == 12 and parse_hot("12.5%").of(8) == 1
    assert parse_hot("100%").of(7) == 7 and parse_hot("0.1%").of(999) == 0
    assert parse_hot("29%").of(100) == 29  # 0.29 * 100 is below 29 in binary
    for text in ("", "x", "-1", "101%", "1e3", "20 %%", "1.5", "%"):
        with pytest.raises(UsageError, match="neither a number of experts nor a share"):
            parse_hot(text)


# ---- CPU -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["int4", "int8", "bf16"])
def test_bytes_of_a_conversion_are_known_before(method: str, converted_example: Converted) -> None:
    facts = planned(EXAMPLE, method=method, numa=1)
    if FORMATS[method].output:
        output = converted_example(method=method)
        after = planned(output, numa=0)
        assert facts["cpu"] == after["cpu"]
        assert facts["other_bytes"] == after["other_bytes"]
    model = open_model(ModelSource(EXAMPLE))
    each = FORMATS[method].expert_bytes(model.layers[0].hidden, model.layers[0].intermediate)
    assert facts["cpu"]["bytes_per_node"] == [each * model.count]


def test_an_output(packed: Path, model: Path, counts: Path) -> None:
    facts = planned(packed, numa=0, ep=2, hot="4", load=counts)
    source = planned(model, numa=2, method="int8", ep=2, hot="4", load=counts)
    assert facts["cpu"] == source["cpu"] and facts["cpu"]["numa"] == 2
    assert [one["places"] for one in facts["layers"]] == [one["places"] for one in source["layers"]]
    assert facts["warnings"] == [
        "sizes are those of experts for CPUs; GPUs load them in another format"
    ]
    each = FORMATS["int8"].expert_bytes(128, 128, 2)
    assert [rank["expert_bytes"] for rank in facts["ranks"]] == [2 * each, 2 * each]


def test_a_part_of_the_experts(model: Path, counts: Path, tmp_path: Path) -> None:
    """Of an output without its hot experts, the others are shared out."""
    hot = tmp_path / "hot.json"
    planned(model, hot="6", load=counts, write=hot)
    convert(model, tmp_path / "out", method="int8", exclude_experts=read_expert_set(hot))
    facts = planned(tmp_path / "out", numa=0, ep=2, load=counts, redundant=1)
    gone = {int(n): ids for n, ids in json.loads(hot.read_text())["experts"].items()}
    for layer in facts["layers"]:
        ids = sorted({one for rank in layer["places"] for one in rank})
        assert ids == [e for e in range(8) if e not in gone[layer["layer"]]]
        for expert, places in enumerate(layer["logical_to_physical"]):
            there = [layer["physical_to_logical"][one] for one in places if one >= 0]
            assert there == [expert] * layer["copies"][expert]


def test_groups_of_scales(tmp_path: Path) -> None:
    """A group that a cut would divide, and what is possible instead."""
    model, *_ = encoded_model(tmp_path, "int4 packed, group 32")
    (cut,) = planned(model, tp=4)["tp_slices"]
    assert cut["w2"]["scale"][3]["source"] == [[0, HIDDEN], [9, 12]]
    result = ktconv("plan", model, "--tp", 8, "--numa", 1)
    line = refused(result, 2, "--tp 8 cannot cut the experts of layer 0: each of 8 GPUs would have")
    assert f"48 of the intermediate size {INNER}, which is not divisible by the group" in line
    assert "possible for this model: 1, 2, 3, 4, 6, 12" in result.stderr


def test_the_way_out_of_too_many(model: Path) -> None:
    result = ktconv("plan", model, "--hot", "50%", "--gpu-memory", "500kB")
    refused(result, 2, "--hot 50% does not fit")
    assert "the largest number that fits is 4" in result.stderr
    assert planned(model, hot="4", gpu_memory=500_000)["gpu"]["experts"] == 4


def test_experts_that_were_never_used(model: Path, tmp_path: Path) -> None:
    """All that an output has, because the used ones run elsewhere."""
    counts = write_counts(tmp_path / "c.json", {n: [1, 1, 0, 0, 0, 0, 0, 0] for n in (0, 1)})
    hot = expert_set({0: [0, 1], 1: [0, 1]})
    convert(model, tmp_path / "out", method="int8", exclude_experts=hot)
    facts = planned(tmp_path / "out", load=counts, ep=2, hot="3")
    assert facts["gpu"]["load_share"] == 0 and facts["evenness"]["after"] == 1
    assert [layer["gpu_mask"][2:5] for layer in facts["layers"]] == [[True] * 3, [False] * 3]


def test_gguf(tmp_path: Path) -> None:
    facts = planned(gguf_files.model(tmp_path), ep=2, tp=2, method="bf16")
    assert [rank["experts"] for rank in facts["ranks"]] == [2, 2]


# ---- load ------------------------------------------------------------------------------


def test_mtp_layers_are_not_counted(ragged: Path, tmp_path: Path) -> None:
    path = write_counts(tmp_path / "c.json", {0: [1, 2, 3, 4], 1: [10] * 8})
    facts = planned(ragged, load=path)
    assert facts["layers"][2]["load"] == [7.5] * 4
    assert facts["warnings"] == [
        "layers 2 (MTP) were not counted: their experts are taken as equally used"
    ]


@pytest.mark.parametrize(("counts", "about", "words"), [
    ({0: [1] * 8, 1: [1] * 8}, {"model_type": "mixtral"}, "of a model of type mixtral, not qwen3"),
    ({0: [1] * 8}, {}, "has no counts of layers 1"),
    ({0: [1] * 8, 2: [1] * 8}, {}, "layer 2, which is not an MoE layer"),
    ({0: [1] * 8, 1: [1] * 4}, {}, "has counts of 4 experts of layer 1, but it has 8"),
])  # fmt: skip
def test_counts_of_something_else(
    model: Path, tmp_path: Path, counts: Any, about: Any, words: str
) -> None:
    path = write_counts(tmp_path / "c.json", counts, **about)
    refused(ktconv("plan", model, "--load", path), 2, words)


def test_files_that_are_no_counts(model: Path, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    (tmp_path / "y.json").write_text("[")
    (tmp_path / "z.safetensors").write_bytes(b"1")
    refused(ktconv("plan", model, "--load", tmp_path / "none.json"), 2, "is not a file")
    refused(ktconv("plan", model, "--load", tmp_path / "x.json"), 2, "not a complete report")
    refused(ktconv("plan", model, "--load", tmp_path / "y.json"), 2, "y.json")
    refused(ktconv("plan", model, "--load", tmp_path / "z.safetensors"), 2, "is not a trace")


# ---- the command -----------------------------------------------------------------------


def test_lines_for_people(model: Path, counts: Path) -> None:
    text = ktconv_done(
        "plan", model, "--ep", 2, "--tp", 2, "--hot", "25%", "--load", counts, "--numa", 1
    )
    assert "layers 0-1 of 8 experts, 16 in all; other tensors 16.4 kB" in text
    assert "10 tokens" not in text and "of prose.txt" in text
    assert "4 GPUs, experts shared out linear over 2, each expert cut into 2" in text
    assert "0-1" in text and "2-3" in text
    assert "GPU: 4 of 16 experts, which take 84.2 % of the load" in text
    assert "CPU: int4 in 1 NUMA part, all experts:" in text
    assert "balance (mean / largest load of ranks)" in text


def test_json_is_the_document(model: Path) -> None:
    facts = json.loads(ktconv_done("plan", model, "--ep", 2, "--json", "--numa", 1))
    assert facts == planned(model, ep=2)


def test_ranks_without_experts(model: Path) -> None:
    text = ktconv_done("plan", model, "--ep", 10)
    assert "warning: 2 of 10 ranks hold no expert" in text
    assert "warning: --ep 10: 8 experts give GPUs 0-1 each" in text


def test_a_format_that_cannot_have_the_sizes_is_a_warning(tmp_path: Path) -> None:
    from plan.models import write_model

    model = write_model(tmp_path, (4,), (96,))
    facts = planned(model, numa=0)
    assert facts["cpu"] is None
    assert "no INT4 experts for CPUs: layer 0 cannot be packed" in facts["warnings"][0]
    refused(ktconv("plan", model, "--method", "int4"), 2, "layer 0 cannot be packed")
    text = ktconv("plan", model, "--method", "int4", "--numa", 1).stderr
    assert "possible with --method bf16" in text


@pytest.mark.parametrize(("words", "phrase"), [
    (["--tp", 3], "--tp 3 cannot cut the experts of layer 0: intermediate size 128 is not"),
    (["--ep", 3, "--placement", "balanced"], "8 experts of layer 0 and 0 copies cannot be shared"),
    (["--ep", 4, "--redundant", 3], "8 experts of layer 0 and 3 copies cannot be"),
    (["--ep", 4, "--nodes", 3], "--ep 4 cannot be shared out evenly by --nodes 3"),
    (["--placement", "linear", "--redundant", 2], "--redundant is for --placement balanced"),
    (["--placement", "round_robin", "--nodes", 2], "--nodes is for --placement balanced"),
    (["--placement", "balanced", "--hot", 3], "--placement balanced places all experts"),
    (["--hot", "many"], "--hot 'many' is neither"),
    (["--hot", 17], "--hot 17 is more than the 16 experts of all layers"),
    (["--hot", 9, "--per-layer"], "--hot 9 is more than the 8 experts of a layer"),
    (["--hot", 0], "--hot 0 is no expert at all"),
    (["--hot", "1%"], "--hot 1% is no expert at all"),
    (["--hot", "50%", "--gpu-memory", "500kB"], "--hot 50% does not fit: a GPU would hold 802"),
    (["--gpu-memory", "10kB"], "tensors that are not experts take 16.4 kB, more than"),
    (["--gpu-memory", "100kB", "--ep", 2, "--redundant", 2], "a GPU would hold 999.4 kB"),
    (["--gpu-memory", "17kB", "--write", "x.json"], "no expert fits on the GPUs"),
    (["--gpu-memory", "much"], "--gpu-memory 'much' is not a size"),
    (["--per-layer"], "--per-layer needs a choice of experts"),
    (["--write", "x.json"], "--write needs a choice of experts"),
    (["--hot", 3, "--write", "no/x.json"], "--write no/x.json cannot be written"),
    (["--method", "int3"], "unknown method 'int3'"),
    (["--numa", 3], "intermediate size 128 does not divide into 3 parts"),
    (["--plot", "x.txt"], "--plot x.txt is not a picture file"),
    (["--map", "x.toml"], "x.toml"),
    (["--tower", "left"], "left"),
])  # fmt: skip
def test_what_is_impossible(
    model: Path, words: list[Any], phrase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(ktconv("plan", model, *words), 2, phrase)
    refused_in_json(ktconv("plan", model, *words, "--json"), 2, phrase)
    assert not list(tmp_path.glob("*"))


def test_only_regular_files_are_replaced(model: Path, tmp_path: Path) -> None:
    """A new file takes the place of the old one, which a device must not lose."""
    pytest.importorskip("matplotlib")
    place = tmp_path / "pipe.png"
    os.mkfifo(place)
    for words in (["--hot", 3, "--write", place], ["--plot", place]):
        refused(ktconv("plan", model, *words), 2, "is not a regular file")
    assert place.is_fifo()


@pytest.mark.parametrize(("words", "phrase"), [
    (["--tp", 2], "--tp is for experts on GPUs"),
    (["--gpu-memory", "1GB"], "--gpu-memory is for experts on GPUs"),
    (["--numa", 1], "has int8 experts in 2 NUMA parts"),
    (["--method", "int4"], "has int8 experts in 2 NUMA parts"),
    (["--tower", "left"], "--tower is for checkpoints"),
])  # fmt: skip
def test_what_is_impossible_for_an_output(packed: Path, words: list[Any], phrase: str) -> None:
    refused(ktconv("plan", packed, *words), 2, phrase)


def test_paths_without_experts(tmp_path: Path) -> None:
    refused(ktconv("plan", tmp_path / "none"), 2, "none")
    refused(ktconv("plan", tmp_path), 2, str(tmp_path))


def test_incomplete_outputs(packed: Path, tmp_path: Path) -> None:
    for path in packed.iterdir():
        if path.name != "model-00002-of-00002.safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    shards = sorted(tmp_path.glob("*.safetensors"))
    data = bytearray(shards[0].read_bytes())
    at = data.index(b"exps.3.numa.1.weight")
    data[at : at + 6] = b"exps.9"
    shards[0].write_bytes(data)
    refused(ktconv("plan", tmp_path), 2, "lacks blk.")
    (tmp_path / ".ktconv").mkdir()
    (tmp_path / ".ktconv/run.json").write_text("{}")
    refused(ktconv("plan", tmp_path), 2, "is a conversion that is not finished")


def test_same_request_same_plan(model: Path, counts: Path) -> None:
    request = PlanRequest(str(model), ep=4, redundant=4, load=counts, numa=1)
    assert run(request) == run(request)
    assert make_plan(request).request is request


def test_names_of_placements_are_those_of_the_library() -> None:
    from typing import get_args

    from ktconv.cli.plan import PlacementName as OfCommand
    from ktconv.plan.placement.parallel import PLACEMENTS
    from ktconv.plan.request import PlacementName

    assert get_args(OfCommand) == get_args(PlacementName) == (*PLACEMENTS, "balanced")
