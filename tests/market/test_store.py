"""The store on both databases: migrations, transactions, nonces."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, insert, select

from market import tables as t
from market.requests import Author
from market.store import Session, Store
from relay.errors import ConfigError, Refused
from relay.identity import SigningKey


async def test_the_migrations_make_exactly_the_tables(database: str) -> None:
    store = Store(database)
    await store.open()
    await store.close()
    engine = create_engine(database)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection)
        assert compare_metadata(context, t.metadata) == []
    engine.dispose()


async def test_opening_again_changes_nothing(database: str) -> None:
    for _ in range(2):
        store = Store(database)
        await store.open()
        await store.close()


async def test_two_replicas_may_migrate_at_once(database: str) -> None:
    stores = [Store(database) for _ in range(3)]
    await asyncio.gather(*(store.open() for store in stores))
    await asyncio.gather(*(store.close() for store in stores))


async def test_a_failed_change_leaves_nothing_behind(database: str) -> None:
    def fail(session: Session) -> None:
        session.run(insert(t.meta).values(name="x", value="1"))
        raise Refused("conflict", "no")

    store = Store(database)
    await store.open()
    with pytest.raises(Refused):
        await store.write(fail)
    assert await store.read(lambda session: session.rows(select(t.meta))) == []
    await store.close()


async def test_a_unique_key_that_exists_does_not_spoil_the_transaction(database: str) -> None:
    def twice(session: Session) -> list[bool]:
        row = insert(t.meta).values(name="x", value="1")
        return [session.insert_once(row), session.insert_once(row)]

    store = Store(database)
    await store.open()
    assert await store.write(twice) == [True, False]
    assert len(await store.read(lambda session: session.rows(select(t.meta)))) == 1
    await store.close()


async def test_a_nonce_is_used_once_however_many_try(database: str) -> None:
    author = Author(SigningKey.generate().public, None, bytes(16), 1_700_000_000)
    store = Store(database)
    await store.open()
    tries = [store.write(lambda session: None, author=author) for _ in range(50)]
    results = await asyncio.gather(*tries, return_exceptions=True)
    await store.close()
    assert sum(result is None for result in results) == 1
    assert {error.code for error in results if isinstance(error, Refused)} == {"replay"}


async def test_the_databases_time_decides(database: str) -> None:
    store = Store(database, clock=lambda: 123.0)
    await store.open()
    now = await store.read(lambda session: session.now)
    await store.close()
    assert (now == 123.0) == database.startswith("sqlite")


@pytest.mark.parametrize(
    "url", ["sqlite://", "sqlite:///:memory:", "mysql://a/b", "nonsense", "postgresql+nothing://a/b"]
)
def test_databases_that_cannot_be_used_are_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        Store(url)


async def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "market.db"
    path.write_bytes(b"not a database, but long enough to look at" * 100)
    with pytest.raises(ConfigError, match="cannot be used"):
        await Store(f"sqlite:///{path}").open()


async def test_a_database_that_does_not_answer_is_refused(tmp_path: Path) -> None:
    store = Store(f"postgresql+psycopg://nobody@/nothing?host={tmp_path}")
    with pytest.raises(ConfigError, match="cannot be used"):
        await store.open()
