"""What sessions refer to in the naive cache: a set of sessions on each page, and where each session ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hicache.testing.oracle_pages import Page


class Conversations:
    """Part of the oracle; sessions are any objects."""

    def __init__(self) -> None:
        self.ends: dict[tuple[object, Page], bool] = {}  # whether with the state there

    def refer(self, path: Sequence[Page], session: object) -> None:
        """Let a session refer to every page of a path, and end there unless it goes on."""
        if not path or any(session in page.sessions for page in path[-1].children.values()):
            return
        for page in path:
            page.sessions.add(session)
            self.ends.pop((session, page), None)
        self.ends[session, path[-1]] = True

    def unrefer(self, pages: Iterable[Page], session: object) -> None:
        """Let a session refer to none of all pages."""
        for page in pages:
            page.sessions.discard(session)
        self.ends = {end: state for end, state in self.ends.items() if end[0] is not session}

    def lose(self, page: Page) -> None:
        """A page is about to go: sessions that ended with it end before it, or not here at all."""
        above = page.parent
        assert above is not None
        for session in page.sessions:
            del self.ends[session, page]
            beside = (other for other in above.children.values() if other is not page)
            if above.depth and not any(session in other.sessions for other in beside):
                self.ends[session, above] = False

    def state_refs(self, page: Page) -> int:
        """Count the sessions that end with the state at a page's end."""
        return sum(state for (_, end), state in self.ends.items() if end is page)
