"""The first tables: wallets and grants, plans and leases, receipts and the ledger."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make every table."""
    op.create_table(
        "accounts",
        sa.Column("account", sa.String(length=128), nullable=False),
        sa.Column("balance", sa.BigInteger(), nullable=False),
        sa.Column("entries", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("account", name=op.f("pk_accounts")),
    )
    op.create_table(
        "chains",
        sa.Column("backbone", sa.LargeBinary(), nullable=False),
        sa.Column("device", sa.LargeBinary(), nullable=False),
        sa.Column("wallet", sa.LargeBinary(), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("acknowledged_sequence", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("acknowledged_bytes", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("unacknowledged_since", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("backbone", "device", name=op.f("pk_chains")),
    )
    op.create_index(op.f("ix_chains_wallet"), "chains", ["wallet"], unique=False)
    op.create_table(
        "challenges",
        sa.Column("nonce", sa.String(length=128), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("issued_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("nonce", name=op.f("pk_challenges")),
    )
    op.create_index(op.f("ix_challenges_issued_at"), "challenges", ["issued_at"], unique=False)
    op.create_table(
        "demand",
        sa.Column("plan", sa.LargeBinary(), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("backbone", sa.LargeBinary(), nullable=False),
        sa.Column("rate", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("plan", "name", "backbone", name=op.f("pk_demand")),
    )
    op.create_table(
        "grants",
        sa.Column("hash", sa.LargeBinary(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("signature", sa.LargeBinary(), nullable=False),
        sa.Column("wallet", sa.LargeBinary(), nullable=False),
        sa.Column("device", sa.LargeBinary(), nullable=False),
        sa.Column("scope", sa.String(length=16), nullable=False),
        sa.Column("issued_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("hash", name=op.f("pk_grants")),
    )
    op.create_index(op.f("ix_grants_device"), "grants", ["device"], unique=False)
    op.create_index(op.f("ix_grants_wallet"), "grants", ["wallet"], unique=False)
    op.create_table(
        "hashes",
        sa.Column("plan", sa.LargeBinary(), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("document", sa.LargeBinary(), nullable=False),
        sa.Column("certificate", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("plan", "name", name=op.f("pk_hashes")),
    )
    op.create_table(
        "ledger_entries",
        sa.Column("sequence", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("reference", sa.LargeBinary(), nullable=False),
        sa.Column("posted_at", sa.BigInteger(), nullable=False),
        sa.Column("previous", sa.LargeBinary(), nullable=False),
        sa.Column("hash", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("sequence", name=op.f("pk_ledger_entries")),
        sa.UniqueConstraint("reference", name=op.f("uq_ledger_entries_reference")),
    )
    op.create_table(
        "losses",
        sa.Column("plan", sa.LargeBinary(), nullable=False),
        sa.Column("lost", sa.Double(), nullable=False),
        sa.Column("exposure_s", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("plan", name=op.f("pk_losses")),
    )
    op.create_table(
        "meta",
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_meta")),
    )
    op.create_table(
        "nonces",
        sa.Column("author", sa.LargeBinary(), nullable=False),
        sa.Column("nonce", sa.LargeBinary(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("author", "nonce", name=op.f("pk_nonces")),
    )
    op.create_index(op.f("ix_nonces_expires_at"), "nonces", ["expires_at"], unique=False)
    op.create_table(
        "operators",
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("id", sa.LargeBinary(), nullable=False),
        sa.Column("serial", sa.BigInteger(), nullable=False),
        sa.Column("certificate", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("role", "id", name=op.f("pk_operators")),
    )
    op.create_table(
        "plans",
        sa.Column("plan", sa.LargeBinary(), nullable=False),
        sa.Column("document", sa.LargeBinary(), nullable=False),
        sa.Column("certificate", sa.LargeBinary(), nullable=False),
        sa.Column("model", sa.String(length=512), nullable=False),
        sa.Column("model_revision", sa.String(length=512), nullable=False),
        sa.Column("wire_dtype", sa.String(length=16), nullable=False),
        sa.Column("active", sa.Boolean(), nullable=False),
        sa.Column("revision", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("pruned", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("published_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("plan", name=op.f("pk_plans")),
    )
    op.create_table(
        "receipts",
        sa.Column("backbone", sa.LargeBinary(), nullable=False),
        sa.Column("device", sa.LargeBinary(), nullable=False),
        sa.Column("sequence", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("wallet", sa.LargeBinary(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("calls", sa.BigInteger(), nullable=False),
        sa.Column("document", sa.LargeBinary(), nullable=False),
        sa.Column("certificate", sa.LargeBinary(), nullable=False),
        sa.Column("posted_at", sa.Double(), nullable=False),
        sa.Column("acknowledgement", sa.LargeBinary(), nullable=True),
        sa.PrimaryKeyConstraint("backbone", "device", "sequence", name=op.f("pk_receipts")),
        sa.UniqueConstraint("digest", name=op.f("uq_receipts_digest")),
    )
    op.create_index(op.f("ix_receipts_wallet"), "receipts", ["wallet"], unique=False)
    op.create_table(
        "relays",
        sa.Column("id", sa.LargeBinary(), nullable=False),
        sa.Column("url", sa.String(length=512), nullable=False),
        sa.Column("certificate", sa.LargeBinary(), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_relays")),
    )
    op.create_table(
        "slots",
        sa.Column("plan", sa.LargeBinary(), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("slot", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("lease", sa.LargeBinary(), nullable=True),
        sa.PrimaryKeyConstraint("plan", "name", "slot", name=op.f("pk_slots")),
    )
    op.create_table(
        "wallets",
        sa.Column("wallet", sa.LargeBinary(), nullable=False),
        sa.Column("calls", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("quarantined_until", sa.Double(), server_default=sa.text("0"), nullable=False),
        sa.PrimaryKeyConstraint("wallet", name=op.f("pk_wallets")),
    )
    op.create_table(
        "devices",
        sa.Column("device", sa.LargeBinary(), nullable=False),
        sa.Column("wallet", sa.LargeBinary(), nullable=False),
        sa.Column("grant", sa.LargeBinary(), nullable=False),
        sa.Column("start_generation", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("budget_bytes", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("network", sa.String(length=128), server_default="", nullable=False),
        sa.Column("addresses", sa.JSON(), nullable=False),
        sa.Column("rate", sa.Double(), nullable=True),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["grant"], ["grants.hash"], name=op.f("fk_devices_grant")),
        sa.PrimaryKeyConstraint("device", name=op.f("pk_devices")),
    )
    op.create_index(op.f("ix_devices_seen_at"), "devices", ["seen_at"], unique=False)
    op.create_index(op.f("ix_devices_wallet"), "devices", ["wallet"], unique=False)
    op.create_table(
        "leases",
        sa.Column("lease", sa.LargeBinary(), nullable=False),
        sa.Column("plan", sa.LargeBinary(), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("slot", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("precision", sa.String(length=16), nullable=False),
        sa.Column("numerics", sa.Text(), nullable=False),
        sa.Column("device", sa.LargeBinary(), nullable=False),
        sa.Column("wallet", sa.LargeBinary(), nullable=False),
        sa.Column("grant", sa.LargeBinary(), nullable=False),
        sa.Column("network", sa.String(length=128), nullable=False),
        sa.Column("start_generation", sa.BigInteger(), nullable=False),
        sa.Column("download_bytes", sa.BigInteger(), nullable=False),
        sa.Column("kept_bytes", sa.BigInteger(), nullable=False),
        sa.Column("verified_bytes", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("quantised_hash", sa.LargeBinary(), nullable=True),
        sa.Column("proven_d", sa.Double(), nullable=True),
        sa.Column("claimed_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("deadline", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("document", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["grant"], ["grants.hash"], name=op.f("fk_leases_grant")),
        sa.PrimaryKeyConstraint("lease", name=op.f("pk_leases")),
    )
    op.create_index("ix_leases_device_state", "leases", ["device", "state"], unique=False)
    op.create_index("ix_leases_plan_name_state", "leases", ["plan", "name", "state"], unique=False)
    op.create_index("ix_leases_plan_revision", "leases", ["plan", "revision"], unique=False)
    op.create_index("ix_leases_state_ended_at", "leases", ["state", "ended_at"], unique=False)
    op.create_index("ix_leases_wallet_state", "leases", ["wallet", "state"], unique=False)
    op.create_table(
        "ledger_postings",
        sa.Column("entry", sa.BigInteger(), nullable=False),
        sa.Column("position", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("account", sa.String(length=128), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["entry"], ["ledger_entries.sequence"], name=op.f("fk_ledger_postings_entry")
        ),
        sa.PrimaryKeyConstraint("entry", "position", name=op.f("pk_ledger_postings")),
        sa.UniqueConstraint("entry", "account", name=op.f("uq_ledger_postings_entry_account")),
    )
    op.create_table(
        "plan_backbones",
        sa.Column("plan", sa.LargeBinary(), nullable=False),
        sa.Column("backbone", sa.LargeBinary(), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["plan"], ["plans.plan"], name=op.f("fk_plan_backbones_plan")),
        sa.PrimaryKeyConstraint("plan", "backbone", name=op.f("pk_plan_backbones")),
    )
    op.create_table(
        "windows",
        sa.Column("plan", sa.LargeBinary(), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("target", sa.Integer(), nullable=False),
        sa.Column("download_bytes", sa.BigInteger(), nullable=False),
        sa.Column("kept_bytes", sa.JSON(), nullable=False),
        sa.Column("formulas", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["plan"], ["plans.plan"], name=op.f("fk_windows_plan")),
        sa.PrimaryKeyConstraint("plan", "name", name=op.f("pk_windows")),
    )
