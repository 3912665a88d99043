"""A worker of a ring's stage is joined to a session that the stage keeps waiting."""

from __future__ import annotations

from contextlib import asynccontextmanager

import uplink_parts
from relay_parts import WALLET, RawClient, Table, expert_target, frame, ring_target, until

from kvasir_console.relay.authority import Admission
from kvasir_console.relay.closing import CloseCode
from kvasir_console.relay.wire.preamble import SIZE, Kind, Preamble

STAR = "ring-a/experts/1"
BINARY = 2


@asynccontextmanager
async def relay(**options):
    table = Table()
    for slot in range(3):
        key = f"{STAR}/{slot}"
        table.admissions[f"ring-a/experts-{slot}/P"] = Admission(key, WALLET, star=STAR)
    for name in ("one", "two"):
        told = Preamble(Kind.DISPATCH, name, WALLET, layer=2, begin=0, end=4)
        table.admissions[name] = Admission(name, WALLET, preamble=told, star=STAR)
    async with uplink_parts.relay(table, **options) as parts:
        yield parts


def waits(port, slot):
    return RawClient.open(port, ring_target("ring-a", f"experts-{slot}", "P"))


def worker(port, name):
    return RawClient.open(port, expert_target(name))


async def told(stage):
    return Preamble.decode(await stage.receive_data(SIZE))


async def test_the_stage_is_told_who_came_and_then_bytes_flow_both_ways():
    async with relay() as (_, port), waits(port, 0) as stage, worker(port, "one") as one:
        assert (await told(stage)).session == "one"
        await stage.send(frame(BINARY, b"request"))
        assert await one.receive_data(7) == b"request"
        await one.send(frame(BINARY, b"answer"))
        assert await stage.receive_data(6) == b"answer"


async def test_what_passes_between_a_stage_and_a_worker_is_counted_for_the_two_over_all_their_connections():
    async with relay() as (hub, port):
        assert hub.joint(STAR, WALLET, WALLET, "one") is None
        for turn in (1, 2):
            async with waits(port, 0) as stage, worker(port, "one") as one:
                await told(stage)  # the hub's own words are in no count
                await stage.send(frame(BINARY, b"request"))
                await one.receive_data(7)
                await one.send(frame(BINARY, b"answer"))
                await stage.receive_data(6)
                joint = hub.joint(STAR, WALLET, WALLET, "one")
                assert joint is not None
                await until(lambda joint=joint, turn=turn: (joint.down, joint.up) == (7 * turn, 6 * turn))
            await until(lambda: not any(count.connected for count in hub.sessions()))
        async with waits(port, 0) as stage, worker(port, "two"):
            await told(stage)
        assert [(each.session, each.down, each.up) for each in hub.joints()] == [("one", 14, 12), ("two", 0, 0)]


async def test_a_worker_that_comes_first_waits_for_the_stage():
    async with relay() as (hub, port), worker(port, "one") as one:
        await one.send(frame(BINARY, b"hello"))
        await until(lambda: any(count.key == "one" for count in hub.sessions()))
        async with waits(port, 0) as stage:
            assert (await told(stage)).session == "one"
            assert await stage.receive_data(5) == b"hello"


async def test_workers_get_a_session_each():
    async with (
        relay() as (_, port),
        waits(port, 0) as stage,
        waits(port, 1) as other,
        worker(port, "one") as one,
        worker(port, "two") as two,
    ):
        names = [(await told(stage)).session, (await told(other)).session]
        assert sorted(names) == ["one", "two"]
        for session, name in zip((stage, other), names, strict=True):
            await session.send(frame(BINARY, name.encode()))
        assert await one.receive_data(3) == b"one"
        assert await two.receive_data(3) == b"two"


async def test_without_a_stage_the_worker_is_told_1011():
    async with relay(engine_timeout_s=0.1) as (_, port), worker(port, "one") as one:
        code, reason = await one.receive_close()
        assert (code, reason) == (CloseCode.UPSTREAM, "the stage of this window is not connected")


async def test_whoever_leaves_the_other_is_told_to_dial_again():
    async with relay() as (_, port), waits(port, 0) as stage:
        async with worker(port, "one"):
            await told(stage)
        assert (await stage.receive_close())[0] == CloseCode.GOING_AWAY
    async with relay() as (_, port), worker(port, "one") as one:
        async with waits(port, 0) as stage:
            await told(stage)
        assert (await one.receive_close())[0] == CloseCode.GOING_AWAY
