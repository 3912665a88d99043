"""``python -m kvasir_console.node.gateway.payout``: pays reserved claims. The only process that holds the treasury key.

A claim is paid at most once, whatever dies when. Its transaction is signed and stored before it is sent; from then on
only that transaction is sent, any number of times, until the chain says how it ended. Only one that can never land
any more, as the chain says twice, is replaced by another.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from solders.keypair import Keypair

from kvasir_console import logs
from kvasir_console.child import forbid_core_dumps
from kvasir_console.config import has_password
from kvasir_console.errors import ExitCode, KvasirError, LedgerError, NetworkError, UsageError, WalletError
from kvasir_console.node.gateway.ledger import Claim, ClaimState, Ledger
from kvasir_console.node.gateway.store import Store
from kvasir_console.wallet.chain import Chain, Outcome, OutcomeState, PreparedTransfer
from kvasir_console.wallet.chain_cluster import cluster_name
from kvasir_console.wallet.chain_endpoints import host_of
from kvasir_console.wallet.keys import is_address
from kvasir_console.wallet.localnet.auth import read_auth_file
from kvasir_console.wallet.passphrase import read_passphrase, read_secret_file
from kvasir_console.wallet.transfers import KvrTransfer, prepare_transfer
from kvasir_console.wallet.vault import open_vault

log = logging.getLogger(__name__)

MEMO_PREFIX = "kvasir:claim:"
TREASURY_FACT = "treasury_owner"
GENESIS_FACT = "genesis_hash"
POLL_S = 1.0
MAX_POLL_S = 30.0
OUTCOME_WAIT_S = 20.0
CONCURRENT_CLAIMS = 4

_ENDS = {
    OutcomeState.CONFIRMED: ClaimState.CONFIRMED,
    OutcomeState.FAILED: ClaimState.FAILED,
    OutcomeState.EXPIRED: ClaimState.EXPIRED,
}


class Treasury(Protocol):
    """The chain, as a payer sees it. Every method raises ``NetworkError`` when the RPC does not answer."""

    async def prepare(self, claim: Claim) -> PreparedTransfer:
        """Sign the claim's transfer; nothing is sent."""
        ...

    async def submit(self, prepared: PreparedTransfer) -> None:
        """Send the bytes, again if need be. Raises ``LedgerError`` if the RPC's trial run refuses them."""
        ...

    async def outcome(self, prepared: PreparedTransfer, timeout_s: float) -> Outcome | None:
        """How the transaction ended, or ``None`` if that is not known within ``timeout_s``."""
        ...


class ChainTreasury:
    """The treasury's key and a cluster."""

    def __init__(self, chain: Chain, key: Keypair, mint: str, priority_micro_lamports: int = 0) -> None:
        self._chain = chain
        self._key = key
        self._mint = mint
        self._priority = priority_micro_lamports

    async def prepare(self, claim: Claim) -> PreparedTransfer:
        await self._chain.check_fresh()
        intent = KvrTransfer(
            source=str(self._key.pubkey()),
            recipient=claim.wallet,
            mint=self._mint,
            micro_kvr=claim.micro_kvr,
            memo=MEMO_PREFIX + claim.claim_id,
        )
        return await prepare_transfer(self._chain, intent, self._key, self._priority)

    async def submit(self, prepared: PreparedTransfer) -> None:
        await self._chain.submit(prepared)

    async def outcome(self, prepared: PreparedTransfer, timeout_s: float) -> Outcome | None:
        try:
            return await self._chain.outcome(prepared, timeout_s=timeout_s)
        except NetworkError as error:
            if error.code == "outcome_unknown":
                return None
            raise


class StorePin:
    """The cluster that a database's claims are paid on: elsewhere their transactions would look as if they expired."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def check(self, genesis: str, url: str) -> None:
        """The first cluster is kept. Raises ``LedgerError`` ``cluster_changed`` for another."""
        known = self._store.remember(GENESIS_FACT, genesis)
        if known != genesis:
            raise LedgerError(
                "cluster_changed",
                f"The claims of this database are paid on {cluster_name(known)}; the RPC at {host_of(url)} belongs to "
                f"{cluster_name(genesis)}.",
                "Give the RPC of that cluster, or another database.",
            )


class Payer:
    """Moves every open claim as far as it will go."""

    def __init__(
        self,
        ledger: Ledger,
        treasury: Treasury,
        *,
        clock: Callable[[], float] = time.time,
        outcome_wait_s: float = OUTCOME_WAIT_S,
    ) -> None:
        self._ledger = ledger
        self._treasury = treasury
        self._clock = clock
        self._outcome_wait_s = outcome_wait_s
        self._room = asyncio.Semaphore(CONCURRENT_CLAIMS)

    async def pay_all(self) -> int:
        """One pass over the open claims, those that an earlier process left included; how many are still open."""
        claims = await asyncio.to_thread(self._ledger.open_claims)
        await asyncio.gather(*(self._pay(claim) for claim in claims))
        return len(await asyncio.to_thread(self._ledger.open_claims))

    async def _pay(self, claim: Claim) -> None:
        async with self._room:
            try:
                await self._move(claim)
            except KvasirError as error:
                log.warning("claim %s does not move: %s", claim.claim_id, error)
                if str(error) != claim.error:
                    await asyncio.to_thread(self._ledger.note, claim, str(error), self._now())

    async def _move(self, claim: Claim) -> None:
        if claim.state is ClaimState.EXPIRED and not await self._expired_for_good(claim):
            return
        if claim.state in (ClaimState.RESERVED, ClaimState.EXPIRED):
            signed = await self._sign(claim)
            if signed is None:
                return
            claim = signed
        prepared = _prepared(claim)
        refusal: LedgerError | None = None
        if claim.state is ClaimState.SIGNED:
            try:
                await self._treasury.submit(prepared)
            except LedgerError as error:
                # A trial run says no. The bytes may have been sent before, so the chain still has the last word.
                refusal = error
            else:
                await self._advance(claim, ClaimState.SENT)
        outcome = await self._treasury.outcome(prepared, 0.0 if refusal else self._outcome_wait_s)
        if outcome is not None:
            await self._advance(claim, _ENDS[outcome.state], outcome.error)
        elif refusal is not None:
            raise refusal

    async def _expired_for_good(self, claim: Claim) -> bool:
        """A second look before another transaction is signed: the RPC may be another one, that knows more."""
        look = await self._treasury.outcome(_prepared(claim), 0.0)
        if look is not None and look.state is not OutcomeState.EXPIRED:
            await self._advance(claim, _ENDS[look.state], look.error)
        return look is not None and look.state is OutcomeState.EXPIRED

    async def _sign(self, claim: Claim) -> Claim | None:
        """Sign and store. ``None`` if another payout process took the claim; its transaction is then the only one."""
        prepared = await self._treasury.prepare(claim)
        return await asyncio.to_thread(
            self._ledger.record_attempt,
            claim.claim_id,
            prepared.signature,
            prepared.raw,
            prepared.last_valid_block_height,
            self._now(),
            prepared.slot,
        )

    async def _advance(self, claim: Claim, state: ClaimState, error: str = "") -> None:
        await asyncio.to_thread(self._ledger.advance, claim, state, self._now(), error)
        log.info("claim %s of %s is %s %s", claim.claim_id, claim.wallet, state, error)

    def _now(self) -> int:
        return int(self._clock())


def _prepared(claim: Claim) -> PreparedTransfer:
    if claim.raw is None or claim.signature is None or claim.last_valid_block_height is None:
        raise LedgerError("claim_without_transaction", f"Claim {claim.claim_id} has no stored transaction.")
    return PreparedTransfer(claim.raw, claim.signature, claim.last_valid_block_height, claim.slot)


async def serve(payer: Payer, stop: asyncio.Event, poll_s: float = POLL_S) -> None:
    """Pay until ``stop``. A pass begun is finished; the pause doubles while nothing can be done."""
    pause_s = poll_s
    while not stop.is_set():
        try:
            left = await payer.pay_all()
            pause_s = poll_s if not left else min(2 * pause_s, MAX_POLL_S)
        except KvasirError as error:
            log.warning("the claims cannot be read: %s", error)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await stop.wait()


def database_url(arguments: argparse.Namespace) -> str:
    """Raises ``UsageError`` for a password on the command line, which every user of the machine can read."""
    if arguments.database_file is not None:
        return read_secret_file(arguments.database_file, "database")
    if has_password(arguments.database):
        raise UsageError(
            "password_exposed",
            "--database holds a password, where everybody on this machine can see it.",
            "Give --database-file FILE (mode 0600), or leave the password to PostgreSQL's own ~/.pgpass.",
        )
    return str(arguments.database)


async def run(arguments: argparse.Namespace) -> None:
    if not is_address(arguments.mint):
        raise WalletError("address", "--mint is not a Solana address.")
    passphrase = read_passphrase(file=arguments.passphrase_file, prompt=None)
    if passphrase is None:
        raise WalletError("passphrase_missing", "The treasury's passphrase is needed.", "Give --passphrase-file.")
    with await asyncio.to_thread(open_vault, arguments.treasury, passphrase) as vault, vault.key() as key:
        keypair = key.keypair()
    store = await asyncio.to_thread(Store.open, database_url(arguments))
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        await asyncio.to_thread(store.set_fact, TREASURY_FACT, str(keypair.pubkey()))
        async with Chain(
            arguments.rpc,
            read_auth_file(arguments.rpc_auth_file) if arguments.rpc_auth_file else None,
            fallbacks=arguments.rpc_fallback,
            pin=StorePin(store),
            commitment=arguments.commitment,
        ) as chain:
            log.info("paying from %s", keypair.pubkey())
            treasury = ChainTreasury(chain, keypair, arguments.mint, arguments.priority_micro_lamports)
            await serve(Payer(Ledger(store), treasury), stop, arguments.poll_s)
    finally:
        store.close()


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvasir-payout", description="Pays reserved claims from the treasury.")
    database = parser.add_mutually_exclusive_group(required=True)
    database.add_argument("--database", help="SQLAlchemy URL of the gateway's store, without a password")
    database.add_argument("--database-file", type=Path, help="file (mode 0600) with that URL")
    parser.add_argument("--rpc", required=True, help="URL of the Solana RPC")
    parser.add_argument("--rpc-auth-file", type=Path, default=None, help="file with its Authorization header")
    parser.add_argument("--rpc-fallback", action="append", default=[], help="another RPC of that cluster; repeatable")
    parser.add_argument("--commitment", choices=("processed", "confirmed", "finalized"), default="confirmed")
    parser.add_argument(
        "--priority-micro-lamports", type=int, default=0, help="offered for each compute unit on top of the fee"
    )
    parser.add_argument("--mint", required=True, help="the KVR mint")
    parser.add_argument("--treasury", type=Path, required=True, help="vault of the treasury's wallet")
    parser.add_argument("--passphrase-file", type=Path, default=None)
    parser.add_argument("--poll-s", type=float, default=POLL_S, help="pause between two looks at the store")
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    forbid_core_dumps()
    os.umask(0o077)
    logs.configure(to_stderr=True)
    try:
        asyncio.run(run(arguments))
    except KvasirError as error:
        print(
            f"kvasir-payout: {error.message}", *([f"  {error.hint}"] if error.hint else []), sep="\n", file=sys.stderr
        )
        return error.exit_code
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
