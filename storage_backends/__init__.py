"""L3: systems outside the process that keep objects. Import as `hicache.storage_backends`."""

if __name__ != "hicache.storage_backends":
    raise ImportError("import hicache.storage_backends (first: pip install -e .)")
