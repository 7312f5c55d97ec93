"""Weights from a folder: layouts that are published, and every way in which files can be wrong."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from hpc_qwen35.checkpoint import read_header
from hpc_qwen35.config import parse_config
from hpc_qwen35.errors import CheckpointError
from hpc_qwen35.loading import Loaded, load_weights
from hpc_qwen35.tensors import named_tensors
from hpc_qwen35.weights import Qwen35Weights, fuse_tensors
from tests.qwen35.models import CPU, DENSE, MOE, config_of, random_tensors

Tensors = dict[str, torch.Tensor]


def load(folder: Path, raw: dict[str, Any] = DENSE, dtype: torch.dtype = torch.float32) -> Loaded:
    return load_weights(folder, parse_config(raw), CPU, dtype)


def same(a: Qwen35Weights, b: Qwen35Weights) -> bool:
    left, right = (named_tensors("weights", weights) for weights in (a, b))
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def fused(raw: dict[str, Any]) -> Qwen35Weights:
    config = parse_config(raw)
    return fuse_tensors(config, random_tensors(config), CPU, torch.float32)


def renamed(tensors: Tensors, prefix: str) -> Tensors:
    return {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}


def per_expert(tensors: Tensors) -> Tensors:
    """Stacked experts taken apart, as some files hold them."""
    apart: Tensors = {}
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        if not stem.endswith(".experts"):
            apart[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            halves = matrix.chunk(2) if kind == "gate_up_proj" else (matrix,)
            names = ("gate", "up") if kind == "gate_up_proj" else ("down",)
            for half, part in zip(names, halves, strict=True):
                apart[f"{stem}.{expert}.{half}_proj.weight"] = part.contiguous()
    return apart


def write_shards(folder: Path, tensors: Tensors, files: int = 3) -> dict[str, str]:
    names = sorted(tensors)
    weight_map = {}
    for number in range(files):
        file_name = f"model-{number + 1:05}-of-{files:05}.safetensors"
        part = names[number::files]
        save_file({name: tensors[name] for name in part}, folder / file_name)
        weight_map.update(dict.fromkeys(part, file_name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", ""])
@pytest.mark.parametrize(
    "raw", [DENSE, MOE, {**DENSE, "tie_word_embeddings": True}], ids=["dense", "moe", "tied"]
)
def test_published_names(tmp_path: Path, raw: dict[str, Any], prefix: str) -> None:
    """One file, with any prefix that is in use, gives the weights of the tensors in memory."""
    save_file(renamed(random_tensors(parse_config(raw)), prefix), tmp_path / "model.safetensors")
    assert same(load(tmp_path, raw).weights, fused(raw))


def test_shards(tmp_path: Path) -> None:
    """Shards named by an index give the same weights."""
    write_shards(tmp_path, random_tensors(config_of(DENSE)))
    assert same(load(tmp_path).weights, fused(DENSE))


def test_experts_one_by_one(tmp_path: Path) -> None:
    """Experts stored apart are stacked, gate rows before up rows."""
    save_file(per_expert(random_tensors(config_of(MOE))), tmp_path / "model.safetensors")
    assert same(load(tmp_path, MOE).weights, fused(MOE))


def test_bf16_files_widen(tmp_path: Path) -> None:
    """BF16 files give FP32 weights of the rounded values, and norms add 1 in FP32."""
    rounded = {name: tensor.bfloat16() for name, tensor in random_tensors(config_of(DENSE)).items()}
    save_file(rounded, tmp_path / "model.safetensors")
    expected = fuse_tensors(config_of(DENSE), rounded, CPU, torch.float32)
    weights = load(tmp_path).weights
    assert same(weights, expected)
    assert weights.norm.dtype == load(tmp_path, dtype=torch.bfloat16).weights.norm.dtype == torch.float32


def test_hub_cache_links(tmp_path: Path) -> None:
    """A hub snapshot, whose files are links into its blobs, loads like a plain folder."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    save_file(random_tensors(config_of(DENSE)), blobs / "0123")
    (snapshot / "model.safetensors").symlink_to(Path("../../blobs/0123"))
    assert same(load(snapshot).weights, fused(DENSE))


def test_other_parts_are_counted(tmp_path: Path) -> None:
    """MTP, vision and a stored head next to tied embeddings are left alone, and counted by reason."""
    raw = {**DENSE, "tie_word_embeddings": True}
    tensors = random_tensors(parse_config(raw))
    extra = torch.zeros(2, 2)
    names = ("mtp.fc.weight", "mtp.norm.weight", "model.visual.merger.weight", "lm_head.weight")
    save_file({**tensors, **{name: extra.clone() for name in names}}, tmp_path / "model.safetensors")
    loaded = load(tmp_path, raw)
    assert same(loaded.weights, fused(raw))
    assert loaded.ignored == {"mtp": 2, "visual": 1, "tied lm_head": 1}


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    """Progress rises tensor by tensor to the bytes of all tensors that are read."""
    tensors = random_tensors(config_of(DENSE))
    save_file({**tensors, "mtp.fc.weight": torch.zeros(9)}, tmp_path / "model.safetensors")
    told: list[tuple[int, int]] = []
    load_weights(
        tmp_path, config_of(DENSE), CPU, torch.float32, lambda done, total: told.append((done, total))
    )
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert len(told) == len(tensors)
    assert told[-1] == (total, total)


def test_weights_outlive_the_file(tmp_path: Path) -> None:
    """Weights are copies: none of them shares the mapped file's storage."""
    path = tmp_path / "model.safetensors"
    save_file(random_tensors(config_of(DENSE)), path)
    weights = load(tmp_path).weights
    sizes = {tensor.untyped_storage().nbytes() for tensor in named_tensors("weights", weights).values()}
    assert max(sizes) < path.stat().st_size // 4


Change = Callable[[Tensors], object]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda t: t.pop("model.layers.2.mlp.up_proj.weight"),
            "missing tensor 'layers.2.mlp.up_proj.weight'",
        ),
        (lambda t: t.pop("lm_head.weight"), "missing tensor 'lm_head.weight'"),
        (lambda t: [t.pop(n) for n in list(t) if ".mlp." in n], "missing 12 tensors: .*, \\.\\.\\."),
        (lambda t: t.pop("model.embed_tokens.weight"), "no checkpoint of a supported model"),
        (lambda t: t.update({"model.layers.9.mlp.up_proj.weight": torch.zeros(1)}), "unexpected .*layers.9"),
        (lambda t: t.update({"model.extra": torch.zeros(1)}), "unexpected tensor 'model.extra'"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(47)}),
            r"'model.norm.weight' is \[47\]: Qwen3_5ForCausalLM .* needs \[48\]",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(48, dtype=torch.int8)}),
            "norm.weight' is I8: only",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.up_proj.weight_scale_inv": torch.zeros(1)}),
            "up_proj.weight_scale_inv'.* is quantised",
        ),
    ],
)
def test_wrong_tensors_are_named(tmp_path: Path, change: Change, text: str) -> None:
    """Missing, unexpected, mis-shaped and quantised tensors are named with what the config needs."""
    tensors = random_tensors(config_of(DENSE))
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=text):
        load(tmp_path)


def test_missing_expert_is_named(tmp_path: Path) -> None:
    """One expert too few, or one too many, is named."""
    tensors = per_expert(random_tensors(config_of(MOE)))
    spare = tensors.pop("model.layers.1.mlp.experts.7.up_proj.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing tensor 'layers.1.mlp.experts.7.up_proj.weight'"):
        load(tmp_path, MOE)
    tensors["model.layers.1.mlp.experts.7.up_proj.weight"] = spare
    tensors["model.layers.1.mlp.experts.8.up_proj.weight"] = spare.clone()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"unexpected tensor 'model.layers.1.mlp.experts.8.up_proj.weight'"
    ):
        load(tmp_path, MOE)


def test_folder_without_weights(tmp_path: Path) -> None:
    """No weights, only pickles, or no folder at all: the text says which, and a pickle is not opened."""
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickle, .* never opened"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match="is not a folder"):
        load(tmp_path / "nothing")


@pytest.mark.parametrize(
    "target", ["../outside.safetensors", "/outside.safetensors", "a/b.safetensors", "", ".."]
)
def test_index_names_must_be_plain(tmp_path: Path, target: str) -> None:
    """An index cannot name a file outside the folder."""
    index = {"weight_map": {"model.norm.weight": target}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"not a plain file name|not a safetensors file"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("index", "text"),
    [
        ("{", "is not JSON"),
        ("[]", "is a JSON list"),
        ("{}", "weight_map is NoneType"),
        ('{"weight_map": {"a": 3}}', "puts 'a' into 3"),
        ('{"weight_map": {"a": "x.bin"}}', "'x.bin' is not a safetensors file"),
        ('{"weight_map": {"a": "x.safetensors"}}', "names 'x.safetensors', which is missing"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "a name occurs twice"),
        (f'{{"weight_map": {{"a": "{"x" * 5000}.safetensors"}}}}', "cannot be opened"),
    ],
)
def test_broken_index(tmp_path: Path, index: str, text: str) -> None:
    """An index that is no index is named with what is wrong."""
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=text):
        load(tmp_path)


def test_index_against_its_shards(tmp_path: Path) -> None:
    """A tensor that its shard does not hold is named with both files."""
    weight_map = write_shards(tmp_path, random_tensors(config_of(DENSE)))
    names = sorted(weight_map)
    weight_map[names[0]] = weight_map[names[1]]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=f"puts tensor '{names[0]}' into .* none of that name"):
        load(tmp_path)


def test_links_out_of_the_folder(tmp_path: Path) -> None:
    """A weight file that leads elsewhere, nowhere, to a folder or to itself is refused."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(random_tensors(config_of(DENSE)), tmp_path / "other.safetensors")
    link = folder / "model.safetensors"
    for target, text in (
        (tmp_path / "other.safetensors", "outside the model folder"),
        (folder / "nothing", "does not exist"),
        (folder, "not a regular file"),
        (link, "cannot be opened"),
    ):
        link.symlink_to(target)
        with pytest.raises(CheckpointError, match=text):
            load(folder)
        link.unlink()


def container(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "has 0 bytes"),
        (b"\x01\x00", "has 2 bytes"),
        (container({}, length=1 << 60), "says its header has"),
        (container({}, length=3), "says its header has 3"),
        (container(b"{"), "is not JSON"),
        (container(b"[]"), "is a JSON list"),
        (container(b'{"a": 1, "a": 2}'), "a name occurs twice"),
        (container(b"[" * 50_000), "is not JSON"),
        (container({"a": 3}), "'a' is described by 3"),
        (container({"a": entry(dtype="F4")}, bytes(8)), "'a' has dtype 'F4'"),
        (container({"a": entry(dtype=[])}, bytes(8)), r"'a' has dtype \[\]"),
        (container({"a": entry(shape=[-2])}, bytes(8)), r"'a' has shape \[-2\]"),
        (container({"a": entry(shape=[True])}, bytes(8)), r"'a' has shape \[True\]"),
        (container({"a": entry(shape=[1 << 50])}, bytes(8)), "'a' has shape"),
        (
            container({"a": entry(offsets=[0, 16])}, bytes(8)),
            "data_offsets .0, 16.: must lie within .* 8 bytes",
        ),
        (container({"a": entry(offsets=[8, 0])}, bytes(8)), "data_offsets"),
        (container({"a": entry(offsets=[-8, 0])}, bytes(8)), "data_offsets"),
        (container({"a": entry(offsets=None)}, bytes(8)), "data_offsets None"),
        (container({"a": entry(shape=[3])}, bytes(8)), "takes 12 bytes: data_offsets give it 8"),
        (container({"a": entry()}, bytes(12)), "tensors take 8 bytes, the file holds 12"),
        (container({"a": entry(), "b": entry()}, bytes(8)), "'b' starts at byte 0, the one before ends at 8"),
        (container({"a": entry(), "b": entry(offsets=[12, 20])}, bytes(20)), "'b' starts at byte 12"),
    ],
)
def test_headers_that_lie(tmp_path: Path, content: bytes, text: str) -> None:
    """A header whose sizes do not fit the file or each other is refused, naming file and tensor."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=text) as caught:
        load(tmp_path)
    assert str(path) in str(caught.value)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_never_crash(tmp_path: Path, data: st.DataObject) -> None:
    """A file with changed or missing bytes loads as some weights, or is a CheckpointError; nothing else."""
    path = tmp_path / "model.safetensors"
    raw = {**DENSE, "num_hidden_layers": 1, "vocab_size": 8, "hidden_size": 4, "intermediate_size": 4}
    save_file(random_tensors(parse_config(raw)), path)
    content = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.sampled_from([len(content), header, 7, len(content) - 1]))])
    with contextlib.suppress(CheckpointError):
        assert load(tmp_path, raw).weights.embedding.shape == (8, 4)


def test_header_of_a_good_file(tmp_path: Path) -> None:
    """Names, dtypes, shapes and bytes are read as they were written, metadata left out."""
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(0, dtype=torch.bfloat16)}, path, metadata={"k": "v"})
    header = read_header(path)
    assert {name: (e.dtype, e.shape, e.nbytes) for name, e in header.items()} == {
        "a": ("F32", (2, 3), 24),
        "b": ("BF16", (0,), 0),
    }


def test_tensors_in_memory_are_checked() -> None:
    """A tensor of another shape is named before anything is fused."""
    tensors = random_tensors(config_of(DENSE))
    tensors["model.norm.weight"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"'model.norm.weight' is \[3\]: must be \[48\]"):
        fuse_tensors(config_of(DENSE), tensors, CPU, torch.float32)
