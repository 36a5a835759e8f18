"""Clearing up behind states that nobody holds any more.

A finaliser may run at any moment, on any thread, with any lock held. So it only puts what is to be
done on a queue; one thread, shared by the process and started at the first state, does it.
"""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Thread

_log = logging.getLogger(__name__)


class Reaper:
    """Runs an action for each object that has gone, one after the other.

    A forked child begins anew: what was watched before is the parent's to give back.
    """

    def __init__(self) -> None:
        self._begin()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._actions: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = Lock()
        self._thread: Thread | None = None

    def watch(self, holder: object, action: Callable[[], None]) -> None:
        """Run `action`, which must not hold `holder`, some time after `holder` has gone; not at exit."""
        self._ensure_thread()
        weakref.finalize(holder, self._actions.put, action).atexit = False

    def _ensure_thread(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = Thread(target=self._run, name="branchwise-reaper", daemon=True)
                self._thread.start()
                atexit.register(self._end, self._thread)

    def _run(self) -> None:
        while (action := self._actions.get()) is not None:
            try:
                action()
            except Exception:
                _log.exception("a state that was dropped could not be given back")
            del action  # it would hold what has gone until the next one goes

    def _end(self, thread: Thread) -> None:
        """At exit. What is given back may be a whole model, whose tensors must not go while the interpreter does."""
        if thread is self._thread:  # not that of the process this one was forked from
            self._actions.put(None)
            thread.join()


REAPER = Reaper()
