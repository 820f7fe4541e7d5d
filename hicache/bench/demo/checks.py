"""What the demo promises, checked while it runs; a broken promise makes it fail at the end."""

from __future__ import annotations

from rich.console import Console


class Checks:
    """Prints each promise with its verdict as it is checked."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.kept = 0
        self.broken: list[str] = []

    def that(self, holds: object, promise: str) -> None:
        """Check one promise; `promise` carries the numbers it was checked on."""
        if holds:
            self.kept += 1
            self._console.print(f"  [green]✓[/green] {promise}")
        else:
            self.broken.append(promise)
            self._console.print(f"  [bold red]✗ {promise}[/bold red]")
