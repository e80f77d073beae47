"""Moves of replicas: since when a window is short, what a device can do, and each move with how it ended."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns that a move is decided by, and the table of moves."""
    op.add_column("devices", sa.Column("abilities", sa.JSON(), nullable=True))
    op.add_column("windows", sa.Column("short_since", sa.Double(), nullable=True))
    op.create_table(
        "moves",
        sa.Column("id", sa.LargeBinary(), nullable=False),
        sa.Column("device", sa.LargeBinary(), nullable=False),
        sa.Column("lease", sa.LargeBinary(), nullable=False),
        sa.Column("from_plan", sa.LargeBinary(), nullable=False),
        sa.Column("from_name", sa.String(length=64), nullable=False),
        sa.Column("plan", sa.LargeBinary(), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("precision", sa.String(length=16), nullable=False),
        sa.Column("kept_bytes", sa.BigInteger(), nullable=False),
        sa.Column("download_bytes", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("offered_at", sa.Double(), nullable=False),
        sa.Column("until", sa.Double(), nullable=False),
        sa.Column("taken_lease", sa.LargeBinary(), nullable=True),
        sa.Column("left_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_moves")),
    )
    for column in ("device", "offered_at", "state"):
        op.create_index(op.f(f"ix_moves_{column}"), "moves", [column], unique=False)
