"""Instructions in words: the ``parsed`` form of the programs this network uses. Pure.

Source: Agave ``transaction-status`` (``parse_instruction`` and the parsers it names). An instruction that is not known
here, or that is malformed, keeps Solana's "partially decoded" form, which names its accounts and gives its data.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from solders.pubkey import Pubkey
from solders.system_program import ID as SYSTEM_PROGRAM_ID
from spl.memo.constants import MEMO_PROGRAM_ID
from spl.token.constants import ASSOCIATED_TOKEN_PROGRAM_ID, TOKEN_2022_PROGRAM_ID, TOKEN_PROGRAM_ID

from kvasir_console.wallet.localnet import base58
from kvasir_console.wallet.localnet.amounts import token_amount

MEMO_V1_PROGRAM_ID = Pubkey.from_string("Memo1UhkJRfHyvLMcVucJwxXeuD728EqVDDwQDxFMNo")
MEMO_PROGRAMS = (MEMO_PROGRAM_ID, MEMO_V1_PROGRAM_ID)


@dataclass(frozen=True, slots=True)
class Compiled:
    """One instruction with its accounts looked up."""

    program: Pubkey
    accounts: tuple[str, ...]
    data: bytes
    stack_height: int


def instruction_json(instruction: Compiled) -> dict[str, Any]:
    """The ``jsonParsed`` form of one instruction."""
    name, read = _PROGRAMS.get(instruction.program, ("", _unknown))
    try:
        parsed = read(instruction.accounts, instruction.data)
    except (struct.error, LookupError, ValueError):
        parsed = None
    common = {"programId": str(instruction.program), "stackHeight": instruction.stack_height}
    if parsed is None:
        return {"accounts": list(instruction.accounts), "data": base58.encode(instruction.data), **common}
    return {"program": name, "parsed": parsed, **common}


def _unknown(_accounts: Sequence[str], _data: bytes) -> None:
    return None


def _memo(_accounts: Sequence[str], data: bytes) -> str:
    return data.decode()


def _system(accounts: Sequence[str], data: bytes) -> dict[str, Any] | None:
    (tag,) = struct.unpack_from("<I", data)
    match tag:
        case 0:
            lamports, space, owner = struct.unpack_from("<QQ32s", data, 4)
            return _form(
                "createAccount",
                source=accounts[0],
                newAccount=accounts[1],
                lamports=lamports,
                space=space,
                owner=_key(owner),
            )
        case 1:
            return _form("assign", account=accounts[0], owner=_key(struct.unpack_from("<32s", data, 4)[0]))
        case 2:
            (lamports,) = struct.unpack_from("<Q", data, 4)
            return _form("transfer", source=accounts[0], destination=accounts[1], lamports=lamports)
        case 8:
            return _form("allocate", account=accounts[0], space=struct.unpack_from("<Q", data, 4)[0])
    return None


def _associated(accounts: Sequence[str], data: bytes) -> dict[str, Any] | None:
    kind = {b"": "create", b"\0": "create", b"\1": "createIdempotent"}.get(data)
    if kind is None:
        return None
    source, account, wallet, mint, system, token = accounts[:6]
    return _form(
        kind, source=source, account=account, wallet=wallet, mint=mint, systemProgram=system, tokenProgram=token
    )


def _token(accounts: Sequence[str], data: bytes) -> dict[str, Any] | None:
    rest = data[1:]
    match data[0]:
        case 3:
            return _form(
                "transfer", **_named(accounts, "source", "destination", authority="authority"), **_amount(rest)
            )
        case 4:
            return _form("approve", **_named(accounts, "source", "delegate", authority="owner"), **_amount(rest))
        case 5:
            return _form("revoke", **_named(accounts, "source", authority="owner"))
        case 7:
            return _form("mintTo", **_named(accounts, "mint", "account", authority="mintAuthority"), **_amount(rest))
        case 8:
            return _form("burn", **_named(accounts, "account", "mint", authority="authority"), **_amount(rest))
        case 9:
            return _form("closeAccount", **_named(accounts, "account", "destination", authority="owner"))
        case 12:
            names = _named(accounts, "source", "mint", "destination", authority="authority")
            return _form("transferChecked", **names, **_checked(rest))
        case 14:
            names = _named(accounts, "mint", "account", authority="mintAuthority")
            return _form("mintToChecked", **names, **_checked(rest))
        case 15:
            names = _named(accounts, "account", "mint", authority="authority")
            return _form("burnChecked", **names, **_checked(rest))
        case 18:
            owner = struct.unpack_from("<32s", rest)[0]
            return _form("initializeAccount3", account=accounts[0], mint=accounts[1], owner=_key(owner))
        case 20:
            decimals, authority, freezes = struct.unpack_from("<B32sB", rest)
            freeze = {"freezeAuthority": _key(struct.unpack_from("<32s", rest, 34)[0])} if freezes else {}
            return _form(
                "initializeMint2", mint=accounts[0], decimals=decimals, mintAuthority=_key(authority), **freeze
            )
        case 21 if rest in (b"", b"\7\0"):  # the one extension an associated account asks for
            extensions = {"extensionTypes": ["immutableOwner"]} if rest else {}
            return _form("getAccountDataSize", mint=accounts[0], **extensions)
        case 22:
            return _form("initializeImmutableOwner", account=accounts[0])
    return None


def _form(kind: str, **info: Any) -> dict[str, Any]:
    return {"type": kind, "info": info}


def _named(accounts: Sequence[str], *names: str, authority: str) -> dict[str, Any]:
    """The accounts by name; the one after them signs, alone or as a multisig whose members follow."""
    info: dict[str, Any] = dict(zip(names, accounts, strict=False))
    owner, members = accounts[len(names)], accounts[len(names) + 1 :]
    if not members:
        return info | {authority: owner}
    return info | {f"multisig{authority[0].upper()}{authority[1:]}": owner, "signers": list(members)}


def _amount(data: bytes) -> dict[str, Any]:
    return {"amount": str(struct.unpack_from("<Q", data)[0])}


def _checked(data: bytes) -> dict[str, Any]:
    amount, decimals = struct.unpack_from("<QB", data)
    return {"tokenAmount": token_amount(amount, decimals)}


def _key(raw: bytes) -> str:
    return str(Pubkey.from_bytes(raw))


_Reader = Callable[[Sequence[str], bytes], Any]
_PROGRAMS: Mapping[Pubkey, tuple[str, _Reader]] = {
    SYSTEM_PROGRAM_ID: ("system", _system),
    TOKEN_PROGRAM_ID: ("spl-token", _token),
    TOKEN_2022_PROGRAM_ID: ("spl-token", _token),
    ASSOCIATED_TOKEN_PROGRAM_ID: ("spl-associated-token-account", _associated),
    MEMO_PROGRAM_ID: ("spl-memo", _memo),
    MEMO_V1_PROGRAM_ID: ("spl-memo", _memo),
}
