"""The money side of a node, as a process that tests kill: it claims what its wallets earned and sends it on."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

from nacl.signing import SigningKey
from solders.keypair import Keypair

from kvasir_console.errors import KvasirError
from kvasir_console.node.market import Market
from kvasir_console.relay.wire.signed import ActionKind, action_text
from kvasir_console.wallet.chain import Chain, PreparedTransfer, RecentBlockhash, sign
from kvasir_console.wallet.localnet.auth import read_auth_file
from kvasir_console.wallet.outbox import Outbox, Send, SendState
from kvasir_console.wallet.sender import Sender
from kvasir_console.wallet.transfers import KvrTransfer, Transfer, transfer_message

SMALLEST_SEND = 50
PAUSE_S = 0.1


def wallet_key(number: int) -> Keypair:
    return Keypair.from_seed(bytes([number + 1]) * 32)


class Wallet:
    def __init__(self, key: Keypair, settings: dict[str, Any], market: Market, chain: Chain, outbox: Outbox) -> None:
        self.key, self.address, self.settings = key, str(key.pubkey()), settings
        self.market, self.chain, self.outbox = market, chain, outbox
        self.sender = Sender(outbox, chain)

    async def claim(self) -> None:
        challenge = await self.market.action_challenge(self.address, ActionKind.CLAIM.value)
        nonce, issued, expires = (challenge[name] for name in ("nonce", "issued_at", "expires_at"))
        text = action_text(challenge["domain"], ActionKind.CLAIM, self.address, {}, nonce, issued, expires)
        signature = SigningKey(self.key.secret()).sign(text.encode()).signature
        await self.market.claim(self.address, text, signature)

    async def send(self) -> None:
        """Go on with the last send or, when that is decided, begin the next."""
        last = self.last()
        if last is None or last.state in (SendState.CONFIRMED, SendState.FAILED):
            balance = await self.chain.balance_micro_kvr(self.address, self.settings["mint"])
            if balance < SMALLEST_SEND:
                return
            number = 0 if last is None else int(last.request_id.rsplit("-", 1)[1]) + 1
            name = f"{self.address[:8]}-{number}"
            intent: Transfer = KvrTransfer(
                self.address, self.settings["collector"], self.settings["mint"], 1 + balance // 3, name
            )
        else:
            name, intent = last.request_id, last.intent
        await self.sender.send(name, intent, self.sign, timeout_s=5.0)

    def last(self) -> Send | None:
        mine = (each for each in self.outbox.sends(50) if each.intent.source == self.address)
        return next(mine, None)

    async def sign(self, intent: Transfer, recent: RecentBlockhash) -> PreparedTransfer:
        return sign(transfer_message(intent, recent.hash), (self.key,), recent)

    async def done(self) -> bool:
        totals = (await self.market.earnings(self.address))["totals"]
        claims = await self.market.claims(self.address)
        last = self.last()
        return (
            totals["pendingMicroKvr"] == 0
            and all(claim["state"] in ("confirmed", "failed") for claim in claims)
            and (last is None or last.state in (SendState.CONFIRMED, SendState.FAILED))
        )


async def run(settings: dict[str, Any], *, finish: bool) -> None:
    """Until killed or, with ``finish``, until nothing is left to claim or to decide."""
    market = Market(settings["gateway"], timeout_s=5.0)
    auth = read_auth_file(Path(settings["auth_file"]))
    with Outbox.open(Path(settings["outbox"])) as outbox:
        async with Chain(settings["rpc"], auth, timeout_s=5.0, poll_s=0.05) as chain:
            wallets = [Wallet(wallet_key(number), settings, market, chain, outbox) for number in range(settings["n"])]
            while True:
                for wallet in wallets:
                    for step in (wallet.claim, wallet.send):
                        with contextlib.suppress(KvasirError):  # nothing to claim, or someone is being restarted
                            await step()
                with contextlib.suppress(KvasirError):
                    if finish and all([await wallet.done() for wallet in wallets]):
                        return
                await asyncio.sleep(PAUSE_S)
