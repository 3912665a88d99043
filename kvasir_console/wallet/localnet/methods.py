"""The RPC methods that exist, by name. A name that is not in ``METHODS`` does not."""

from __future__ import annotations

from kvasir_console.wallet.localnet import methods_accounts, methods_cluster, methods_history, methods_sending
from kvasir_console.wallet.localnet.rpc import Method

METHODS: dict[str, Method] = {
    **methods_accounts.METHODS,
    **methods_cluster.METHODS,
    **methods_history.METHODS,
    **methods_sending.METHODS,
}
