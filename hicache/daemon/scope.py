"""Which stored names a session can see: objects of one model fingerprint never mix with another's.

Keys of the cache begin with the fingerprint; they are stored under their own names, so that a store
reached in other ways (Redis, Mooncake) holds the same names. Any other key gets a prefix of the model.
"""

from __future__ import annotations

import hashlib

FOREIGN = "~"  # begins every stored name that is not a key of the cache; no client key may begin with it


class Scope:
    """The names of one fingerprint. Immutable. The empty fingerprint sees names as they are."""

    def __init__(self, fingerprint: str) -> None:
        self._own = f"{fingerprint}/" if fingerprint else ""
        digest = hashlib.sha256(b"hicache scope\0" + fingerprint.encode()).hexdigest()
        self.prefix = f"{FOREIGN}{digest[:16]}/" if fingerprint else ""

    def name(self, key: str) -> str:
        """Return the stored name of a client's key."""
        return key if key.startswith(self._own) else self.prefix + key

    def key(self, name: str) -> str | None:
        """Return the client's key of a stored name, or None if the name is another model's."""
        if self.prefix and name.startswith(self.prefix):
            return name[len(self.prefix) :]
        return name if name.startswith(self._own) and not name.startswith(FOREIGN) else None

    def name_prefixes(self, prefix: str) -> list[str]:
        """Return prefixes of stored names that together cover exactly the client's keys with `prefix`."""
        if not self.prefix:
            return [prefix]
        prefixes = [self.prefix + prefix]
        if prefix.startswith(self._own):
            prefixes.append(prefix)
        elif self._own.startswith(prefix):
            prefixes.append(self._own)
        return prefixes
