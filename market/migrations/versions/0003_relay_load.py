"""Relays say how busy they are, devices which relays they see and use."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add one column to each of the two tables."""
    op.add_column("relays", sa.Column("load", sa.JSON(), nullable=True))
    op.add_column("devices", sa.Column("relays", sa.JSON(), nullable=True))
