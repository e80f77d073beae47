"""The market's tables. Migrations in `market/migrations` make them; a test holds the two equal.

Keys, ids and hashes are stored as bytes, times as Unix seconds of the database's clock, amounts as whole
bytes in 64 bits. Knows no queries.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)

metadata: Final = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)


def _bytes(name: str, **options: Any) -> Column[Any]:
    return Column(name, LargeBinary, nullable=options.pop("nullable", False), **options)


def _integer(name: str, **options: Any) -> Column[Any]:
    return Column(name, BigInteger, nullable=options.pop("nullable", False), **options)


def _time(name: str, **options: Any) -> Column[Any]:
    return Column(name, Double, nullable=options.pop("nullable", False), **options)


def _name(name: str, length: int = 128, **options: Any) -> Column[Any]:
    return Column(name, String(length), nullable=options.pop("nullable", False), **options)


meta = Table("meta", metadata, _name("name", primary_key=True), Column("value", Text, nullable=False))

challenges = Table(
    "challenges",
    metadata,
    _name("nonce", primary_key=True),
    Column("text", Text, nullable=False),
    _integer("issued_at", index=True),
)

nonces = Table(
    "nonces",
    metadata,
    _bytes("author", primary_key=True),
    _bytes("nonce", primary_key=True),
    _time("expires_at", index=True),
)

grants = Table(
    "grants",
    metadata,
    _bytes("hash", primary_key=True),
    Column("text", Text, nullable=False),
    _bytes("signature"),
    _bytes("wallet", index=True),
    _bytes("device", index=True),
    _name("scope", 16),
    _integer("issued_at"),
    _integer("expires_at"),
)

wallets = Table(
    "wallets",
    metadata,
    _bytes("wallet", primary_key=True),
    _integer("calls", server_default=text("0")),
    _time("quarantined_until", server_default=text("0")),
    _integer("calls_before", server_default=text("0")),
    _time("left_at", nullable=True),
)

devices = Table(
    "devices",
    metadata,
    _bytes("device", primary_key=True),
    _bytes("wallet", index=True),
    Column("grant", LargeBinary, ForeignKey("grants.hash"), nullable=False),
    _integer("start_generation", server_default=text("0")),
    _integer("budget_bytes", server_default=text("0")),
    _name("network", server_default=""),
    Column("addresses", JSON, nullable=False),
    Column("relays", JSON, nullable=True),
    _time("rate", nullable=True),
    _time("seen_at", index=True),
    Column("abilities", JSON, nullable=True),
)

operators = Table(
    "operators",
    metadata,
    _name("role", 16, primary_key=True),
    _bytes("id", primary_key=True),
    _integer("serial"),
    _bytes("certificate"),
)

relays = Table(
    "relays",
    metadata,
    _bytes("id", primary_key=True),
    _name("url", 512),
    _bytes("certificate"),
    Column("load", JSON, nullable=True),
    _time("seen_at"),
)

plans = Table(
    "plans",
    metadata,
    _bytes("plan", primary_key=True),
    _bytes("document"),
    _bytes("certificate"),
    _name("model", 512),
    _name("model_revision", 512),
    _name("wire_dtype", 16),
    Column("active", Boolean, nullable=False),
    _integer("revision", server_default=text("0")),
    _integer("pruned", server_default=text("0")),
    _time("published_at"),
)

plan_backbones = Table(
    "plan_backbones",
    metadata,
    Column("plan", LargeBinary, ForeignKey("plans.plan"), primary_key=True),
    _bytes("backbone", primary_key=True),
    _time("seen_at"),
)

windows = Table(
    "windows",
    metadata,
    Column("plan", LargeBinary, ForeignKey("plans.plan"), primary_key=True),
    _name("name", 64, primary_key=True),
    Column("target", Integer, nullable=False),
    _integer("download_bytes"),
    Column("kept_bytes", JSON, nullable=False),
    Column("formulas", JSON, nullable=False),
    _time("short_since", nullable=True),
)

demand = Table(
    "demand",
    metadata,
    _bytes("plan", primary_key=True),
    _name("name", 64, primary_key=True),
    _bytes("backbone", primary_key=True),
    _time("rate"),
    _time("updated_at"),
)

hashes = Table(
    "hashes",
    metadata,
    _bytes("plan", primary_key=True),
    _name("name", 64, primary_key=True),
    _bytes("document"),
    _bytes("certificate"),
)

slots = Table(
    "slots",
    metadata,
    _bytes("plan", primary_key=True),
    _name("name", 64, primary_key=True),
    Column("slot", Integer, primary_key=True, autoincrement=False),
    _integer("epoch"),
    _bytes("lease", nullable=True),
)

leases = Table(
    "leases",
    metadata,
    _bytes("lease", primary_key=True),
    _bytes("plan"),
    _name("name", 64),
    Column("slot", Integer, nullable=False),
    _integer("epoch"),
    _name("state", 16),
    Column("reason", Text, nullable=True),
    _name("precision", 16),
    Column("numerics", Text, nullable=False),
    _bytes("device"),
    _bytes("wallet"),
    Column("grant", LargeBinary, ForeignKey("grants.hash"), nullable=False),
    _name("network"),
    _integer("start_generation"),
    _integer("download_bytes"),
    _integer("kept_bytes"),
    _integer("verified_bytes", server_default=text("0")),
    _bytes("quantised_hash", nullable=True),
    _time("proven_d", nullable=True),
    _time("claimed_at"),
    _time("expires_at"),
    _time("deadline", nullable=True),
    _time("ended_at", nullable=True),
    _integer("revision"),
    _bytes("document"),
    Index("ix_leases_plan_revision", "plan", "revision"),
    Index("ix_leases_plan_name_state", "plan", "name", "state"),
    Index("ix_leases_device_state", "device", "state"),
    Index("ix_leases_wallet_state", "wallet", "state"),
    Index("ix_leases_state_ended_at", "state", "ended_at"),
)

moves = Table(
    "moves",
    metadata,
    _bytes("id", primary_key=True),
    _bytes("device", index=True),
    _bytes("lease"),
    _bytes("from_plan"),
    _name("from_name", 64),
    _bytes("plan"),
    _name("name", 64),
    _name("precision", 16),
    _integer("kept_bytes"),
    _integer("download_bytes"),
    Column("reason", Text, nullable=False),
    _name("state", 16, index=True),
    _time("offered_at", index=True),
    _time("until"),
    _bytes("taken_lease", nullable=True),
    _time("left_at", nullable=True),
    _time("ended_at", nullable=True),
)

losses = Table(
    "losses",
    metadata,
    _bytes("plan", primary_key=True),
    _time("lost"),
    _time("exposure_s"),
    _time("updated_at"),
)

receipts = Table(
    "receipts",
    metadata,
    _bytes("backbone", primary_key=True),
    _bytes("device", primary_key=True),
    Column("sequence", BigInteger, primary_key=True, autoincrement=False),
    _bytes("digest", unique=True),
    _bytes("wallet", index=True),
    _integer("bytes"),
    _integer("calls"),
    _bytes("document"),
    _bytes("certificate"),
    _time("posted_at"),
    _bytes("acknowledgement", nullable=True),
)

chains = Table(
    "chains",
    metadata,
    _bytes("backbone", primary_key=True),
    _bytes("device", primary_key=True),
    _bytes("wallet", index=True),
    _integer("sequence"),
    _integer("bytes"),
    _integer("acknowledged_sequence", server_default=text("0")),
    _integer("acknowledged_bytes", server_default=text("0")),
    _time("unacknowledged_since", nullable=True),
)

ledger_entries = Table(
    "ledger_entries",
    metadata,
    Column("sequence", BigInteger, primary_key=True, autoincrement=False),
    _name("kind", 16),
    _bytes("reference", unique=True),
    _integer("posted_at"),
    _bytes("previous"),
    _bytes("hash"),
)

ledger_postings = Table(
    "ledger_postings",
    metadata,
    Column("entry", BigInteger, ForeignKey("ledger_entries.sequence"), primary_key=True),
    Column("position", Integer, primary_key=True, autoincrement=False),
    _name("account"),
    _integer("amount"),
    UniqueConstraint("entry", "account"),
)

accounts = Table(
    "accounts", metadata, _name("account", primary_key=True), _integer("balance"), _integer("entries")
)

lots = Table(
    "lots",
    metadata,
    _bytes("reference", primary_key=True),
    Column("part", Integer, primary_key=True, autoincrement=False),
    _bytes("wallet"),
    _integer("amount"),
    _integer("calls"),
    _time("posted_at"),
    _bytes("quarantine", nullable=True),
    _bytes("entry", nullable=True),
    Index("ix_lots_wallet_quarantine", "wallet", "quarantine"),
)

trust_records = Table(
    "trust_records",
    metadata,
    _bytes("id", primary_key=True),
    _bytes("wallet"),
    _name("kind", 16),
    _time("at"),
    _bytes("backbone", nullable=True),
    _bytes("device", nullable=True),
    Column("reason", Text, nullable=False),
    Column("facts", JSON, nullable=False),
    _bytes("evidence", nullable=True),
    _bytes("certificate", nullable=True),
    _bytes("quarantine", nullable=True),
    Column("number", Integer, nullable=False, server_default=text("0")),
    _time("until", nullable=True),
    _integer("amount", server_default=text("0")),
    _time("disputed_at", nullable=True, index=True),
    Column("dispute", Text, nullable=True),
    _time("decided_at", nullable=True),
    _name("decision", 16, nullable=True),
    Column("decision_reason", Text, nullable=True),
    Index("ix_trust_records_wallet_at", "wallet", "at"),
)
