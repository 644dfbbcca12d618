"""quantize-cpu --exclude-experts: what is left out, and all that must still hold without it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from helpers.convert import Converted, all_files, assert_same, read_json, read_model
from helpers.paths import EXAMPLE
from safetensors.numpy import save_file

from ktconv.cli.app import app
from ktconv.errors import CheckpointError, KtconvError, OutputError, UsageError
from ktconv.formats import parse_tensor_name
from ktconv.inspect.inspection import inspect_path
from ktconv.merge import Request as MergeRequest
from ktconv.merge import merge
from ktconv.quantize.packed.run import Request, quantize_cpu
from ktconv.repack import reshard
from ktconv.runtime.layers.load import open_experts
from ktconv.targets.expert_sets import expert_set, set_of_record, write_expert_set
from ktconv.targets.packed.target import Options
from ktconv.verify import VerifyRequest
from ktconv.verify.run import verify

pytestmark = pytest.mark.slow

CHOSEN = expert_set({0: [0, 3, 7], 1: [5]})  # of 8; the first and the last too
EXPERTS = {(layer, expert) for layer in range(2) for expert in range(8)}
KEPT = {(layer, expert) for layer, expert in EXPERTS if expert not in CHOSEN.of(layer)}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("set") / "hot.json"
    write_expert_set(CHOSEN, path)
    return path


def only_left(file: Path | None) -> dict[str, Any]:
    """The fields of a request for a conversion without the experts of `file`."""
    return {"exclude_experts": file, "allow_partial": file is not None}


def partial(output: Path, file: Path) -> list[object]:
    """The words of a command for the same."""
    return ["quantize-cpu", EXAMPLE, output, "--allow-partial", "--exclude-experts", file]


def left(output: Path, file: Path, **changes: Any) -> Path:
    """A conversion without the chosen experts."""
    options = Options(numa=changes.pop("numa", 2), layout=changes.pop("layout", "safetensors"))
    request = Request(str(EXAMPLE), output, options, threads=1, **only_left(file), **changes)
    assert quantize_cpu(request).complete
    return output


@pytest.fixture(scope="module")
def output(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return left(tmp_path_factory.mktemp("left") / "out", file)


@pytest.fixture(scope="session")
def whole(converted_example: Converted) -> Path:
    return converted_example(numa=2)


def run(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def passed(output: Path, level: str = "weights", source: Path | None = EXAMPLE) -> bool:
    request = VerifyRequest(output, str(source) if source else None, level, threads=1, tokens=4)
    return verify(request).passed


# ---- what is written -------------------------------------------------------------------


def test_the_others_are_as_in_a_whole_conversion(output: Path, whole: Path) -> None:
    """Names, ids and bytes; nothing else is missing, and the index knows it."""
    expected = {
        name: tensor
        for name, tensor in read_model(whole).items()
        if (key := parse_tensor_name(name)) is None or (key.layer, key.expert) in KEPT
    }
    found = read_model(output)
    assert_same(found, expected)
    weight_map = read_json(output / "model.safetensors.index.json")["weight_map"]
    assert weight_map.keys() == expected.keys()


def test_the_manifest_says_so(output: Path, whole: Path) -> None:
    manifest = read_json(output / "ktconv.json")
    assert manifest["options"]["exclude_experts"] == CHOSEN.as_record()
    assert manifest["geometry"]["layers"]["0"]["experts"] == 8
    assert "exclude_experts" not in read_json(whole / "ktconv.json")["options"]
    card = (output / "README.md").read_text()
    assert "--exclude-experts FILE" in card
    assert "Experts per layer: 5, 7; 4 experts are left out" in card
    assert "left out" not in (whole / "README.md").read_text()


def test_refused_without_a_word_for_it(file: Path, tmp_path: Path) -> None:
    """KTransformers crashes on such an output: nobody converts for an hour to find that out."""
    words = ["quantize-cpu", EXAMPLE, tmp_path / "out", "--exclude-experts", file]
    for more in ([], ["--dry-run"]):
        done = run(*words, *more)
        assert done.exit_code == 2 and done.stdout == ""
        said = " ".join(done.stderr.split())
        assert "KTransformers cannot load an output without all experts" in said
        assert "convert without --exclude-experts" in said and "--allow-partial" in said
    assert list(tmp_path.iterdir()) == []


def test_who_loads_it(file: Path, output: Path, whole: Path, tmp_path: Path) -> None:
    """KTransformers cannot: the plan says so before anything is written, and the card."""
    said = "KTransformers cannot load an output without all experts"
    words = [*partial(tmp_path / "out", file)]
    facts = json.loads(run(*words, "--dry-run", "--json").stdout)
    assert any(said in note for note in facts["notes"])
    done = run(*words, "--numa", 2)
    assert said in " ".join(done.stderr.split())
    assert "sglang-kt" not in done.stdout
    card = (output / "README.md").read_text()
    assert said in card and "library_name: ktconv\n" in card and "--kt-method" not in card
    flags = "--kt-method AMXINT4 --kt-threadpool-count 2 --kt-weight-path OUTPUT"
    card = (whole / "README.md").read_text()
    assert said not in card and "library_name: ktransformers\n" in card and flags in card
    done = run("quantize-cpu", EXAMPLE, tmp_path / "all", "--numa", 1, "--method", "int8")
    flags = "--kt-method AMXINT8 --kt-threadpool-count 1 --kt-weight-path"
    assert flags in " ".join(done.stdout.split())


def test_inspect_counts_excluded_experts(output: Path) -> None:
    facts = inspect_path(str(output))
    assert (facts["complete"], facts["missing_tensors"]) == (True, 0)
    assert (facts["experts"], facts["experts_left_out"]) == ([8], 4)


def test_dry_run_says_so(file: Path, tmp_path: Path) -> None:
    words = [*partial(tmp_path / "out", file), "--dry-run"]
    facts = json.loads(run(*words, "--json").stdout)
    assert facts["experts_left_out"] == 4
    assert facts["skipped"] == ["4 experts of 2 layers: --exclude-experts"]
    assert "4 experts of 2 layers: --exclude-experts" in run(*words).stdout
    assert list(tmp_path.iterdir()) == []


def test_sizes_are_exact(file: Path, tmp_path: Path) -> None:
    """Of a dry run, with shards too small for a layer."""
    words = [*partial(tmp_path / "out", file), "--numa", "1"]
    words += ["--max-shard-size", "200kB", "--json"]
    plan = json.loads(run(*words, "--dry-run").stdout)
    assert run(*words).exit_code == 0
    shards = list((tmp_path / "out").glob("*.safetensors"))
    assert plan["output_bytes"] == sum(path.stat().st_size for path in shards)
    assert passed(tmp_path / "out")


# ---- going on --------------------------------------------------------------------------


def test_a_run_goes_on_with_the_same_set_only(file: Path, tmp_path: Path) -> None:
    """Spaces and order in the file do not matter, and the result is the same byte for byte."""
    first = tmp_path / "out"
    request = Request(
        str(EXAMPLE), first, Options(numa=2), layers=[1], threads=1, **only_left(file)
    )
    assert not quantize_cpu(request).complete
    other = tmp_path / "other.json"
    write_expert_set(expert_set({0: [0, 3], 1: [5]}), other)
    for wrong in (other, None):
        again = Request(str(EXAMPLE), first, Options(numa=2), threads=1, **only_left(wrong))
        with pytest.raises(OutputError, match="was begun with other settings"):
            quantize_cpu(again)
    other.write_text('{"experts":{"1":[5],"0":[7,0,3]},"schema":1}')
    report = quantize_cpu(
        Request(str(EXAMPLE), first, Options(numa=2), threads=1, **only_left(other))
    )
    assert report.converted == ["layer-00000"]
    assert report.kept == ["layer-00001", "other-00001"]
    assert_same(all_files(first), all_files(left(tmp_path / "clean", file)))


# ---- verify ----------------------------------------------------------------------------


def test_verify(output: Path) -> None:
    request = VerifyRequest(output, str(EXAMPLE), "layers", threads=1, tokens=4)
    result = verify(request)
    assert result.passed, result.failures
    assert result.facts["weights"]["matrices"] == 3 * len(KEPT)
    assert "level layers: tokens skip the experts that are not in this output" in " ".join(
        result.facts["notes"]
    )
    experts = result.facts["weights"]["layers"][0]["experts"]
    assert [expert for expert, error in enumerate(experts) if error is None] == [0, 3, 7]
    assert passed(output, "structure", None)


def rewritten(output: Path, copy: Path, change: Any) -> Path:
    """A copy of an output with other experts in its shards, though not in its manifest."""
    shutil.copytree(output, copy)
    for shard in copy.glob("*.safetensors"):
        tensors = read_model_of(shard)
        changed = change(dict(tensors))
        if changed.keys() != tensors.keys():
            save_file(changed, shard, {"format": "pt"})
    return copy


def read_model_of(shard: Path) -> dict[str, Any]:
    from safetensors.numpy import load_file

    try:
        return dict(load_file(shard))
    except (KeyError, TypeError):  # bf16: NumPy has none; such shards have no experts
        return {}


def test_a_missing_expert_is_still_missing(output: Path, tmp_path: Path) -> None:
    """One that was not excluded."""

    def drop(tensors: dict[str, Any]) -> dict[str, Any]:
        return {name: one for name, one in tensors.items() if not _is_expert(name, 1, 6)}

    copy = rewritten(output, tmp_path / "copy", drop)
    result = verify(VerifyRequest(copy, str(EXAMPLE), "structure", threads=1))
    missing = {(one.layer, one.expert) for one in result.failures if one.check == "missing tensor"}
    assert missing == {(1, 6)}
    facts = inspect_path(str(copy))
    assert (facts["complete"], facts["missing_tensors"]) == (False, 12)
    with pytest.raises(CheckpointError, match=r"does not contain blk\.1"):
        open_experts(copy, 1)


def test_an_excluded_expert_must_not_be_there(output: Path, tmp_path: Path) -> None:
    def add(tensors: dict[str, Any]) -> dict[str, Any]:
        twins = {
            name.replace("exps.4.", "exps.5."): one
            for name, one in tensors.items()
            if _is_expert(name, 1, 4)
        }
        return tensors | twins

    copy = rewritten(output, tmp_path / "copy", add)
    result = verify(VerifyRequest(copy, str(EXAMPLE), "structure", threads=1))
    found = {(one.layer, one.expert) for one in result.failures if one.check == "unexpected tensor"}
    assert found == {(1, 5)}


def _is_expert(name: str, layer: int, expert: int) -> bool:
    key = parse_tensor_name(name)
    return key is not None and (key.layer, key.expert) == (layer, expert)


def test_a_manifest_that_says_nonsense(output: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(output, copy)
    manifest = read_json(copy / "ktconv.json")
    for wrong in ({"layers": {"0": "0,3,7", "1": "5"}}, [1], {"sha256": "0", "layers": {"0": "x"}}):
        manifest["options"]["exclude_experts"] = wrong
        (copy / "ktconv.json").write_text(json.dumps(manifest))
        with pytest.raises(
            CheckpointError, match=r"ktconv\.json does not contain a valid set of experts"
        ):
            verify(VerifyRequest(copy, str(EXAMPLE), "structure", threads=1))


def test_one_expert_that_no_token_wants_is_computed_all_the_same(tmp_path: Path) -> None:
    chosen = {layer: [expert for expert in range(8) if expert != 2] for layer in (0, 1)}
    write_expert_set(expert_set(chosen), tmp_path / "set.json")
    output = left(tmp_path / "out", tmp_path / "set.json")
    result = verify(VerifyRequest(output, str(EXAMPLE), "layers", threads=1, tokens=1))
    assert result.passed, result.failures
    assert [row["experts_run"] for row in result.facts["layers"]["layers"]] == [1, 1]


# ---- merge, reshard, bench -------------------------------------------------------------


def test_merge_keeps_the_set(file: Path, output: Path, tmp_path: Path) -> None:
    folders = left(tmp_path / "folders", file, layout="layers")
    assert inspect_path(str(folders))["complete"]
    assert passed(folders)
    merge(MergeRequest(folders, tmp_path / "merged", source=str(EXAMPLE), threads=1))
    assert_same(read_model(tmp_path / "merged"), read_model(output))
    assert passed(tmp_path / "merged")
    merge(MergeRequest(folders, tmp_path / "alone", threads=1))
    assert passed(tmp_path / "alone", "structure", None)
    for path in (tmp_path / "merged", tmp_path / "alone"):
        options = read_json(path / "ktconv.json")["options"]
        assert options["exclude_experts"] == CHOSEN.as_record()
        assert "4 experts are left out" in (path / "README.md").read_text()
    next((folders / "_layer_0" / "_numa_0").glob("*_gate_6_*")).unlink()
    with pytest.raises(CheckpointError, match=r"of expert 6"):
        merge(MergeRequest(folders, tmp_path / "no", threads=1))


def test_reshard_keeps_the_set(file: Path, output: Path, tmp_path: Path) -> None:
    one = left(tmp_path / "one", file, numa=1)
    reshard.reshard(reshard.Request(one, tmp_path / "two", 2, threads=1))
    assert passed(tmp_path / "two")
    assert read_model(tmp_path / "two").keys() == read_model(output).keys()
    reshard.reshard(reshard.Request(one, tmp_path / "exact", 2, source=str(EXAMPLE), threads=1))
    assert_same(read_model(tmp_path / "exact"), read_model(output))


def test_bench_goes_to_experts_that_are_here(output: Path, tmp_path: Path) -> None:
    from ktconv.bench.cases import Request as BenchRequest
    from ktconv.bench.cases import prepare
    from ktconv.bench.measure import Effort
    from ktconv.bench.routing import parse_routing
    from ktconv.formats import FORMATS

    ids = np.array([[0, 1], [3, 7], [2, 5]], np.int64)
    save_file({"ids": ids}, tmp_path / "trace.safetensors")
    for text in ("balanced", "concentrated", "zipf:1.1", f"trace:{tmp_path}/trace.safetensors"):
        request = BenchRequest(
            methods=(FORMATS["int4"],), shapes=(), tokens=(3,), threads=(1,), isas=("scalar",),
            routing=parse_routing(text), model=output, layer=0, effort=Effort(iterations=1),
        )  # fmt: skip
        (layer,) = prepare(request).layers
        assert layer.shape.experts == 5
        rows = next(layer.routings(request, 3))
        if text.startswith("trace"):
            assert rows.tolist() == [[-1, 1], [-1, -1], [2, 5]]
        else:
            assert rows.shape == (3, 2)
            assert {*rows.ravel().tolist()} <= {1, 2, 4, 5, 6}


def test_bench_refuses_what_goes_nowhere(output: Path, tmp_path: Path) -> None:
    save_file({"ids": np.array([[0, 3], [7, 0]], np.int64)}, tmp_path / "trace.safetensors")
    words = ["bench", "--model", output, "--layer", 0, "--tokens", 1, "--iters", 1]
    done = run(*words, "--routing", f"trace:{tmp_path}/trace.safetensors")
    assert done.exit_code == 2
    assert "go to no expert" in done.stderr
    done = run(*words, "--top-k", 6)
    assert done.exit_code == 2
    assert "--top-k 6 is more than the 5 experts" in done.stderr


# ---- refusals --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ({2: [0]}, "names layer 2, which is not an MoE layer"),
        ({0: [8]}, "names expert 8 of layer 0, but it has 8"),
        ({1: list(range(8))}, "excludes all 8 of the experts of layer 1"),
    ],
)
def test_excluded_sets_that_do_not_fit(
    layers: dict[int, list[int]], said: str, tmp_path: Path
) -> None:
    write_expert_set(expert_set(layers), tmp_path / "set.json")
    done = run(
        "quantize-cpu",
        EXAMPLE,
        tmp_path / "out",
        "--allow-partial",
        "--exclude-experts",
        tmp_path / "set.json",
    )
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())
    assert not (tmp_path / "out").exists()


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--exclude-experts: .* is not a file"):
        left(tmp_path / "out", tmp_path / "absent.json")
    with pytest.raises(KtconvError, match="does not contain a valid set of experts"):
        set_of_record({"layers": {"0": "1"}}, "here")
