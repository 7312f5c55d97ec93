"""Bits: what a result may depend on, and what not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hpc_qwen35.model import Qwen35Model
from tests.qwen35.models import DENSE, MOE, PAGES, Run, build, config_of, random_tensors, random_tokens

BOTH = pytest.mark.parametrize("raw", [DENSE, MOE], ids=["dense", "moe"])


def small(raw: dict[str, Any], **options: Any) -> Qwen35Model:
    config = config_of(raw)
    return build(config, random_tensors(config), **options)


@BOTH
@pytest.mark.parametrize("kv", ["fp32", "bf16"])
def test_pages_and_slots_do_not_matter(raw: dict[str, Any], kv: str) -> None:
    """The same calls give the same bits in other pages and another slot."""
    model = small(raw, kv=kv)
    tokens = random_tokens(model.config, 230)
    one = Run(model, 0, torch.tensor([0, 1, 2, 3]))
    other = Run(model, 3, torch.tensor([22, 9, 17, 4]))
    results = [(run.prefill(tokens[:200], [70, 128]), run.decode(tokens, 200)) for run in (one, other)]
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert torch.equal(model.states.bytes[0], model.states.bytes[3])


@BOTH
@pytest.mark.parametrize("cut", [1, 64, 65, 127, 199])
def test_resumed_equals_not_resumed(raw: dict[str, Any], cut: int) -> None:
    """From copies of the image and of the pages, the tail page's columns only, a lane goes on bit for bit."""
    model = small(raw)
    tokens = random_tokens(model.config, 230)
    first = Run(model, 0, torch.tensor([0, 1, 2, 3]))
    first.prefill(tokens[:cut], [])
    model.states.bytes[4].copy_(model.states.bytes[0])
    second = Run(model, 4, torch.tensor([10, 20, 15, 5]))
    for block in range(-(-cut // 64)):
        model.kv.copy_columns(int(first.row[block]), int(second.row[block]), min(64, cut - 64 * block))
    straight = first.prefill(tokens[:210], [], base=cut), first.decode(tokens, 210)
    resumed = second.prefill(tokens[:210], [], base=cut), second.decode(tokens, 210)
    assert torch.equal(resumed[0], straight[0])
    assert torch.equal(resumed[1], straight[1])
    assert torch.equal(model.states.bytes[0], model.states.bytes[4])


@BOTH
def test_lanes_do_not_see_each_other(raw: dict[str, Any]) -> None:
    """In a batch of three, a lane's hidden state and image are the same bits whatever the other two hold."""
    model = small(raw)
    tokens = random_tokens(model.config, 100)
    rows = [torch.tensor([0, 1]), torch.tensor([2, 3]), torch.tensor([4, 5])]
    results = []
    for seed in (5, 6):
        model.states.bytes[:3].zero_()
        Run(model, 0, rows[0]).prefill(tokens[:80], [])
        for lane in (1, 2):
            Run(model, lane, rows[lane]).prefill(random_tokens(model.config, 40 * lane, seed * lane), [])
        hidden = model.decode([int(tokens[80]), seed, seed + 1], [80, 40, 80], [0, 1, 2], rows)
        results.append((hidden[0].clone(), model.states.bytes[0].clone(), hidden[1].clone()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert not torch.equal(results[0][2], results[1][2])


@BOTH
def test_nan_stays_in_its_lane(raw: dict[str, Any]) -> None:
    """A lane whose state is NaN decodes to NaN, the others of its batch do not."""
    model = small(raw)
    rows = [torch.tensor([0, 1]), torch.tensor([2, 3]), torch.tensor([4, 5])]
    for lane, row in enumerate(rows):
        Run(model, lane, row).prefill(random_tokens(model.config, 70, lane), [])
    model.states.views["recurrent", 0][1] = torch.nan
    hidden = model.decode([1, 2, 3], [70] * 3, [0, 1, 2], rows)
    assert hidden[1].isnan().all()
    assert hidden[[0, 2]].isfinite().all()


def test_batched_decode_is_close_to_single() -> None:
    """Four lanes at once and one at a time differ by rounding alone."""
    model = small(DENSE)
    rows = [torch.tensor([6 * lane + block for block in range(2)]) for lane in range(4)]
    alone = []
    for lane, row in enumerate(rows):
        Run(model, lane, row).prefill(random_tokens(model.config, 30 + 20 * lane, lane), [])
        saved = model.states.bytes[lane].clone()
        alone.append(model.decode([lane], [30 + 20 * lane], [lane], [row])[0].clone())
        model.states.bytes[lane].copy_(saved)
    together = model.decode([0, 1, 2, 3], [30, 50, 70, 90], [0, 1, 2, 3], rows)
    assert (together - torch.stack(alone)).abs().max() < 1e-5


def test_hidden_part_holds_the_last_token() -> None:
    """The image's continuation hidden is what prefill and decode return."""
    model = small(DENSE)
    row = torch.tensor([8, 9])
    hidden = model.prefill(random_tokens(model.config, 65), 0, 1, row)
    assert torch.equal(model.states.views["hidden", -1][1], hidden)
    hidden = model.decode([3], [65], [1], [row])
    assert torch.equal(model.states.views["hidden", -1][1], hidden[0])


def test_other_slots_and_pages_stay() -> None:
    """A lane writes its own slot and the pages of its own tokens, and nothing else."""
    model = small(DENSE)
    model.kv.bytes.fill_(7)
    before = model.states.bytes.clone()
    Run(model, 2, torch.tensor([11, 5, 13])).prefill(random_tokens(model.config, 100), [60])
    others = [slot for slot in range(model.states.slots) if slot != 2]
    assert torch.equal(model.states.bytes[others], before[others])
    untouched = [page for page in range(PAGES) if page not in (11, 5)]
    assert (model.kv.bytes[:, untouched] == 7).all()


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the storages that operators take in and that none of them made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.foreign: dict[int, torch.Tensor] = {}
        self._made: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in _tensors((args, kwargs or {})):
            key = tensor.untyped_storage().data_ptr()
            if key not in self._made:
                self.foreign[key] = tensor
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            key = tensor.untyped_storage().data_ptr()
            if key not in self.foreign:
                self._made[key] = tensor  # kept alive, so that no address is used twice
        return out


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value] if value.layout == torch.strided and value.numel() else []
    if isinstance(value, dict):
        value = tuple(value.values())
    return [t for item in value for t in _tensors(item)] if isinstance(value, tuple | list) else []


@BOTH
def test_forward_reads_only_what_is_listed(raw: dict[str, Any]) -> None:
    """A pass reads weights, constants, KV pages, images and the call's input, and no other buffer."""
    model = small(raw)
    tokens, row = random_tokens(model.config, 70), torch.tensor([3, 1])
    known = {tensor.untyped_storage().data_ptr() for tensor in model.tensors().values()}
    pools = {pool.bytes.untyped_storage().data_ptr() for pool in (model.kv, model.states)}
    inputs = {tokens.untyped_storage().data_ptr(), row.untyped_storage().data_ptr()}
    with _Reads() as reads:
        model.prefill(tokens, 0, 0, row)
        model.logits(model.decode(tokens[:2], [70, 3], [0, 1], [row, row]))
    assert known & reads.foreign.keys()
    assert pools <= reads.foreign.keys()
    unlisted = [reads.foreign[key] for key in reads.foreign.keys() - known - pools - inputs]
    # Positions and slots come as numbers and become tensors inside.
    assert sorted(tensor.tolist() for tensor in unlisted) == [[0, 1], [70, 3]]


def test_image_holds_all_that_is_carried_over() -> None:
    """Zeroing everything but image and KV between two calls, and every other slot, changes nothing."""
    model = small(DENSE)
    tokens = random_tokens(model.config, 120)
    run = Run(model, 0, torch.tensor([1, 2]))
    run.prefill(tokens[:100], [])
    saved, pages = model.states.bytes[0].clone(), model.kv.bytes[:, [1, 2]].clone()
    straight = run.prefill(tokens, [], base=100)
    fresh = small(DENSE)
    fresh.states.bytes[0].copy_(saved)
    fresh.kv.bytes[:, [1, 2]] = pages
    again = Run(fresh, 0, torch.tensor([1, 2])).prefill(tokens, [], base=100)
    assert torch.equal(again, straight)
