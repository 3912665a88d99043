"""The embedded ledger: a real Solana runtime (LiteSVM) behind Solana's JSON-RPC, with SQLite as the truth.

It lets the whole network settle on one machine, with the very transactions a public cluster would take.
``python -m kvasir_console.wallet.localnet --data DIR --port 0 --auth-file FILE`` starts the process; any Solana client
that can send an ``Authorization`` header talks to it.

    __main__   the process: arguments, one ready line, exit codes
    server     HTTP and WebSocket on loopback: bearer check, body bound, one worker thread
    rpc        JSON-RPC 2.0 envelope, parameter checks, error codes
    methods    the methods that exist, by name; methods_* holds them by subject
    subscriptions  signatureSubscribe
    views      JSON forms of accounts and transactions, as Solana prints them
    instructions   instructions in words (jsonParsed)
    ledger     the rules: blockhash window, no replay, fees, commitment, restart
    faucet     test SOL, within limits
    slots      time in slots, and the blockhash of each
    store      SQLite
    auth       the file with the bearer token
    bootstrap  mint and treasury of a new local network (a client of the process)
"""
