"""``wallet balance``, ``send``, ``history``, ``cluster`` and ``airdrop``: the commands that ask the chain."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from kvasir_console.errors import LedgerError, UsageError
from kvasir_console.wallet.chain import Chain, open_chain
from kvasir_console.wallet.chain_cluster import ClusterPin, cluster_name
from kvasir_console.wallet.chain_history import Movement
from kvasir_console.wallet.chain_signing import PreparedTransfer, RecentBlockhash, assemble
from kvasir_console.wallet.command_base import Command, say
from kvasir_console.wallet.intent_transfer import TransferIntent
from kvasir_console.wallet.keys import is_address
from kvasir_console.wallet.money import KVR, SOL, amount_text, parse_amount
from kvasir_console.wallet.outbox import Outbox, Send, SendState
from kvasir_console.wallet.sender import Sender
from kvasir_console.wallet.signer_client import SignerClient
from kvasir_console.wallet.signer_session import signer_session
from kvasir_console.wallet.terminal import confirm, require
from kvasir_console.wallet.transfers import KvrTransfer, SolTransfer, Transfer, transfer_message

MAX_HISTORY = 1000


def balance(command: Command) -> int:
    return asyncio.run(_balance(command))


def history(command: Command) -> int:
    return asyncio.run(_history(command))


def send(command: Command) -> int:
    return asyncio.run(_send(command))


def cluster(command: Command) -> int:
    return asyncio.run(_cluster(command))


def airdrop(command: Command) -> int:
    return asyncio.run(_airdrop(command))


async def balances_of(command: Command, addresses: Sequence[str]) -> list[tuple[int, int] | None]:
    """Micro-KVR and lamports of addresses that are no account here yet: no cluster is pinned for them."""
    async with open_chain(command.config.wallet) as chain:
        mint = command.config.wallet.mint
        return [(await chain.balance_micro_kvr(each, mint), await chain.balance_lamports(each)) for each in addresses]


async def _balance(command: Command) -> int:
    listed = command.accounts()
    chosen = listed if command.arguments.all else (listed[0],)
    rows = []
    async with _chain(command) as chain:
        where = cluster_name(await chain.genesis_hash())
        for account in chosen:
            kvr = await chain.balance_micro_kvr(account.address, command.config.wallet.mint)
            rows.append((account.address, kvr, await chain.balance_lamports(account.address)))
    data = [{"address": address, "micro_kvr": kvr, "lamports": sol} for address, kvr, sol in rows]
    lines = [f"{address:44}  {amount_text(KVR, kvr):>24}  {amount_text(SOL, sol):>24}" for address, kvr, sol in rows]
    return command.emit({"cluster": where, "accounts": data}, [*lines, f"on {where}"])


async def _history(command: Command) -> int:
    own, limit = command.accounts()[0].address, command.arguments.limit
    if not 1 <= limit <= MAX_HISTORY:
        raise UsageError("limit_out_of_range", f"--limit is from 1 to {MAX_HISTORY}.")
    async with _chain(command) as chain:
        with Outbox.open(command.paths.state / "outbox.sqlite") as outbox:
            pending = [each for each in await Sender(outbox, chain).resume() if each.undecided]
        movements = await chain.movements(own, command.config.wallet.mint, limit)
    data = {"movements": [_movement(each) for each in movements], "pending": [_sent(each) for each in pending]}
    lines = [f"under way: {_describe(each.intent)} ({each.request_id})" for each in pending]
    return command.emit(data, [*lines, *(_line(each) for each in movements)])


async def _send(command: Command) -> int:
    """Shown with its fee, confirmed, signed by a signer of its own, stored, sent, and followed until it is decided."""
    arguments, settings = command.arguments, command.config.wallet
    amount, own = parse_amount(arguments.amount, arguments.token), command.accounts()[0].address
    if not arguments.yes:
        require(command.person, "Sending money", "To send without a question, add --yes.")
    request_id = arguments.id or str(uuid.uuid4())
    passphrase = command.passphrase()
    async with _chain(command) as chain:
        genesis = await chain.genesis_hash()
        session = signer_session(
            command.vault,
            command.paths.runtime,
            command.paths.state / "signer.log",
            host=urlsplit(command.config.network.gateway).netloc.lower(),
            kinds=(TransferIntent.kind,),
            cluster=genesis,
            mint=settings.mint,
        )
        async with session as signer:
            status = await signer.unlock(passphrase)
            recipient = await _recipient(signer, arguments.recipient)
            intent = _transfer(arguments.token, own, recipient, settings.mint, amount, arguments.memo)
            with Outbox.open(command.paths.state / "outbox.sqlite") as outbox:
                sender = Sender(outbox, chain, priority_micro_lamports=settings.priority_micro_lamports)
                if outbox.get(request_id) is None:
                    await _confirm(command, sender, intent, genesis)
                say(f"Payment {request_id}. If this is interrupted, the same command with --id {request_id} goes on.")

                async def sign(transfer: Transfer, recent: RecentBlockhash) -> PreparedTransfer:
                    message = transfer_message(transfer, recent.hash, settings.priority_micro_lamports)
                    typed = _intent(transfer, genesis, recent, settings.priority_micro_lamports, request_id)
                    code = command.code() if status.second_factor else None
                    return assemble(message, await signer.sign(typed, code), recent)

                done = await sender.send(request_id, intent, sign, twin=arguments.twin)
    if done.state is not SendState.CONFIRMED:
        raise LedgerError(
            f"send_{done.state}",
            f"The payment {request_id} {_ENDS[done.state]}{': ' + done.error if done.error else ''}.",
            "Nothing but a fee was paid.",
        )
    return command.emit(_sent(done), [f"{_describe(intent)}: {done.state}, {done.prepared.signature}"])


async def _confirm(command: Command, sender: Sender, intent: Transfer, genesis: str) -> None:
    """Raises ``LedgerError`` when it would fail, ``UsageError`` when it is declined."""
    preview = await sender.preview(intent)
    if preview.error is not None:
        raise LedgerError("send_would_fail", f"The payment would fail: {preview.error}.", "Nothing was signed or sent.")
    lines = [f"{_describe(intent)} on {cluster_name(genesis)}"]
    lines += [f"  memo: {ascii(intent.memo)[1:-1]}"] if intent.memo else []
    lines.append(f"  fee: {amount_text(SOL, preview.fee_lamports)}")
    if preview.spent_lamports is not None:
        lines.append(f"  all SOL that leaves: {amount_text(SOL, preview.spent_lamports)}")
    say("\n".join(lines))
    if command.arguments.yes:
        return
    if not confirm(require(command.person, "Sending money", "Add --yes."), "Send it?"):
        raise UsageError("not_sent", "Nothing was signed or sent.")


async def _recipient(signer: SignerClient, named: str) -> str:
    """An address, or a name of the address book. A name can be no address: those have 32 characters or more."""
    if is_address(named):
        return named
    book = await signer.contacts()
    if named not in book:
        raise UsageError(
            "recipient_unknown",
            f"{named[:44]!r} is no Solana address, and not in the address book.",
            "See kvasir-console wallet contacts list.",
        )
    return book[named]


def _transfer(token: str, source: str, recipient: str, mint: str, amount: int, memo: str) -> Transfer:
    if token == KVR:
        return KvrTransfer(source, recipient, mint, amount, memo)
    return SolTransfer(source, recipient, amount, memo)


def _intent(
    transfer: Transfer, genesis: str, recent: RecentBlockhash, priority: int, request_id: str
) -> TransferIntent:
    token, amount = _amount(transfer)
    return TransferIntent(
        genesis, token, transfer.recipient, amount, transfer.memo, str(recent.hash), priority, request_id
    )


def _amount(transfer: Transfer) -> tuple[str, int]:
    return (KVR, transfer.micro_kvr) if isinstance(transfer, KvrTransfer) else (SOL, transfer.lamports)


async def _cluster(command: Command) -> int:
    """Which cluster this wallet lives on; with ``--accept``, the one the configuration names from now on."""
    own = command.accounts()[0].address
    pin = _pin(command, own)
    if command.arguments.accept:
        async with open_chain(command.config.wallet) as chain:
            pin.accept(await chain.genesis_hash())
    pinned = pin.pinned
    name = None if pinned is None else cluster_name(pinned)
    return command.emit({"genesis": pinned, "cluster": name}, [f"{name} ({pinned})" if pinned else "No cluster yet."])


async def _airdrop(command: Command) -> int:
    """SOL of a test cluster for this wallet."""
    own, lamports = command.accounts()[0].address, parse_amount(command.arguments.amount, SOL)
    async with _chain(command) as chain:
        where = cluster_name(await chain.genesis_hash())
        if where == "mainnet-beta":
            raise UsageError("no_airdrop", "There are no airdrops on mainnet-beta.")
        signature = await chain.airdrop(own, lamports)
    text = f"{amount_text(SOL, lamports)} asked for on {where}: {signature}"
    return command.emit({"signature": signature, "lamports": lamports}, [text])


def _chain(command: Command) -> Chain:
    """The configured chain, refused if it is another cluster than this wallet's."""
    return open_chain(command.config.wallet, pin=_pin(command, command.accounts()[0].address))


def _pin(command: Command, wallet: str) -> ClusterPin:
    return ClusterPin(command.paths.state / "clusters.json", wallet)


def _movement(each: Movement) -> dict[str, Any]:
    return {
        "signature": each.signature,
        "slot": each.slot,
        "time": each.block_time,
        "micro_kvr": each.micro_kvr,
        "lamports": each.lamports,
        "fee_lamports": each.fee_lamports,
        "counterparties": list(each.counterparties),
        "memos": list(each.memos),
        "error": each.error,
    }


def _line(each: Movement) -> str:
    moment = "-" if each.block_time is None else time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(each.block_time))
    amounts = [amount_text(KVR, each.micro_kvr)] if each.micro_kvr else []
    amounts += [amount_text(SOL, each.lamports)] if each.lamports or not amounts else []
    other = f"  {'from' if (each.micro_kvr or each.lamports) > 0 else 'to'} {', '.join(each.counterparties)}"
    memo = "".join(f"  {ascii(memo)[1:-1]!r}" for memo in each.memos)
    failed = "" if each.error is None else f"  FAILED: {each.error}"
    return (
        f"{moment:19}  {', '.join(amounts):>24}{other if each.counterparties else ''}{memo}{failed}  {each.signature}"
    )


def _describe(intent: Transfer) -> str:
    token, amount = _amount(intent)
    return f"Send {amount_text(token, amount)} to {intent.recipient}"


def _sent(each: Send) -> dict[str, Any]:
    token, amount = _amount(each.intent)
    return {
        "id": each.request_id,
        "state": str(each.state),
        "signature": each.prepared.signature,
        "token": token,
        "amount": amount,
        "recipient": each.intent.recipient,
        "error": each.error,
    }


_ENDS = {
    SendState.SIGNED: "is signed",
    SendState.SENT: "is under way",
    SendState.FAILED: "failed on the chain",
    SendState.EXPIRED: "did not land and never will",
}
