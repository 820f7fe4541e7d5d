"""When to write down and when to fetch: decisions over numbers, no I/O."""
