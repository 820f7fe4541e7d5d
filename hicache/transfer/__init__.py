"""Moves bytes between tiers and reports when they are there."""
