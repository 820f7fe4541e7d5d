"""Benchmarks: multi-turn, replay, hit rate, overlap, tree."""
