"""The market's database: SQLite or PostgreSQL, one way to read, one way to write.

A unit of work is a plain function of a `Session`; it runs on a thread of the store's own, inside one
transaction, with the database's time. On SQLite every write takes the lock at its start (BEGIN IMMEDIATE)
and there is one writer; on PostgreSQL rows that decide something are locked (`SELECT ... FOR UPDATE`).
Everything that differs between the two is in this module.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import alembic.command
import alembic.config
from sqlalchemy import Connection, Engine, create_engine, event, func, insert, select
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, NoSuchModuleError, SQLAlchemyError

from relay.errors import ConfigError, Refused

from . import tables
from .requests import Author

T = TypeVar("T")

BUSY_S: Final = 10
"""How long one connection to SQLite waits for another's lock, seconds."""

MIGRATION_LOCK: Final = 0x6B766173_6972
"""The advisory lock under which PostgreSQL replicas migrate one at a time."""

_RETRIED: Final = frozenset({"40001", "40P01"})  # serialization failure, deadlock


@dataclass(slots=True)
class Session:
    """One transaction: its connection, the database's time when it began (Unix seconds), and the plans
    whose leases it changed (their watchers are told after the commit).
    """

    connection: Connection
    now: float
    touched: set[bytes] = field(default_factory=set)

    def rows(self, statement: Any) -> list[Any]:
        """All rows of a query."""
        return list(self.connection.execute(statement))

    def row(self, statement: Any) -> Any:
        """The first row of a query, or None."""
        return self.connection.execute(statement).first()

    def value(self, statement: Any) -> Any:
        """The first column of the first row, or None."""
        return self.connection.execute(statement).scalar()

    def run(self, statement: Any, parameters: Any = None) -> int:
        """Carry out a change; returns how many rows it met."""
        return self.connection.execute(statement, parameters).rowcount

    def insert_once(self, statement: Any) -> bool:
        """Insert, unless a unique key is there already; whether it was inserted."""
        try:
            with self.connection.begin_nested():
                self.connection.execute(statement)
        except IntegrityError:
            return False
        return True


class Store:
    """The database behind one market. `url` as SQLAlchemy writes it.

    `clock` stands in for SQLite's own time, which is this process's. Call `open` first and `close` last.
    """

    def __init__(self, url: str, *, clock: Callable[[], float] = time.time) -> None:
        self._engine = _make_engine(url)
        self._sqlite = self._engine.dialect.name == "sqlite"
        self._clock = clock
        self._writers = ThreadPoolExecutor(1 if self._sqlite else 8, "market-write")
        self._readers = ThreadPoolExecutor(2 if self._sqlite else 8, "market-read")
        reading: dict[str, Any] = {"kvasir_read": True}
        if not self._sqlite:  # SQLite's readers see one state anyway
            reading["isolation_level"] = "REPEATABLE READ"
        self._reading = self._engine.execution_options(**reading)
        self.on_commit: Callable[[set[bytes]], None] = lambda touched: None
        """Called on the event loop after each commit that touched plans."""

    async def open(self) -> None:
        """Connect and bring the tables up to date. Raises `ConfigError` if the database cannot be used."""
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._writers, self._migrate)
        except SQLAlchemyError as error:
            await self.close()
            raise ConfigError(f"the market's database cannot be used: {error}") from None

    async def close(self) -> None:
        """Finish what is running and disconnect."""
        loop = asyncio.get_running_loop()
        for pool in (self._writers, self._readers):
            await loop.run_in_executor(None, pool.shutdown)
        self._engine.dispose()

    async def read(self, work: Callable[[Session], T]) -> T:
        """Run `work` in a transaction that changes nothing."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._run, self._reading, work)

    async def write(self, work: Callable[[Session], T], *, author: Author | None = None) -> T:
        """Run `work` in one immediate transaction and commit it; roll it back if it raises.

        With `author`, the request's nonce is noted in the same transaction, so a replay is refused
        (`Refused`, "replay") by every replica of this market.
        """

        def once(session: Session) -> tuple[T, set[bytes]]:
            if author is not None:
                _note_nonce(session, author)
            return work(session), session.touched

        loop = asyncio.get_running_loop()
        result, touched = await loop.run_in_executor(self._writers, self._run, self._engine, once)
        if touched:
            self.on_commit(touched)
        return result

    def _run(self, engine: Engine, work: Callable[[Session], T]) -> T:
        for attempt in range(5):
            try:
                with engine.begin() as connection:
                    return work(Session(connection, self._now(connection)))
            except DBAPIError as error:
                if getattr(error.orig, "sqlstate", None) not in _RETRIED or attempt == 4:
                    raise
        raise AssertionError("not reached")

    def _now(self, connection: Connection) -> float:
        """The database's time: SQLite lives in this process, PostgreSQL is asked."""
        if self._sqlite:
            return self._clock()
        return float(connection.execute(select(func.extract("epoch", func.clock_timestamp()))).scalar_one())

    def _migrate(self) -> None:
        with self._engine.begin() as connection:
            if not self._sqlite:
                connection.execute(select(func.pg_advisory_xact_lock(MIGRATION_LOCK)))
            config = alembic.config.Config()
            config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
            config.attributes["connection"] = connection
            alembic.command.upgrade(config, "head")


def _note_nonce(session: Session, author: Author) -> None:
    values = {"author": author.key, "nonce": author.nonce, "expires_at": float(author.nonce_expires_at)}
    if not session.insert_once(insert(tables.nonces).values(**values)):
        raise Refused("replay", "this request was sent before: sign a new one")


def _make_engine(url: str) -> Engine:
    try:
        parsed = make_url(url)
        if parsed.get_backend_name() == "sqlite":
            return _make_sqlite(url, parsed.database)
        if parsed.get_backend_name() == "postgresql":
            if parsed.drivername == "postgresql":
                parsed = parsed.set(drivername="postgresql+psycopg")
            return create_engine(parsed, pool_size=16, max_overflow=4, pool_pre_ping=True, pool_timeout=10)
    except (ArgumentError, NoSuchModuleError, ImportError) as error:
        raise ConfigError(f"the database {url!r} cannot be used: {error}") from None
    raise ConfigError(f"the market runs on sqlite or postgresql, not on {parsed.get_backend_name()}")


def _make_sqlite(url: str, path: str | None) -> Engine:
    """SQLite with a write-ahead log, every commit on the disk, and transactions that we begin ourselves."""
    if not path or path == ":memory:":
        raise ConfigError("the market's SQLite database is a file: sqlite:////var/lib/kvasir/market.db")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(url, connect_args={"timeout": BUSY_S, "check_same_thread": False})

    @event.listens_for(engine, "connect")
    def connected(connection: Any, record: object) -> None:
        connection.isolation_level = None
        _write_ahead(connection)
        for pragma in ("synchronous=FULL", "foreign_keys=ON", f"busy_timeout={BUSY_S * 1000}"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begun(connection: Connection) -> None:
        reading = connection.get_execution_options().get("kvasir_read", False)
        connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")

    return engine


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Switch the file to its write-ahead log. This one lock SQLite does not wait for by itself."""
    deadline = time.monotonic() + BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            locked = error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
            if not locked or time.monotonic() >= deadline:
                raise
        time.sleep(0.01)
