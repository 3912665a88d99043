"""Money as the gateway and the chain state it, exactly; what can be claimed now, and what became of the last claim."""

from __future__ import annotations

from kvasir_console.node.snapshot import EarningsView, NodeSnapshot, StatementView
from kvasir_console.screens import format as fmt
from kvasir_console.screens.frame import Frame
from kvasir_console.screens.graph import filled
from kvasir_console.screens.line import Line, Role, Span, crop, fit, labelled, line

LABEL = 10
_VALUE = 18
_CLAIM_ROLES = {"confirmed": Role.GOOD, "failed": Role.BAD, "expired": Role.WARN}


def earnings(frame: Frame, cells: int, height: int) -> list[Line]:
    snapshot = frame.snapshot
    seen = EarningsView() if snapshot is None else snapshot.earnings
    lines = [
        _amount("pending", seen.pending_micro_kvr, "KVR", Role.STRONG),
        labelled("", *_claimable(seen, cells - LABEL), label_width=LABEL),
        _amount("credited", seen.credited_micro_kvr, "KVR"),
        _amount("paid", seen.paid_micro_kvr, "KVR"),
        _amount("on chain", seen.wallet_micro_kvr, "KVR"),
        _amount("units", seen.micro_units, ""),
        _figure("carried", fmt.carried(seen.carried_micro_kvr), "µKVR", Role.LABEL),
        _claim(seen),
    ]
    if snapshot is not None and snapshot.statements.worker:
        lines.append(_statements(snapshot.statements))
    if snapshot is not None:
        lines.append(_wallet(snapshot, cells))
    return [crop(each, cells) for each in lines[:height]]


def _amount(label: str, value: int | None, unit: str, role: Role = Role.TEXT) -> Line:
    return _figure(label, fmt.micro(value), unit, Role.LABEL if value is None else role)


def _figure(label: str, text: str, unit: str, role: Role) -> Line:
    """Figures end in one column, so that their points stand under each other."""
    figure = Span(fit(text, _VALUE, right=True), role)
    return labelled(label, figure, Span(f" {unit}", Role.LABEL), label_width=LABEL)


def can_claim(seen: EarningsView) -> bool:
    """Whether a claim would be taken: something is pending, and it reaches the gateway's minimum."""
    return seen.pending_micro_kvr is not None and seen.pending_micro_kvr >= max(seen.minimum_claim_micro_kvr or 1, 1)


def _claimable(seen: EarningsView, cells: int) -> Line:
    pending, minimum = seen.pending_micro_kvr, seen.minimum_claim_micro_kvr
    if minimum is None:
        return line(Span("minimum claim N/A", Role.LABEL))
    if can_claim(seen):
        return line(Span("can be claimed now", Role.GOOD))
    share = fmt.percent(pending, minimum)
    text = f" {'' if share is None else f'{share}% of '}{_trimmed(minimum)} KVR"
    bar_cells = max(0, min(8, cells - len(text)))
    full = filled(pending, minimum, bar_cells)
    return line(Span("█" * full, Role.ACCENT), Span("░" * (bar_cells - full), Role.FAINT), Span(text, Role.LABEL))


def _trimmed(value: int) -> str:
    return fmt.micro(value).rstrip("0").rstrip(".")


def _claim(seen: EarningsView) -> Line:
    if not seen.claim_state:
        return labelled("claim", Span("none yet", Role.LABEL), label_width=LABEL)
    role = _CLAIM_ROLES.get(seen.claim_state, Role.ACCENT)
    signature = f"  {fmt.short(seen.last_signature)}" if seen.last_signature else ""
    return labelled("claim", Span(seen.claim_state, role), Span(signature, Role.LABEL), label_width=LABEL)


def _statements(seen: StatementView) -> Line:
    """Rows counted here beside those the hub has stated; a hub that is not believed is said so."""
    if seen.refused:
        return labelled("stated", Span(seen.refused, Role.BAD), label_width=LABEL)
    if seen.stated_rows is None:
        return labelled("stated", Span(fmt.NA, Role.LABEL), label_width=LABEL)
    role = Role.GOOD if seen.acknowledged == seen.sequence else Role.TEXT
    figure = Span(f"{seen.stated_rows} of {seen.mine_rows}", role)
    return labelled("stated", figure, Span(" rows", Role.LABEL), label_width=LABEL)


def _wallet(snapshot: NodeSnapshot, cells: int) -> Line:
    whole = len(snapshot.wallet) <= cells - LABEL
    return labelled(
        "wallet", Span(snapshot.wallet if whole else fmt.short(snapshot.wallet, 8), Role.LABEL), label_width=LABEL
    )
