"""L1 and L2: memory of this machine. Import as `hicache.tiers`."""

if __name__ != "hicache.tiers":
    raise ImportError("import hicache.tiers (first: pip install -e .)")
