"""Escrow by lots, and what is on record about each wallet: violations, quarantines, releases, disputes."""

from __future__ import annotations

import hashlib

import sqlalchemy as sa
from alembic import op

from relay.identity import address_of

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the new tables, and one lot of what each wallet has in escrow already."""
    op.add_column(
        "wallets", sa.Column("calls_before", sa.BigInteger(), server_default=sa.text("0"), nullable=False)
    )
    op.add_column("wallets", sa.Column("left_at", sa.Double(), nullable=True))
    lots = op.create_table(
        "lots",
        sa.Column("reference", sa.LargeBinary(), nullable=False),
        sa.Column("part", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("wallet", sa.LargeBinary(), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.Column("calls", sa.BigInteger(), nullable=False),
        sa.Column("posted_at", sa.Double(), nullable=False),
        sa.Column("quarantine", sa.LargeBinary(), nullable=True),
        sa.Column("entry", sa.LargeBinary(), nullable=True),
        sa.PrimaryKeyConstraint("reference", "part", name=op.f("pk_lots")),
    )
    op.create_index("ix_lots_wallet_quarantine", "lots", ["wallet", "quarantine"], unique=False)
    op.create_table(
        "trust_records",
        sa.Column("id", sa.LargeBinary(), nullable=False),
        sa.Column("wallet", sa.LargeBinary(), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("backbone", sa.LargeBinary(), nullable=True),
        sa.Column("device", sa.LargeBinary(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("facts", sa.JSON(), nullable=False),
        sa.Column("evidence", sa.LargeBinary(), nullable=True),
        sa.Column("certificate", sa.LargeBinary(), nullable=True),
        sa.Column("quarantine", sa.LargeBinary(), nullable=True),
        sa.Column("number", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("until", sa.Double(), nullable=True),
        sa.Column("amount", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("disputed_at", sa.Double(), nullable=True),
        sa.Column("dispute", sa.Text(), nullable=True),
        sa.Column("decided_at", sa.Double(), nullable=True),
        sa.Column("decision", sa.String(length=16), nullable=True),
        sa.Column("decision_reason", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_trust_records")),
    )
    op.create_index("ix_trust_records_wallet_at", "trust_records", ["wallet", "at"], unique=False)
    op.create_index(op.f("ix_trust_records_disputed_at"), "trust_records", ["disputed_at"], unique=False)
    _move_escrow(lots)


def _move_escrow(lots: sa.Table) -> None:
    """What earlier versions left in escrow becomes one lot a wallet, counted from its calls by now."""
    connection = op.get_bind()
    accounts = sa.table("accounts", sa.column("account"), sa.column("balance"))
    wallets = sa.table("wallets", sa.column("wallet"), sa.column("calls"))
    balances = {row.account: row.balance for row in connection.execute(sa.select(accounts))}
    for row in connection.execute(sa.select(wallets)).all():
        amount = balances.get(f"escrow:{address_of(row.wallet)}", 0)
        if amount > 0:
            reference = hashlib.sha256(b"kvasir escrow before lots\n" + row.wallet).digest()
            values = {"reference": reference, "part": 0, "wallet": row.wallet, "amount": amount}
            connection.execute(sa.insert(lots).values(**values, calls=row.calls, posted_at=0.0))
