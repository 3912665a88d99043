"""The report of a local pass as a person reads it."""

from __future__ import annotations

from typing import Any

from kvasir_console.wallet.token import format_kvr

MIB = 2**20


def describe(report: dict[str, Any]) -> str:
    """Plain text, at most 100 columns; the same figures as the JSON report."""
    ring, moe, ledger = report["ring"], report["moe"], report["ledger"]
    lines = [
        "",
        f"One pass through the whole network, {report['seconds']:g} s{_start(report)}, prompt {report['prompt']!r}",
        "",
        f"RING     {len(ring['stages'])} stages, each its own process and its own layers",
        *(
            f"         {s['name']:9} pid {s['pid']:<8} layers {s['layers'][0]:>2} to {s['layers'][1] - 1:<2}"
            f"  {s['tensor_bytes'] / MIB:7.1f} MiB of weights"
            for s in ring["stages"]
        ),
        *_quoted(ring["text"]),
        f"         {len(ring['tokens'])} tokens, {report['gateway']['tokens_per_s']:.1f} a second, "
        f"first after {report['gateway']['ttft_ms']:.0f} ms",
        "",
        f"EXPERTS  {moe['model']}: {moe['pairs_remote']} of {moe['pairs_expected']} expert pairs computed remotely",
        *(
            f"         {e['name']:9} pid {e['pid']:<8} layer {e['layer']:>2} experts {e['range'][0]} to "
            f"{e['range'][1] - 1}  {e['pairs']:>6} pairs  {e['bytes_down'] / 1e3:8.1f} kB in"
            f"  {e['bytes_up'] / 1e3:8.1f} kB out"
            for e in report["experts"]
        ),
        *_quoted(moe["text"]),
        f"         tokens {'identical to' if moe['identical_to_local'] else 'DIFFER from'} the local computation, "
        f"largest logit difference {moe['max_abs_logit_diff']:.3g}",
        f"         {moe['tokens_per_s']:.1f} tokens a second over the network, "
        f"{moe['tokens_per_s_local']:.1f} all local",
        "",
        f"MONEY    {ledger['units']} units, {format_kvr(ledger['micro_kvr_credited'])} KVR credited, "
        f"{ledger['carried']} micro-KVR carried",
        *(
            f"         {c['name']:9} {c['wallet'][:4]}..{c['wallet'][-4:]}  {format_kvr(c['amount'])} KVR {c['state']}"
            f"  balance {format_kvr(c['balance_before'])} -> {format_kvr(c['balance_after'])}"
            for c in ledger["claims"]
        ),
        "",
        "CHECKS   " + ", ".join(f"{name.replace('_', ' ')}: {'yes' if ok else 'NO'}" for name, ok in _pairs(report)),
    ]
    return "\n".join(lines)


def _start(report: dict[str, Any]) -> str:
    """The time since the command began, where that was measured."""
    return f" ({report['seconds_with_start']:g} s with its start)" if "seconds_with_start" in report else ""


def _pairs(report: dict[str, Any]) -> list[tuple[str, bool]]:
    return list(report["checks"].items())


def _quoted(text: str) -> list[str]:
    """The model's text, control characters shown, at most three lines of it."""
    shown = "".join(ch if ch.isprintable() or ch == "\n" else "\N{REPLACEMENT CHARACTER}" for ch in text)
    pieces = [line for line in shown.splitlines() if line.strip()][:3]
    return [f"         | {line[:88]}" for line in pieces]
