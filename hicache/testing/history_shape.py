"""How large the world of a random history is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class HistoryShape:
    """How large a history's world is: small pools and few tokens make collisions common."""

    device_slots: int = 14
    host_slots: int = 16
    alphabet: int = 2
    longest: int = 9  # pages
    scopes: int = 2
    most_leases: int = 5
    islands: bool = False  # whether inserts name the places whose windows are kept
