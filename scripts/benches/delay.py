"""A far link in user space: a TCP proxy that delays both directions and bounds what clients send a second.

Run as a module (`python -m benches.delay TARGET-PORT ONE-WAY-S CLIENT-BYTES-A-SECOND`; 0: no bound) it says
its port on the first line and ends when its input closes. Each direction of a connection has two threads:
one reads and stamps, the other sleeps until a piece is due and writes it. Threads, since sleeping is exact
to some 0.1 ms where an event loop's timers are exact to 1 ms.

Knows bytes and time. The bound is for each connection: a node has one that carries its answers.
"""

from __future__ import annotations

import json
import queue
import socket
import sys
import threading
import time
from typing import Final

PIECE: Final = 16 * 1024
"""Bytes read, delayed and written at a time."""

WAITING: Final = 64
"""Pieces that wait in a direction before its reader stops (1 MiB); then TCP itself holds the sender back."""

CONNECT_S: Final = 10.0


class Direction:
    """One direction of a connection."""

    def __init__(self, source: socket.socket, sink: socket.socket, delay_s: float, rate: float) -> None:
        self._source, self._sink = source, sink
        self._delay_s, self._rate = delay_s, rate
        self._pieces: queue.Queue[tuple[float, bytes]] = queue.Queue(WAITING)
        for work in (self._read, self._write):
            threading.Thread(target=work, daemon=True).start()

    def _read(self) -> None:
        sent = 0.0  # when the link has carried all before
        while True:
            try:
                data = self._source.recv(PIECE)
            except OSError:
                data = b""
            now = time.perf_counter()
            sent = max(now, sent) + (len(data) / self._rate if self._rate else 0.0)
            self._pieces.put((sent + self._delay_s, data))
            if not data:
                return

    def _write(self) -> None:
        while True:
            due, data = self._pieces.get()
            pause = due - time.perf_counter()
            if pause > 0:
                time.sleep(pause)
            try:
                if not data:
                    self._sink.shutdown(socket.SHUT_WR)
                    return
                self._sink.sendall(data)
            except OSError:
                self._close()
                return

    def _close(self) -> None:
        for end in (self._source, self._sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        while self._pieces.get()[1]:  # the reader ends with an empty piece
            pass


def serve(listener: socket.socket, target: int, delay_s: float, rate: float) -> None:
    """Accept until the listener closes."""
    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        try:
            server = socket.create_connection(("127.0.0.1", target), timeout=CONNECT_S)
        except OSError:
            client.close()
            continue
        server.settimeout(None)
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        Direction(client, server, delay_s, rate)
        Direction(server, client, delay_s, 0.0)


def main(target: int, delay_s: float, rate: float) -> None:
    """Serve until standard input closes."""
    sys.setswitchinterval(0.0005)  # many threads that mostly sleep: be quick to let one in that is due
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
    threading.Thread(target=serve, args=(listener, target, delay_s, rate), daemon=True).start()
    sys.stdin.buffer.read()
    listener.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
