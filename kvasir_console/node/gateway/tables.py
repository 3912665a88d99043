"""The operator's database, table by table. SQLite and PostgreSQL alike: no type is one of theirs alone."""

from __future__ import annotations

import sqlalchemy as sa

metadata = sa.MetaData()

facts = sa.Table(
    "facts",
    metadata,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)

nonces = sa.Table(
    "nonces",
    metadata,
    sa.Column("nonce", sa.String(64), primary_key=True),
    sa.Column("wallet", sa.String(44), nullable=False, index=True),
    sa.Column("purpose", sa.String(64), nullable=False),
    sa.Column("address", sa.String(64), nullable=False, index=True),
    sa.Column("issued_at", sa.BigInteger, nullable=False),
    sa.Column("expires_at", sa.BigInteger, nullable=False, index=True),
)

delegations = sa.Table(
    "delegations",
    metadata,
    sa.Column("wallet", sa.String(44), primary_key=True),
    sa.Column("key", sa.String(44), primary_key=True),
    sa.Column("until", sa.BigInteger, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
)
"""Session keys that may prove participation for a wallet, until a moment."""

plans = sa.Table(
    "plans",
    metadata,
    sa.Column("ring", sa.String(128), primary_key=True),
    sa.Column("generation", sa.Integer, nullable=False),
    sa.Column("content", sa.Text, nullable=False),
)

requests = sa.Table(
    "requests",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("model", sa.String(256), nullable=False),
    sa.Column("created", sa.BigInteger, nullable=False, index=True),
    sa.Column("finished", sa.BigInteger),
    sa.Column("prompt_tokens", sa.Integer),
    sa.Column("completion_tokens", sa.Integer, nullable=False, default=0),
    sa.Column("finish", sa.String(64)),
    sa.Column("tokens", sa.Text),
)
"""``finish`` is the finish reason, ``cancelled`` or an error code; ``tokens`` a JSON list, erased after a while."""

meter = sa.Table(
    "meter",
    metadata,
    sa.Column("run_id", sa.String(160), primary_key=True),
    sa.Column("wallet", sa.String(44), primary_key=True),
    sa.Column("worker_id", sa.String(256), primary_key=True),
    sa.Column("kind", sa.String(16), primary_key=True),
    sa.Column("model", sa.String(256), nullable=False),
    sa.Column("micro_units", sa.BigInteger, nullable=False),
    sa.Column("requests", sa.BigInteger, nullable=False),
    sa.Column("rows", sa.BigInteger, nullable=False),
    sa.Column("pairs", sa.BigInteger, nullable=False),
    sa.Column("bytes_up", sa.BigInteger, nullable=False),
    sa.Column("bytes_down", sa.BigInteger, nullable=False),
    sa.Column("platform", sa.Text, nullable=False),
    sa.Column("updated_at", sa.BigInteger, nullable=False, index=True),
    sa.Column("voided", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("shard_digest", sa.String(64), nullable=False, server_default=""),
)
"""Work as it was metered, cumulative within a run: it outlives the process that counted it.

The run's own counter reads ``micro_units + voided``: what a quarantine voided is never paid, lifted or not.
"""

quarantines = sa.Table(
    "quarantines",
    metadata,
    sa.Column("wallet", sa.String(44), primary_key=True),
    sa.Column("worker_id", sa.String(256), primary_key=True),
    sa.Column("caught_by", sa.String(44), primary_key=True),
    sa.Column("run_id", sa.String(160), primary_key=True),
    sa.Column("session", sa.String(256), primary_key=True),
    sa.Column("number", sa.BigInteger, primary_key=True),
    sa.Column("at", sa.BigInteger, nullable=False),
    sa.Column("fault", sa.Text, nullable=False),
    sa.Column("evidence", sa.Text, nullable=False),
    sa.Column("evidence_digest", sa.String(64), nullable=False),
    sa.Column("report", sa.Text, nullable=False),
    sa.Column("signature", sa.String(96), nullable=False),
    sa.Column("lifted_at", sa.BigInteger),
)
"""Every time a worker was caught: by an engine of ours (``caught_by`` is empty) or by a ring's stage (its wallet, with
its signed report). A worker is quarantined while one of its cases is not lifted."""

stage_bytes = sa.Table(
    "stage_bytes",
    metadata,
    sa.Column("star", sa.String(160), primary_key=True),
    sa.Column("stage", sa.String(44), primary_key=True),
    sa.Column("wallet", sa.String(44), primary_key=True),
    sa.Column("session", sa.String(256), primary_key=True),
    sa.Column("worker_id", sa.String(256), nullable=False),
    sa.Column("down", sa.BigInteger, nullable=False),
    sa.Column("up", sa.BigInteger, nullable=False),
)
"""The hub's byte counts between a ring's stage and each of its workers, so that they go on over its restarts."""

stage_reports = sa.Table(
    "stage_reports",
    metadata,
    sa.Column("star", sa.String(160), primary_key=True),
    sa.Column("stage", sa.String(44), primary_key=True),
    sa.Column("wallet", sa.String(44), primary_key=True),
    sa.Column("session", sa.String(256), primary_key=True),
    sa.Column("run", sa.String(32), primary_key=True),
    sa.Column("worker_id", sa.String(256), nullable=False),
    sa.Column("rows", sa.BigInteger, nullable=False),
    sa.Column("pairs", sa.BigInteger, nullable=False),
    sa.Column("requests", sa.BigInteger, nullable=False),
    sa.Column("text", sa.Text, nullable=False),
    sa.Column("signature", sa.String(96), nullable=False),
    sa.Column("opened_at", sa.BigInteger, nullable=False),
)
"""The latest accepted report of each run of a stage about each of its workers."""

ring_totals = sa.Table(
    "ring_totals",
    metadata,
    sa.Column("ring", sa.String(128), primary_key=True),
    sa.Column("generation", sa.Integer, primary_key=True),
    sa.Column("token_rows", sa.BigInteger, nullable=False),
    sa.Column("requests", sa.BigInteger, nullable=False),
    sa.Column("plan", sa.Text, nullable=False),
    sa.Column("updated_at", sa.BigInteger, nullable=False),
)
"""Token rows that went through a whole ring under one generation of its plan."""

relay_counts = sa.Table(
    "relay_counts",
    metadata,
    sa.Column("wallet", sa.String(44), primary_key=True),
    sa.Column("session", sa.String(256), primary_key=True),
    sa.Column("worker_id", sa.String(256), nullable=False, index=True),
    sa.Column("model_digest", sa.String(64), nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("up", sa.BigInteger, nullable=False),
    sa.Column("down", sa.BigInteger, nullable=False),
    sa.Column("first_at", sa.BigInteger, nullable=False),
    sa.Column("updated_at", sa.BigInteger, nullable=False),
)
"""The hub's byte counts of each session, so that they go on over its restarts (``relay.counting``)."""

statements = sa.Table(
    "statements",
    metadata,
    sa.Column("wallet", sa.String(44), primary_key=True),
    sa.Column("worker_id", sa.String(256), primary_key=True),
    sa.Column("sequence", sa.BigInteger, primary_key=True),
    sa.Column("text", sa.Text, nullable=False),
    sa.Column("signature", sa.String(96), nullable=False),
    sa.Column("acknowledged_by", sa.String(44)),
    sa.Column("acknowledgement", sa.String(96)),
    sa.Column("at", sa.BigInteger, nullable=False),
)
"""Signed statements, a chain for each worker, with the node's signature over those it agreed with."""

counters = sa.Table(
    "counters",
    metadata,
    sa.Column("run_id", sa.String(160), primary_key=True),
    sa.Column("wallet", sa.String(44), primary_key=True),
    sa.Column("worker_id", sa.String(256), primary_key=True),
    sa.Column("kind", sa.String(16), primary_key=True),
    sa.Column("baseline", sa.BigInteger, nullable=False),
)
"""How much of each cumulative counter was credited. One row for each run, so runs may be read in any order."""

accounts = sa.Table(
    "accounts",
    metadata,
    sa.Column("wallet", sa.String(44), primary_key=True),
    sa.Column("worker_id", sa.String(256), primary_key=True),
    sa.Column("kind", sa.String(16), primary_key=True),
    sa.Column("model", sa.String(256), nullable=False),
    sa.Column("micro_units", sa.BigInteger, nullable=False),
    sa.Column("source_run_id", sa.String(160), nullable=False),
    sa.Column("multiplier", sa.String(64), nullable=False),
    sa.Column("credited_micro_kvr", sa.BigInteger, nullable=False),
    sa.Column("carry_num", sa.Text, nullable=False),
    sa.Column("carry_den", sa.Text, nullable=False),
    sa.Column("claimed_micro_kvr", sa.BigInteger, nullable=False),
    sa.Column("platform", sa.Text, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("last_work_at", sa.BigInteger, nullable=False),
    sa.CheckConstraint("claimed_micro_kvr >= 0 AND claimed_micro_kvr <= credited_micro_kvr", name="claimed_within"),
)

credited_units = sa.Table(
    "credited_units",
    metadata,
    sa.Column("wallet", sa.String(44), primary_key=True),
    sa.Column("worker_id", sa.String(256), primary_key=True),
    sa.Column("kind", sa.String(16), primary_key=True),
    sa.Column("multiplier", sa.String(64), primary_key=True),
    sa.Column("micro_units", sa.BigInteger, nullable=False),
    sa.ForeignKeyConstraint(
        ["wallet", "worker_id", "kind"], ["accounts.wallet", "accounts.worker_id", "accounts.kind"]
    ),
)
"""A row's units by the multiplier they were credited with: what its balance is to be checked against for ever."""

claims = sa.Table(
    "claims",
    metadata,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("id", sa.String(64), nullable=False, unique=True),
    sa.Column("wallet", sa.String(44), nullable=False, index=True),
    sa.Column("micro_kvr", sa.BigInteger, nullable=False),
    sa.Column("state", sa.String(16), nullable=False, index=True),
    sa.Column("signature", sa.String(96), unique=True),
    sa.Column("raw", sa.LargeBinary),
    sa.Column("last_valid_block_height", sa.BigInteger),
    sa.Column("slot", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("error", sa.Text, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("updated_at", sa.BigInteger, nullable=False),
    sa.CheckConstraint("micro_kvr > 0", name="claim_positive"),
)

claim_items = sa.Table(
    "claim_items",
    metadata,
    sa.Column("claim_id", sa.ForeignKey("claims.id"), primary_key=True),
    sa.Column("wallet", sa.String(44), primary_key=True),
    sa.Column("worker_id", sa.String(256), primary_key=True),
    sa.Column("kind", sa.String(16), primary_key=True),
    sa.Column("micro_kvr", sa.BigInteger, nullable=False),
    sa.ForeignKeyConstraint(
        ["wallet", "worker_id", "kind"], ["accounts.wallet", "accounts.worker_id", "accounts.kind"]
    ),
)
"""Which rows a claim empties; a claim that failed on chain gives them back."""

attempts = sa.Table(
    "attempts",
    metadata,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("signature", sa.String(96), nullable=False, unique=True),
    sa.Column("claim_id", sa.ForeignKey("claims.id"), nullable=False, index=True),
    sa.Column("outcome", sa.String(16), nullable=False),
    sa.Column("at", sa.BigInteger, nullable=False),
)
"""Every transaction ever signed for a claim, so that an expired one can still be found on chain."""
