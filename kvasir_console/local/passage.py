"""One pass through everything: a ring request, a mixture-of-experts request twice, claims, and the report of it.

Nothing in the report is assumed: tokens and counts come from the gateway, sizes from the engines' own processes, money
from the settlement store and, for balances, from the ledger's RPC.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.checkpoint.shape import ModelShape
from kvasir_console.errors import KvasirError, LedgerError, ModelError, NetworkError
from kvasir_console.local.chat import Answer, Gateway
from kvasir_console.local.network import RING_MODEL, LocalNetwork, Member, Models
from kvasir_console.wallet.settlement import RATE, micro_text

Say = Callable[[str], None]
Report = dict[str, Any]
SETTLE_TIMEOUT_S = 120.0
MORE_TRIES = 5
"""A busy machine may hold every worker up for as long as a request takes."""
FINAL_STATES = ("confirmed", "failed", "expired")


async def one_pass(
    network: LocalNetwork, gateway: Gateway, models: Models, prompt: str, max_tokens: int, say: Say
) -> Report:
    """Run the pass and return its report; ``report["checks"]`` says which of its promises held."""
    started = time.monotonic()
    say(f"Waiting until {models.moe_id} is loaded and its experts are joined")
    await network.wait_ready(lambda: ready(network, gateway, models), "a model is not served")
    say(f"Ring: {prompt!r} through {len(network.ring)} stages")
    ring = await gateway.complete(RING_MODEL, prompt, max_tokens)
    say(f"Experts: the same through {models.moe_id}, experts over the network")
    remote = await gateway.complete(models.moe_id, prompt, max_tokens, trace=True)
    for _ in range(MORE_TRIES):
        if int(remote.kvasir["pairs_remote"]):
            break
        say("Experts: every answer came late, so the trunk computed all of it; once more")
        remote = await gateway.complete(models.moe_id, prompt, max_tokens, trace=True)
    say("Experts: once more, every expert computed by the trunk itself")
    local = await gateway.complete(models.moe_id, prompt, max_tokens, experts="local", trace=True)
    report: Report = {
        "prompt": prompt,
        "ring": await _ring_report(network, ring),
        "moe": _moe_report(remote, local, models),
        "gateway": {"url": network.url, "tokens_per_s": ring.tokens_per_s, "ttft_ms": ring.ttft_ms},
    }
    say("Settlement: waiting until the gateway has credited what the trunk and the ring metered")
    contributions = await _settled(gateway)
    report["experts"] = [await _expert_report(network, member, contributions) for member in network.experts]
    report["ledger"] = await _ledger_report(network, gateway, say)
    report["checks"] = _checks(report)
    report["seconds"] = round(time.monotonic() - started, 1)
    return report


async def ready(network: LocalNetwork, gateway: Gateway, models: Models) -> bool:
    """Whether both models answer and every expert node is joined to the trunk."""
    served = {model["id"].split(":", 1)[-1] for model in (await gateway.get("/api/pay/models"))["models"]}
    sessions = (await gateway.get("/api/expert-relay/sessions"))["sessions"]
    joined = sum(1 for session in sessions if session["connected"])
    return {models.moe_id, RING_MODEL} <= served and joined >= len(network.experts)


async def _ring_report(network: LocalNetwork, answer: Answer) -> Report:
    stages = []
    for member in network.ring:
        snapshot = await network.snapshot(member)
        held = snapshot.held if snapshot is not None else None
        if snapshot is None or held is None:
            raise NetworkError("stage_gone", f"The ring stage {member.name} does not answer any more.")
        stages.append(
            {
                "name": member.name,
                "pid": snapshot.engine_pid,
                "layers": [held.begin, held.end],
                "tensor_bytes": held.tensor_bytes,
            }
        )
    return {"text": answer.text, "tokens": list(answer.tokens), "stages": stages}


def _moe_report(remote: Answer, local: Answer, models: Models) -> Report:
    with Checkpoint.open(models.moe) as checkpoint:
        shape = ModelShape.of(checkpoint)
    rows = int(remote.kvasir["stage_rows"])
    return {
        "model": models.moe_id,
        "text": remote.text,
        "tokens": list(remote.tokens),
        "identical_to_local": bool(remote.tokens) and remote.tokens == local.tokens,
        "max_abs_logit_diff": max_abs_difference(remote.kvasir["trace_path"], local.kvasir["trace_path"]),
        "pairs_remote": remote.kvasir["pairs_remote"],
        "pairs_local": remote.kvasir["pairs_local"],
        "pairs_expected": rows * len(shape.moe_layers) * shape.n_expert_used,
        "failovers": remote.kvasir["failovers"],
        "tokens_per_s": remote.tokens_per_s,
        "tokens_per_s_local": local.tokens_per_s,
    }


def max_abs_difference(one: str, other: str) -> float:
    """The largest difference of two logit traces, over the positions both have. Infinite if a value is not finite."""
    a, b = np.load(one), np.load(other)
    count = min(len(a), len(b))
    difference = float(np.max(np.abs(a[:count] - b[:count]))) if count else float("inf")
    return difference if np.isfinite(difference) else float("inf")


async def _settled(gateway: Gateway) -> list[Report]:
    """The contributions, once the settlement store has credited every micro-unit of them."""
    deadline = asyncio.get_running_loop().time() + SETTLE_TIMEOUT_S
    while True:
        contributions: list[Report] = (await gateway.get("/api/contributions"))["contributions"]
        rows = (await gateway.get("/api/settlement"))["rows"]
        metered = sum(int(row["micro_units"]) for row in contributions)
        credited = sum(int(row["micro_units"]) for row in rows)
        if metered and metered == credited:
            return contributions
        if asyncio.get_running_loop().time() > deadline:
            raise LedgerError(
                "not_settled",
                f"The gateway credited {credited} of {metered} micro-units within {SETTLE_TIMEOUT_S:g} s.",
                "Read gateway.log; --keep keeps it.",
            )
        await asyncio.sleep(0.25)


async def _expert_report(network: LocalNetwork, member: Member, contributions: list[Report]) -> Report:
    snapshot = await network.snapshot(member)
    held = snapshot.held if snapshot is not None else None
    if snapshot is None or held is None:
        raise NetworkError("expert_gone", f"The expert node {member.name} does not answer any more.")
    row = next((row for row in contributions if row["node_id"] == snapshot.worker_id), {})
    return {
        "name": member.name,
        "pid": snapshot.engine_pid,
        "session": snapshot.relays[0].session if snapshot.relays else None,
        "layer": held.layer,
        "range": [held.begin, held.end],
        "bytes_up": int(row.get("bytes_up", 0)),
        "bytes_down": int(row.get("bytes_down", 0)),
        "pairs": int(row.get("pairs", 0)),
        "rtt_ms": snapshot.relays[0].rtt_ms if snapshot.relays else None,
        "tensor_bytes": held.tensor_bytes,
    }


async def _ledger_report(network: LocalNetwork, gateway: Gateway, say: Say) -> Report:
    members = [*network.ring, *network.experts]
    async with network.chain() as chain:

        async def balance(member: Member) -> int:
            return await chain.balance_micro_kvr(member.address, network.mint)

        before = {member.address: await balance(member) for member in members}
        say(f"Claims: {len(members)} wallets sign for what they earned")
        made = await asyncio.gather(*(_claim(network, member) for member in members))
        claims = await _paid(gateway, {claim["claim_id"] for claim in made if claim is not None})
        after = {member.address: await balance(member) for member in members}
    rows = (await gateway.get("/api/settlement"))["rows"]
    names = {member.address: member.name for member in members}
    return {
        "rpc_url": network.rpc_url,
        "mint": network.mint,
        "units": micro_text(sum(int(row["micro_units"]) for row in rows)),
        "micro_kvr_credited": sum(int(row["credited_micro_kvr"]) for row in rows),
        "carried": str(sum((Fraction(row["carried_micro_kvr"]) for row in rows), Fraction(0))),
        "rows": rows,
        "claims": [
            {
                "name": names.get(claim["wallet"], ""),
                "wallet": claim["wallet"],
                "signature": claim["signature"],
                "state": claim["state"],
                "amount": claim["micro_kvr"],
                "balance_before": before[claim["wallet"]],
                "balance_after": after[claim["wallet"]],
            }
            for claim in claims
        ],
    }


async def _claim(network: LocalNetwork, member: Member) -> Report | None:
    """A node's claim; ``None`` for one that earned nothing (its experts were never asked)."""
    try:
        return await network.claim(member)
    except KvasirError as error:
        if error.code == "nothing_to_claim":
            return None
        raise


async def _paid(gateway: Gateway, claim_ids: set[Any]) -> list[Report]:
    deadline = asyncio.get_running_loop().time() + SETTLE_TIMEOUT_S
    while True:
        claims = [c for c in (await gateway.get("/api/settlement"))["claims"] if c["id"] in claim_ids]
        if len(claims) == len(claim_ids) and all(claim["state"] in FINAL_STATES for claim in claims):
            return claims
        if asyncio.get_running_loop().time() > deadline:
            states = ", ".join(f"{claim['id']} {claim['state']}" for claim in claims)
            raise LedgerError("not_paid", f"Not every claim was paid in time: {states}.", "Read payout.log.")
        await asyncio.sleep(0.2)


def exact_micro_kvr(row: Report) -> Fraction:
    """What a settlement row is worth: units x tier x bonus x rate, exactly."""
    return int(row["micro_units"]) * Fraction(row["multiplier"]) * RATE


def _checks(report: Report) -> dict[str, bool]:
    moe, ledger = report["moe"], report["ledger"]
    return {
        "tokens_identical": moe["identical_to_local"],
        "pairs_add_up": moe["pairs_remote"] + moe["pairs_local"] == moe["pairs_expected"],
        "experts_used_remotely": moe["pairs_remote"] > 0,
        "credit_is_exact": all(
            int(row["credited_micro_kvr"]) + Fraction(row["carried_micro_kvr"]) == exact_micro_kvr(row)
            for row in ledger["rows"]
        ),
        "claims_confirmed": bool(ledger["claims"]) and all(c["state"] == "confirmed" for c in ledger["claims"]),
        "balances_grew_by_claims": all(
            c["balance_after"] - c["balance_before"] == c["amount"] for c in ledger["claims"]
        ),
    }


def load_models(ring: Path, moe: Path, moe_id: str) -> Models:
    """Check both checkpoints before anything is started for them."""
    with Checkpoint.open(ring) as checkpoint:
        layers = ModelShape.of(checkpoint).n_layer
    with Checkpoint.open(moe) as checkpoint:
        shape = ModelShape.of(checkpoint)
        if not shape.moe_layers:
            raise ModelError(
                "not_a_mixture_of_experts",
                f"{moe} has no layer with experts.",
                "Give --model a mixture-of-experts GGUF, or leave it out.",
            )
    return Models(ring=ring, moe=moe, moe_id=moe_id, ring_layers=layers)
