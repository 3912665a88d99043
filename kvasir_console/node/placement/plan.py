"""A placement plan: which wallet serves which layers of a model, signed by the hub that splices its ring.

A plan is an operator's artefact. A node loads what a signed plan assigns to its own wallet, or what its owner
claimed; never something because a web request asked.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvasir_console.errors import NetworkError, WalletError
from kvasir_console.relay.wire.signed import plan_text
from kvasir_console.wallet.keys import is_address, verify

MAX_STAGES = 256
MAX_LAYERS = 4096
MAX_REPLICAS = 16
# Names become parts of file paths, URLs and session names.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,111}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """Layers [begin, end) of the model, served by ``wallet``; ``replicas`` stand by for it, the first one first."""

    rank: int
    wallet: str
    begin: int
    end: int
    replicas: tuple[str, ...] = ()

    @property
    def window(self) -> tuple[int, int, int]:
        """Rank and layers: what an engine holds of it."""
        return self.rank, self.begin, self.end


@dataclass(frozen=True, slots=True)
class Plan:
    """``generation`` is the ring's epoch: a frame of an older one cannot reach a newer ring."""

    ring: str
    model: str
    model_digest: str
    n_layer: int
    generation: int
    stages: tuple[PlannedStage, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": 1,
            "ring": self.ring,
            "model": self.model,
            "model_digest": self.model_digest,
            "n_layer": self.n_layer,
            "generation": self.generation,
            "stages": [
                {"rank": stage.rank, "wallet": stage.wallet, "layers": [stage.begin, stage.end]}
                | ({"replicas": list(stage.replicas)} if stage.replicas else {})
                for stage in self.stages
            ],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Read and check a plan: contiguous windows from 0 to ``n_layer``, in rank order.

        Raises:
            NetworkError: it is not such a plan; the message says what is wrong.
        """
        try:
            _integer(data["version"], 1, 1)
            raw = list(data["stages"])
            if not 0 < len(raw) <= MAX_STAGES:
                raise _bad(f"{len(raw)} stages")
            stages = tuple(_stage(stage) for stage in raw)
            plan = cls(
                ring=_text(data["ring"], _NAME),
                model=_text(data["model"], _NAME),
                model_digest=_text(data["model_digest"], _DIGEST),
                n_layer=_integer(data["n_layer"], 1, MAX_LAYERS),
                generation=_integer(data["generation"], 0, 2**32 - 1),
                stages=stages,
            )
        except KeyError as error:
            raise _bad(f"no {error}") from error
        except (TypeError, ValueError) as error:
            raise _bad(f"a wrong field: {error}"[:200]) from error
        at = 0
        for rank, stage in enumerate(stages):
            if stage.rank != rank or stage.begin != at or stage.end <= stage.begin:
                raise _bad(f"stage {rank} does not follow the one before it")
            at = stage.end
        if at != plan.n_layer:
            raise _bad(f"stages that end at layer {at} of {plan.n_layer}")
        return plan

    def stage_of(self, wallet: str) -> PlannedStage | None:
        """The first window this wallet serves, if any."""
        return next((stage for stage in self.stages if stage.wallet == wallet), None)

    def stands_by(self, wallet: str) -> tuple[PlannedStage, ...]:
        """The windows that this wallet stands by for."""
        return tuple(stage for stage in self.stages if wallet in stage.replicas)

    def moved(self, rank: int, wallet: str, generation: int) -> Plan:
        """The plan in which ``wallet`` serves a window; who served it is the last that stands by for it.

        Raises:
            ValueError: there is no such rank, or it is served by this wallet already.
        """
        old = self.stages[rank] if 0 <= rank < len(self.stages) else None
        if old is None or old.wallet == wallet:
            raise ValueError(f"rank {rank} does not move to {wallet}")
        others = tuple(each for each in old.replicas if each != wallet)
        replicas = (*others, old.wallet)[-MAX_REPLICAS:]
        new = replace(old, wallet=wallet, replicas=replicas)
        return replace(self, generation=generation, stages=(*self.stages[:rank], new, *self.stages[rank + 1 :]))


def sign_plan(plan: Plan, sign: Callable[[bytes], bytes]) -> dict[str, Any]:
    """The plan as ``/api/placement`` serves it. ``sign`` is the hub key's ed25519."""
    body = plan.to_dict()
    return {"plan": body, "signature": base64.b64encode(sign(plan_text(body).encode())).decode()}


def verify_plan(signed: Mapping[str, Any], hub_key: str) -> Plan:
    """The plan inside, if ``hub_key`` (base58) signed exactly these values. Raises ``NetworkError``."""
    body = signed.get("plan")
    try:
        signature = base64.b64decode(str(signed.get("signature")), validate=True)
        text = plan_text(body if isinstance(body, Mapping) else {})
    except (binascii.Error, ValueError, WalletError) as error:
        raise _bad(f"an unreadable signature or body ({error})") from error
    if not isinstance(body, Mapping) or not verify(hub_key, text.encode(), signature):
        raise NetworkError(
            "plan_not_signed",
            "A placement plan is not signed by this gateway's hub key.",
            "The node keeps what it holds. If the operator changed the key, remove the pinned one on purpose.",
        )
    return Plan.from_dict(body)


def _stage(value: Any) -> PlannedStage:
    begin, end = value["layers"]
    replicas = value.get("replicas", [])
    if not isinstance(replicas, list) or len(replicas) > MAX_REPLICAS:
        raise ValueError("replicas are a list of at most " + str(MAX_REPLICAS))
    for wallet in (value["wallet"], *replicas):
        if not isinstance(wallet, str) or not is_address(wallet):
            raise ValueError(f"{str(wallet)[:60]!r} is not a wallet")
    if len({value["wallet"], *replicas}) != 1 + len(replicas):
        raise ValueError("a wallet stands by for a window that it serves, or twice")
    return PlannedStage(
        rank=_integer(value["rank"], 0, MAX_STAGES),
        wallet=value["wallet"],
        begin=_integer(begin, 0, MAX_LAYERS),
        end=_integer(end, 1, MAX_LAYERS),
        replicas=tuple(replicas),
    )


def _text(value: Any, pattern: re.Pattern[str]) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(f"{value!r} is not of the form {pattern.pattern}")
    return value


def _integer(value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{value!r} is not an integer in [{low}, {high}]")
    return value


def _bad(what: str) -> NetworkError:
    return NetworkError("plan_malformed", f"A placement plan has {what}.")
