"""A throw-away PostgreSQL server for tests, where its programs are installed."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_NUMBERS = itertools.count()


@contextmanager
def postgres_server() -> Iterator[str | None]:
    """A server's URL for as long as the block lasts: the one KVASIR_TEST_POSTGRES names, or one of our own.

    None where neither exists.
    """
    named = os.environ.get("KVASIR_TEST_POSTGRES")
    if named:
        yield named
        return
    initdb, pg_ctl = _program("initdb"), _program("pg_ctl")
    if initdb is None or pg_ctl is None or os.name != "posix":
        yield None
        return
    folder = Path(tempfile.mkdtemp(prefix="kvasir-pg-"))
    options: dict[str, Any] = {"check": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    options["cwd"] = folder
    if os.geteuid() == 0:  # PostgreSQL does not run as root
        options["user"] = "postgres"
        shutil.chown(folder, "postgres")
    data = folder / "data"
    settings = f"-k {folder} -c listen_addresses='' -c fsync=off -c max_connections=200"
    try:
        subprocess.run([initdb, "-D", data, "-U", "kvasir", "-A", "trust", "--no-sync"], **options)
        start = [pg_ctl, "-D", data, "-w", "-l", folder / "log", "-o", settings, "start"]
        subprocess.run(start, **options)
        try:
            yield f"postgresql+psycopg://kvasir@/postgres?host={folder}"
        finally:
            subprocess.run([pg_ctl, "-D", data, "-m", "immediate", "stop"], **options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _program(name: str) -> str | None:
    """One of PostgreSQL's programs: on the path, or where Debian keeps them."""
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return shutil.which(name) or (str(found[-1]) if found else None)


def fresh_database(server: str) -> str:
    """A new, empty database on that server; returns its URL."""
    from sqlalchemy import create_engine, text
    from sqlalchemy.engine import make_url

    name = f"kvasir_{os.getpid()}_{next(_NUMBERS)}"
    engine = create_engine(server, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    engine.dispose()
    return make_url(server).set(database=name).render_as_string(hide_password=False)
