"""The node's own socket, over real Unix sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import sys
from pathlib import Path

import pytest

from kvasir_console.errors import (
    KvasirError,
    LedgerError,
    NetworkError,
    SystemResourceError,
    UsageError,
    WalletError,
)
from kvasir_console.node import phase
from kvasir_console.node.admin import AdminClient, AdminServer
from kvasir_console.node.phase import Phase
from kvasir_console.node.snapshot import NodeSnapshot
from kvasir_console.relay.wire import control

SNAPSHOT = NodeSnapshot(
    5.0, "0.1", 1, 2, "box", "server-x", "w", False, "https://h", phase.initial(1.0).to(Phase.SERVING, 2.0)
)


@pytest.fixture
def path(runtime: Path) -> Path:
    return runtime / "node.sock"


async def status(_: control.Message) -> dict:
    return {"snapshot": SNAPSHOT.to_json()}


async def echo(message: control.Message) -> dict:
    return {"said": message.get("word")}


async def claim(_: control.Message) -> dict:
    raise LedgerError("nothing_to_claim", "Nothing is pending.", "Work more.")


async def broken(_: control.Message) -> dict:
    raise ZeroDivisionError("a defect")


HANDLERS = {"status": status, "echo": echo, "claim": claim, "broken": broken}


async def test_a_snapshot_comes_back_whole(path):
    async with AdminServer(path, HANDLERS):
        client = AdminClient(path)
        assert await client.snapshot() == SNAPSHOT
        assert await client.snapshot() == SNAPSHOT  # on the same connection
        await client.close()


async def test_fields_are_passed_and_errors_keep_their_kind(path):
    async with AdminServer(path, HANDLERS):
        client = AdminClient(path)
        assert (await client.call("echo", word="hé"))["said"] == "hé"
        with pytest.raises(LedgerError) as refused:
            await client.call("claim")
        assert (refused.value.code, refused.value.hint) == ("nothing_to_claim", "Work more.")
        with pytest.raises(UsageError, match="fly"):
            await client.call("fly")
        assert (await client.call("echo", word=1))["said"] == 1
        await client.close()


async def test_a_defect_of_one_verb_is_told_and_does_not_end_the_connection(path, caplog):
    async with AdminServer(path, HANDLERS):
        client = AdminClient(path)
        with pytest.raises(KvasirError) as caught:
            await client.call("broken")
        assert caught.value.code == "internal"
        assert "a defect" not in str(caught.value)
        assert "ZeroDivisionError" in caplog.text
        assert (await client.call("echo", word=2))["said"] == 2
        await client.close()


async def test_many_clients_are_served_at_once(path):
    async with AdminServer(path, HANDLERS):
        clients = [AdminClient(path) for _ in range(10)]
        answers = await asyncio.gather(*(client.call("echo", word=n) for n, client in enumerate(clients)))
        assert [answer["said"] for answer in answers] == list(range(10))
        # One client asked by several tasks keeps question and answer together.
        answers = await asyncio.gather(*(clients[0].call("echo", word=n) for n in range(10)))
        assert [answer["said"] for answer in answers] == list(range(10))
        for client in clients:
            await client.close()


async def test_only_this_user_can_reach_it(path):
    async with AdminServer(path, HANDLERS):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_a_second_node_with_the_same_home_is_refused(path):
    async with AdminServer(path, HANDLERS):
        with pytest.raises(SystemResourceError) as caught:
            async with AdminServer(path, HANDLERS):
                pass
        assert caught.value.code == "node_already_runs"
        assert "KVASIR_HOME" in caught.value.hint
        client = AdminClient(path)
        assert await client.snapshot() == SNAPSHOT  # the first one is not disturbed
        await client.close()


async def test_a_second_node_is_refused_even_if_the_socket_file_is_gone(path):
    async with AdminServer(path, HANDLERS):
        path.unlink()
        with pytest.raises(SystemResourceError, match="already runs"):
            async with AdminServer(path, HANDLERS):
                pass


async def test_what_a_killed_node_left_is_replaced(path):
    script = (
        "import asyncio, sys\nfrom pathlib import Path\nfrom kvasir_console.node.admin import AdminServer\n"
        "async def main():\n"
        "    async with AdminServer(Path(sys.argv[1]), {}):\n"
        "        print('up', flush=True)\n        await asyncio.Event().wait()\n"
        "asyncio.run(main())"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, str(path), stdout=-1)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"up\n"
    with pytest.raises(SystemResourceError, match="already runs"):
        async with AdminServer(path, HANDLERS):
            pass
    process.kill()
    await process.wait()
    assert path.is_socket()
    async with AdminServer(path, HANDLERS):
        client = AdminClient(path)
        assert await client.snapshot() == SNAPSHOT
        await client.close()


async def test_the_socket_is_gone_after_the_node_and_clients_hear_it(path):
    async with AdminServer(path, HANDLERS):
        client = AdminClient(path)
        await client.snapshot()
    assert not path.exists()
    with pytest.raises(NetworkError) as caught:
        await client.call("status")
    assert caught.value.code == "no_node_there"
    assert "kvasir-console --headless" in caught.value.hint


async def test_a_client_finds_a_node_that_came_back(path):
    client = AdminClient(path)
    with pytest.raises(NetworkError):
        await client.snapshot()
    for _ in range(2):
        async with AdminServer(path, HANDLERS):
            assert await client.snapshot() == SNAPSHOT
        with pytest.raises(NetworkError):
            await client.snapshot()


async def test_a_call_that_was_given_up_does_not_answer_the_next_one(path):
    asked, release = asyncio.Event(), asyncio.Event()

    async def slow(_: control.Message) -> dict:
        asked.set()
        await release.wait()
        return {"said": "late"}

    async with AdminServer(path, {**HANDLERS, "slow": slow}):
        client = AdminClient(path)
        pending = asyncio.create_task(client.call("slow"))
        await asked.wait()
        pending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pending
        release.set()
        assert (await client.call("echo", word="mine"))["said"] == "mine"
        await client.close()


@pytest.mark.parametrize(
    "sent",
    [b"\xff\xff\xff\xff", b"\x00\x00\x02\x00" + b"x" * 10, b"\x03\x00\x00\x00abc", b"\x02\x00\x00\x00[]", b"\x01"],
    ids=["huge", "over the limit", "no json", "no object", "cut"],
)
async def test_bytes_that_are_no_message_end_only_their_connection(path, sent):
    async with AdminServer(path, HANDLERS):
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(sent)
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
        client = AdminClient(path)
        assert await client.snapshot() == SNAPSHOT
        await client.close()


async def test_a_node_of_another_version_is_named_so(path):
    async def other(_: control.Message) -> dict:
        return {"snapshot": {**SNAPSHOT.to_json(), "colour": "red"}}

    for handler in (other, echo):
        async with AdminServer(path, {"status": handler}):
            client = AdminClient(path)
            with pytest.raises(NetworkError) as caught:
                await client.snapshot()
            assert caught.value.code == "snapshot_malformed"
            assert "version" in caught.value.hint
            await client.close()


def test_a_path_the_kernel_refuses_is_refused_at_once(tmp_path):
    with pytest.raises(SystemResourceError, match="107"):
        AdminServer(tmp_path / ("x" * 107), {})


async def test_a_directory_that_is_not_there_is_named(path):
    with pytest.raises(SystemResourceError, match="No socket can be made"):
        async with AdminServer(path.parent / "gone" / "node.sock", {}):
            pass


async def test_a_passphrase_is_not_sent_to_another_users_socket(path, monkeypatch):
    """Who knows where the socket will be could have made one there."""
    received = bytearray()

    async def thief(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.extend(await reader.read())
        writer.close()

    server = await asyncio.start_unix_server(thief, str(path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: 4_000_000)
        with pytest.raises(WalletError) as caught:
            await AdminClient(path).call("unlock", passphrase="correct horse battery")
    assert caught.value.code == "other_user"
    server.close()
    await server.wait_closed()
    assert received == b""


async def test_another_user_is_not_answered(path, monkeypatch):
    async with AdminServer(path, HANDLERS):
        monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
        reader, writer = await asyncio.open_unix_connection(str(path))
        async with asyncio.timeout(120):
            with contextlib.suppress(ConnectionError):
                await control.write_message(writer, {"id": 1, "verb": "status"})
                assert await reader.read() == b""
        writer.close()
