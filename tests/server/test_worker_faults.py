"""Programs that raise, fail a lane, or lose copies: who fails with them, and who goes on."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import pytest

from hpc_index.ids import LaneId
from hpc_index.records import Finish, Quote
from hpc_index.requests import Outcome, PrefillStep, Request, StepOut, Suspended
from hpc_server.events import Failed, FailureKind
from hpc_server.options import EngineOptions
from hpc_server.scripted import ScriptedOptions, ScriptedProgram
from hpc_server.scripted_transfers import Faults
from hpc_server.worker import ProgramError
from tests.server.driving import (
    REPLIES,
    VOCAB,
    Driver,
    driver,
    expected,
    failure,
    prompt,
    request,
)
from tests.server.served import geometry, small


class Faulty(ScriptedProgram):
    """Raises where told to: method name to the number of calls that still go well."""

    def __init__(self, fails: dict[str, int], options: ScriptedOptions | None = None) -> None:
        super().__init__(REPLIES, vocab_size=VOCAB, options=options or small())
        self._fails = fails

    def _maybe(self, name: str) -> None:
        if name in self._fails:
            self._fails[name] -= 1
            if self._fails[name] < 0:
                raise RuntimeError(f"{name} failed")

    def quote(self, r: Request, now: float) -> Quote:
        self._maybe("quote")
        return super().quote(r, now)

    def prefill(self, lane: LaneId, budget: int, now: float) -> PrefillStep:
        self._maybe("prefill")
        return super().prefill(lane, budget, now)

    def decode(self, lanes: Sequence[LaneId], now: float) -> list[StepOut]:
        self._maybe("decode")
        return super().decode(lanes, now)

    def finish(self, lane: LaneId, how: Finish, now: float) -> Suspended | None:
        self._maybe("finish")
        return super().finish(lane, how, now)


def test_a_failed_pass_fails_its_lanes_and_spares_the_rest() -> None:
    """A raising decode round ends the lanes in it; a request in prefill goes on."""
    run = Driver.over(Faulty({"decode": 2}))
    first = run.submit(request(prompt(20), 50))
    for _ in range(2):
        run.round()
    second = run.submit(request(prompt(300, seed=3), 1))
    run.run()
    assert failure(first) is FailureKind.PROGRAM
    assert second.ids == expected(prompt(300, seed=3), 1)


def test_a_failed_prefill_fails_one_request() -> None:
    """The lane is given back and leaves nothing behind."""
    run = Driver.over(Faulty({"prefill": 1}))
    stream = run.submit(request(prompt(200), 4))
    run.run()
    assert failure(stream) is FailureKind.PROGRAM


def test_a_raising_quote_fails_its_request_only() -> None:
    """What a program raises while it is asked is that request's error."""
    run = Driver.over(Faulty({"quote": 0}), EngineOptions(max_failures=99))
    stream = run.submit(request(prompt(20), 4))
    run.run()
    assert failure(stream) is FailureKind.PROGRAM


def test_a_lane_that_cannot_be_ended_is_beyond_repair() -> None:
    """If ending a failed lane raises too, the worker gives up."""
    run = Driver.over(Faulty({"decode": 0, "finish": 0}))
    run.submit(request(prompt(20), 4))
    with pytest.raises(ProgramError, match="ending a lane failed"):
        run.run()


def test_failing_round_after_round_is_given_up() -> None:
    """max_failures program faults in a row are the program's end, not each request's."""
    run = Driver.over(Faulty({"decode": 0}), EngineOptions(max_failures=3))
    for seed in range(3):
        run.submit(request(prompt(20, seed=seed), 4))
        if seed < 2:
            for _ in range(4):
                run.round()
    with pytest.raises(ProgramError, match="3 program calls failed in a row"):
        run.run()


class _Unsampled(ScriptedProgram):
    """Its choice of a token fails, in the prompt's last chunk or in a decode round."""

    def __init__(self, where: str) -> None:
        super().__init__(REPLIES, vocab_size=VOCAB, options=small())
        self._where = where
        self._nothing = StepOut(np.empty(0, np.int32), (), Outcome.FAILED)

    def prefill(self, lane: LaneId, budget: int, now: float) -> PrefillStep:
        step = super().prefill(lane, budget, now)
        failed = self._where == "prefill" and step.done
        return attrs.evolve(step, first=self._nothing) if failed else step

    def decode(self, lanes: Sequence[LaneId], now: float) -> list[StepOut]:
        steps = super().decode(lanes, now)
        return [self._nothing] * len(lanes) if self._where == "decode" else steps


@pytest.mark.parametrize("where", ["prefill", "decode"])
def test_a_token_that_cannot_be_chosen_fails_its_request(where: str) -> None:
    """Outcome.FAILED is that lane's error, whichever call reports it."""
    run = Driver.over(_Unsampled(where))
    stream = run.submit(request(prompt(40), 5))
    run.run()
    assert failure(stream) is FailureKind.PROGRAM


@pytest.mark.parametrize("fail_every", [1, 2, 3])
def test_failed_copies_never_change_a_reply(fail_every: int) -> None:
    """Lost writes cost reuse; lost restores fail their request; no reply is wrong."""
    options = small(
        geometry(pages=40, slots=6, slabs=200),
        faults=Faults(landing_delay_s=0.03, fail_every=fail_every),
    )
    run = driver(options)
    for turn in range(12):
        tokens = prompt(120, seed=turn % 4)
        stream = run.submit(request(tokens, 6))
        run.run()
        if isinstance(stream.last, Failed):
            assert stream.last.kind is FailureKind.PROGRAM
        else:
            assert stream.ids == expected(tokens, 6)
