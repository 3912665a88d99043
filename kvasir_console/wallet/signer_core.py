"""The signer's rules: what is held between unlock and lock, and what has to be true before anything is signed."""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from solders.message import to_bytes_versioned

from kvasir_console.errors import KvasirError, UsageError, WalletError
from kvasir_console.relay.wire import control
from kvasir_console.wallet import intents
from kvasir_console.wallet.intents import TransferIntent
from kvasir_console.wallet.keys import Key
from kvasir_console.wallet.limits import DailyLimit, spending_file
from kvasir_console.wallet.twofactor import SecondFactor, state_file
from kvasir_console.wallet.vault import open_vault, public_accounts, second_factor_enrolled

MAX_UNLOCK_DELAY_S = 60.0
SUSPEND_S = 2.0
"""A clock that counts sleep and one that does not may drift apart by less than this."""

_log = logging.getLogger(__name__)


def suspended_s() -> float:
    """Seconds this machine has spent suspended since it started; 0 where the system does not tell."""
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)


@dataclass(frozen=True, slots=True)
class Unlocked:
    """What is in memory between unlock and lock."""

    key: Key
    factor: SecondFactor | None = field(repr=False)
    limit: DailyLimit
    contacts: dict[str, str] = field(repr=False)


class Signer:
    """The key, and the rules of its use. Knows no socket."""

    def __init__(
        self,
        vault: Path,
        host: str,
        *,
        kinds: Collection[str] | None = None,
        cluster: str = "",
        mint: str = "",
        idle_lock_s: float = 0.0,
        monotonic: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        suspended: Callable[[], float] = suspended_s,
    ) -> None:
        """Read the vault's address. Raises ``WalletError`` if there is no readable vault.

        Args:
            host: the gateway's host, or host and port, that every intent must name.
            kinds: the kinds of intents that are signed at all; ``None`` for every one.
            cluster: genesis hash of the cluster that transfers must name; without it none is signed.
            mint: the KVR token's mint there.
            idle_lock_s: lock after so long without a signature or an unlock; 0 never.
            suspended: seconds the machine has been suspended so far.
        """
        self._vault, self._host, self._idle_lock_s = vault, host, idle_lock_s
        self._kinds, self._cluster, self._mint = kinds, cluster, mint
        self._monotonic, self._now, self._suspended = monotonic, now, suspended
        self._address = public_accounts(vault)[0].address
        self._second_factor = second_factor_enrolled(vault)
        self._unlocked: Unlocked | None = None
        self._suspended_s = suspended()
        self._unlocking = asyncio.Lock()
        self._locks = 0
        self._failures = 0
        self._next_try_s = 0.0
        self._used_s = monotonic()
        self.stopping = asyncio.Event()

    async def handle(self, message: control.Message) -> control.Message:
        """The reply to one request; a refusal is a reply too."""
        try:
            match message.get("verb"):
                case "status":
                    return control.reply(message, **self._status())
                case "unlock":
                    await self._unlock(message.pop("passphrase", None))
                    return control.reply(message, **self._status())
                case "lock":
                    self.lock()
                    return control.reply(message, **self._status())
                case "contacts":
                    return control.reply(message, contacts=self._require().contacts)
                case "sign":
                    return control.reply(message, **self._sign(message.get("intent"), message.pop("code", None)))
                case "exit":
                    self.lock()
                    self.stopping.set()
                    return control.reply(message)
                case _:
                    raise UsageError("unknown_verb", "The signer knows status, unlock, lock, contacts, sign and exit.")
        except KvasirError as error:
            return control.failure(message, error)
        except Exception as error:
            # The text of a foreign exception may repeat what it choked on; its type cannot.
            _log.error("a request failed with %s", type(error).__name__)
            return control.failure(message, WalletError("signer_failed", "The signer could not do that."))

    def lock(self) -> None:
        """Wipe the key. An unlock that is still deriving comes to nothing."""
        self._locks += 1
        if self._unlocked is not None:
            self._unlocked.key.wipe()
            self._unlocked = None
            _log.info("locked")

    def lock_if_left(self) -> None:
        """Lock after an idle time, or when the machine was suspended since the unlock: nobody sat before it."""
        if self._unlocked is None:
            return
        if self._suspended() - self._suspended_s > SUSPEND_S:
            _log.info("the machine was suspended")
            self.lock()
        elif self._idle_lock_s and self._monotonic() - self._used_s >= self._idle_lock_s:
            self.lock()

    def _status(self) -> dict[str, object]:
        return {
            "locked": self._unlocked is None,
            "address": self._address,
            "host": self._host,
            "second_factor": self._second_factor,
        }

    def _require(self) -> Unlocked:
        self.lock_if_left()
        if self._unlocked is None:
            raise WalletError("wallet_locked", "The wallet is locked.", "Unlock it first.")
        return self._unlocked

    async def _unlock(self, passphrase: object) -> None:
        if not isinstance(passphrase, str):
            raise UsageError("passphrase_missing", "To unlock, give a passphrase.")
        async with self._unlocking:
            wait_s = self._next_try_s - self._monotonic()
            if wait_s > 0:
                raise WalletError(
                    "unlock_throttled", "Too many wrong passphrases.", f"Try again in {wait_s:.0f} seconds."
                )
            before = self._locks
            try:
                unlocked = await asyncio.to_thread(_open, self._vault, passphrase)
            except WalletError as error:
                if error.code == "wrong_passphrase":
                    self._failures += 1
                    self._next_try_s = self._monotonic() + min(2.0 ** (self._failures - 1), MAX_UNLOCK_DELAY_S)
                    _log.warning("wrong passphrase, attempt %d", self._failures)
                raise
            self._failures = 0
            if self._locks != before:
                unlocked.key.wipe()
                raise WalletError("wallet_locked", "The wallet was locked while it was being unlocked.")
            if self._unlocked is not None:
                self._unlocked.key.wipe()
            self._unlocked, self._address = unlocked, unlocked.key.address
            self._second_factor = unlocked.factor is not None
            self._used_s, self._suspended_s = self._monotonic(), self._suspended()
            _log.info("unlocked %s", self._address)

    def _sign(self, fields: object, code: object) -> dict[str, object]:
        intent = intents.parse(fields)
        if self._kinds is not None and intent.kind not in self._kinds:
            raise WalletError(
                "intent_not_allowed", f"This signer signs no {intent.kind}.", f"It signs: {', '.join(self._kinds)}."
            )
        context = intents.Context(self._host, self._address, self._now(), self._cluster, self._mint)
        if isinstance(intent, TransferIntent):
            data, text = bytes(to_bytes_versioned(intent.message(context))), intent.describe()
        else:
            text = intents.text_of(intent, context)
            data = text.encode()
        unlocked = self._require()
        if isinstance(intent, TransferIntent):
            self._release(unlocked, intent, code)
        signature = unlocked.key.sign(data)
        self._used_s = self._monotonic()
        _log.info("signed: %s", intent.describe().replace("\n", ";"))
        return {"signature": base64.b64encode(signature).decode(), "text": text}

    def _release(self, unlocked: Unlocked, intent: TransferIntent, code: object) -> None:
        """Money leaves: the second factor and the day's limit have their say. Raises ``WalletError``."""
        if unlocked.factor is not None:
            if not isinstance(code, str):
                raise WalletError(
                    "second_factor_needed", "This wallet sends money with a one-time code only.", "Give the code."
                )
            unlocked.factor.check(code)
        unlocked.limit.spend(intent.token, intent.amount, intent.payment_digest())


def _open(vault: Path, passphrase: str) -> Unlocked:
    with open_vault(vault, passphrase) as opened:
        contents, key = opened.contents(), opened.key()
    secret = contents.second_factor
    factor = None if secret is None else SecondFactor(state_file(vault), secret)
    return Unlocked(key, factor, DailyLimit(spending_file(vault), contents.limits), dict(contents.contacts))
