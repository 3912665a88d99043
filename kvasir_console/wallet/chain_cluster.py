"""Which cluster a wallet lives on: the genesis hash of the first RPC it met, kept in the state directory.

The same address exists on every cluster. A configuration that suddenly leads elsewhere would show other balances, pay
with other money and, worst, declare dead what has landed where it was sent; so it is refused until a person says that
the other cluster is meant.
"""

from __future__ import annotations

import json
from pathlib import Path

from kvasir_console.errors import LedgerError, WalletError
from kvasir_console.paths import private_directory
from kvasir_console.wallet import private_file
from kvasir_console.wallet.chain_endpoints import host_of

VERSION = 1
MAX_FILE_BYTES = 1 << 20
_NAMES = {
    # Agave, ClusterType::get_genesis_hash.
    "5eykt4UsFv8P8NJdTREpY1vzqKqZKvdpKuc147dw2N9d": "mainnet-beta",
    "4uhcVJyU9pJkvQyS88uRDiswHXSCkY3zQawwpjk2NsNY": "testnet",
    "EtWTRABZaYq6iMfeYKouRu166VU2xqa1wcaWoxPkrZBG": "devnet",
}


def cluster_name(genesis: str) -> str:
    """``devnet`` and so on; a cluster of one's own by the start of its genesis hash."""
    return _NAMES.get(genesis, f"the cluster {genesis[:8]}…")


class ClusterPin:
    """One wallet's cluster. Nothing is read or written before it is asked for."""

    def __init__(self, file: Path, wallet: str) -> None:
        """
        Args:
            file: shared by all wallets of this installation.
            wallet: address of the wallet.
        """
        self._file = file
        self._wallet = wallet

    @property
    def pinned(self) -> str | None:
        """The genesis hash, or ``None`` before the first RPC was met. Raises as ``check``."""
        return self._read().get(self._wallet)

    def check(self, genesis: str, url: str) -> None:
        """Whether ``genesis``, the hash of the RPC at ``url``, is this wallet's; the first one becomes it.

        Raises:
            LedgerError: ``cluster_changed``, or ``cluster_file_malformed``.
            WalletError: others may look into the file or its directory.
            SystemResourceError: it cannot be read or written.
        """
        known = self.pinned or self._keep(genesis, replace=False)
        if known != genesis:
            raise LedgerError(
                "cluster_changed",
                f"This wallet lives on {cluster_name(known)}; the RPC at {host_of(url)} belongs to "
                f"{cluster_name(genesis)}.",
                "Set wallet.rpc_url back. If the other cluster is meant: kvasir-console wallet cluster --accept.",
            )

    def accept(self, genesis: str) -> None:
        """Take ``genesis`` for this wallet from now on. Raises as ``check``."""
        self._keep(genesis, replace=True)

    def _keep(self, genesis: str, *, replace: bool) -> str:
        """Write ``genesis`` down, unless another is there already that is to stay; the one that holds then."""
        private_directory(self._file.parent)
        with private_file.exclusive(self._file):
            wallets = self._read()
            if replace or self._wallet not in wallets:
                wallets[self._wallet] = genesis
                text = json.dumps({"version": VERSION, "genesis": wallets}, indent=1, sort_keys=True)
                private_file.write(self._file, text.encode(), replace=True)
            return wallets[self._wallet]

    def _read(self) -> dict[str, str]:
        """Genesis hash by wallet."""
        try:
            document = json.loads(private_file.read(self._file, MAX_FILE_BYTES))
        except WalletError as error:
            if error.code == "vault_missing":
                return {}
            raise
        except (ValueError, RecursionError):
            document = None
        wallets = document.get("genesis") if isinstance(document, dict) else None
        if (
            not isinstance(wallets, dict)
            or document.get("version") != VERSION
            or not all(isinstance(each, str) for each in wallets.values())
        ):
            raise LedgerError(
                "cluster_file_malformed",
                f"{self._file} does not hold what it should: the cluster of each wallet.",
                "Remove it if you are sure of wallet.rpc_url; the next RPC is then taken for the right one.",
            )
        return wallets
