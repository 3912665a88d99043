"""``wallet claim`` without a running node: straight to the gateway, signed by a signer of its own."""

from __future__ import annotations

from typing import Any

from kvasir_console.config import Config
from kvasir_console.node.accounts import Accounts
from kvasir_console.node.market import Market
from kvasir_console.node.signing import SessionSigner
from kvasir_console.paths import Paths
from kvasir_console.wallet.intents import ActionIntent
from kvasir_console.wallet.signer_session import signer_session
from kvasir_console.wallet.vault import public_accounts


async def claim(config: Config, paths: Paths, passphrase: str) -> dict[str, Any]:
    """Claim everything that is pending for this wallet; the gateway's answer.

    Raises:
        NetworkError: the gateway does not answer.
        LedgerError: nothing to claim, or less than the gateway's minimum.
        WalletError: there is no vault, or the passphrase does not open it.
    """
    network, wallet = config.network, public_accounts(paths.vault_file)[0].address
    market = Market(network.gateway, ca_file=network.ca_file, timeout_s=network.request_timeout_s)
    try:
        session = signer_session(
            paths.vault_file,
            paths.runtime,
            paths.state / "signer.log",
            host=market.host,
            kinds=(ActionIntent.kind,),
        )
        async with session as client:
            await client.unlock(passphrase)
            signer = SessionSigner(client, market.host, wallet)
            return await Accounts(market, signer, wallet, config.wallet, paths).claim()
    finally:
        await market.close()
