"""How Alembic runs here: on the connection that `market.store` hands it, inside its transaction."""

from __future__ import annotations

from alembic import context

from market.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=False,
    render_as_batch=True,
)
context.run_migrations()
