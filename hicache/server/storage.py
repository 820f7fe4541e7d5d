"""Attaching, detaching and clearing L3 of a running engine, and opening it again until it is there.

Opening a backend may block on a network, so it happens on the caller's thread or on a retry thread;
the engine thread only swaps it in.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from hicache.engine.scheduler import Scheduler
from hicache.errors import BackendError, ConfigError, HiCacheError
from hicache.keys import HASH_BYTES, key_prefix, object_key
from hicache.registry import create_backend
from hicache.seldom import Seldom
from hicache.server.engine_thread import EngineThread
from hicache.spec import ModelSpec
from hicache.storage_backends.base import StorageBackend
from hicache.transfer.executor import TransferExecutor
from hicache.types import Component, WritePolicy

logger = logging.getLogger(__name__)

_RETRY_S = (0.5, 1.0, 2.0, 5.0)  # the last one for ever; what goes wrong is said ever more seldom
_DETACH_S = 10.0


class StorageRefused(HiCacheError):
    """An operation on L3 that cannot be done now; the message says why. Becomes status 400."""


@dataclass(frozen=True, slots=True)
class StorageChoice:
    """A backend by name and options."""

    name: str
    options: Mapping[str, object]

    def open(self, spec: ModelSpec) -> StorageBackend:
        """Open the backend. Raises ConfigError for wrong settings, BackendError if it cannot be reached."""
        options = dict(self.options)
        if self.name == "grpc":  # the daemon keeps models apart by these
            options.setdefault("model_name", spec.model_id)
            options.setdefault("fingerprint", spec.fingerprint)
        return create_backend(self.name, options)


class StorageControl:
    """The one place that opens and closes L3 for a server.

    `_lock` serialises operations and guards all fields; it is held while a backend opens or closes,
    never by the engine thread.
    """

    def __init__(self, spec: ModelSpec, executor: TransferExecutor, engine: EngineThread) -> None:
        self._spec, self._executor, self._engine = spec, executor, engine
        self._lock = threading.Lock()
        self._choice: StorageChoice | None = None
        self._backend: StorageBackend | None = None
        self._silent: StorageBackend | None = None  # open, and never heard of: asked again, not opened again
        self._said = Seldom()
        self._stop_retry = threading.Event()
        self._retry: threading.Thread | None = None

    def start(self, choice: StorageChoice) -> None:
        """Attach at start; if the backend cannot be reached, say so, and keep trying in the background.

        Raises ConfigError for settings that can never work.
        """
        with self._lock:
            self._choice = choice
            try:
                self._attach(choice)
            except BackendError as error:
                self._away(choice, error)
                self._stop_retry.clear()
                self._retry = threading.Thread(target=self._keep_trying, name="hicache-attach", daemon=True)
                self._retry.start()

    def status(self) -> dict[str, object]:
        """Return what GET /hicache/storage-backend shows."""
        choice, backend = self._choice, self._backend
        return {
            "hicache_storage_backend": choice.name if choice else None,
            "attached": backend is not None,
            "usable": self._executor.storage_answers,
        }

    def attach(self, choice: StorageChoice) -> str:
        """Attach a backend; returns what was done. Raises ConfigError, StorageRefused or BackendError."""
        with self._lock:
            if self._choice is not None:
                if self._choice == choice:
                    return f"{choice.name} is attached already"
                raise StorageRefused(f"{self._choice.name} is attached; detach it first (DELETE)")
            try:
                self._attach(choice)
            finally:
                self._give_up()
            self._choice = choice
            return f"{choice.name} is attached"

    def detach(self) -> str:
        """Detach and close the backend. Prefetches under way end early; L1 and L2 stay.

        Under write_back, what storage lacks is written down first, within _DETACH_S; requests wait.
        """
        with self._lock:
            if self._choice is None:
                return "no storage backend is attached"
            self._end_retry()
            self._give_up()
            name, backend = self._choice.name, self._backend
            self._choice = self._backend = None
            if backend is None:
                return f"{name} is detached"
            left = self._engine.call(self._let_go).result()
            backend.close()
            return f"{name} is detached" + (f"; {left} pages were not written down" if left else "")

    def clear(self) -> int:
        """Delete this model's objects from L3; returns how many. Raises StorageRefused or BackendError."""
        with self._lock:
            if self._backend is None:
                raise StorageRefused("no storage backend is attached")
            deleted = self._backend.clear(key_prefix(self._spec.fingerprint))
            self._engine.call(lambda scheduler: scheduler.cache.storage_cleared()).result()
            return deleted

    def close(self) -> None:
        """Close the backend; the engine must have stopped."""
        with self._lock:
            self._end_retry()
            self._give_up()
            backend, self._backend, self._choice = self._backend, None, None
            if backend is not None:
                backend.close()

    def _let_go(self, scheduler: Scheduler) -> int:
        """Detach, on the engine thread; returns the pages that write_back could not write down."""
        left = 0
        if scheduler.cache.config.hicache_write_policy is WritePolicy.WRITE_BACK:
            left = scheduler.cache.flush_dirty(_DETACH_S)
        if not self._executor.detach(_DETACH_S):
            logger.warning("a call into the storage backend was still running when it was detached")
        return left

    def _attach(self, choice: StorageChoice) -> None:
        backend = self._silent or choice.open(self._spec)
        self._silent = backend
        try:
            # Clients connect when first used: a harmless question, so that "attached" means "answers".
            backend.probe([object_key(self._spec.fingerprint, "0of1", Component.FULL, bytes(HASH_BYTES))])
            self._engine.call(lambda _: self._executor.attach(backend)).result()
        except BackendError:
            raise  # it may answer the next time
        except BaseException:
            self._give_up()
            raise
        self._backend, self._silent = backend, None
        logger.info("L3: %s is attached", choice.name)

    def _keep_trying(self) -> None:
        for attempt in range(1 << 30):
            if self._stop_retry.wait(_RETRY_S[min(attempt, len(_RETRY_S) - 1)]):
                return
            with self._lock:
                if self._stop_retry.is_set() or self._choice is None:
                    return
                try:
                    self._attach(self._choice)
                except BackendError as error:
                    self._away(self._choice, error)
                except (ConfigError, HiCacheError) as error:
                    logger.error("%s: no L3: %s", self._choice.name, error)  # noqa: TRY400
                    return
                else:
                    return

    def _away(self, choice: StorageChoice, error: BackendError) -> None:
        more = self._said.due()
        if more is not None:
            logger.warning(
                "%s cannot be reached, serving without L3 and trying again: %s%s", choice.name, error, more
            )

    def _give_up(self) -> None:
        backend, self._silent = self._silent, None
        if backend is not None:
            backend.close()

    def _end_retry(self) -> None:
        """Let the retry thread end by itself: it looks at the event under the lock."""
        self._stop_retry.set()
        self._retry = None
