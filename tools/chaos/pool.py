"""Several things at the same time, each in a process of its own, which may start others and change what it likes."""
from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import pathlib
import signal
import time
import traceback
from typing import Any, Callable, Dict, Iterable, Iterator, Tuple

_FORK = multiprocessing.get_context("fork")


class Turns:
    """So many of the processes of run() at a time; a turn ends with its process at the latest."""

    def __init__(self, folder: pathlib.Path, count: int):
        self._files = [folder / f"turn.{number}" for number in range(count)]

    @contextlib.contextmanager
    def take(self) -> Iterator[None]:
        while True:
            for path in self._files:
                with open(path, "wb") as file:
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        continue
                    yield
                    return
            time.sleep(0.02)


class Failed(Exception):
    """What has kept a call from returning, as text."""


def _call(function: Callable[[Any], Any], item: Any, sender: multiprocessing.connection.Connection) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's, which the parent gets too and sees to
    try:
        sender.send(function(item))
    except Exception:  # pylint: disable=broad-except
        sender.send(Failed(traceback.format_exc()))


def _received(receiver: multiprocessing.connection.Connection, process: multiprocessing.context.ForkProcess) -> Any:
    try:
        result = receiver.recv()
    except EOFError:
        process.join()
        result = Failed(f"its process ended with {process.exitcode}")
    process.join()
    receiver.close()
    return result


def run(function: Callable[[Any], Any], items: Iterable[Any], jobs: int) -> Iterator[Tuple[Any, Any]]:
    """Each item with what the function returns for it, or with Failed, in the order in which they end.

    Whoever leaves the iteration ends the calls by SIGTERM and waits for them.
    """
    waiting = iter(items)
    calls: Dict[multiprocessing.connection.Connection, Tuple[Any, multiprocessing.context.ForkProcess]] = {}
    try:
        while True:
            while len(calls) < jobs:
                try:
                    item = next(waiting)
                except StopIteration:
                    break
                receiver, sender = _FORK.Pipe(duplex=False)
                process = _FORK.Process(target=_call, args=(function, item, sender))
                # Not between its start and the knowledge of it.
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
                process.start()
                calls[receiver] = (item, process)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
                sender.close()
            if not calls:
                return
            for receiver in multiprocessing.connection.wait(list(calls)):
                item, process = calls[receiver]
                result = _received(receiver, process)
                del calls[receiver]
                yield item, result
    finally:
        for _, process in calls.values():
            process.terminate()
        for receiver, (_, process) in calls.items():
            process.join()
            receiver.close()
