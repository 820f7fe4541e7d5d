"""SGLang's own prefix tree with our eviction policy: `--radix-cache-backend hicache`."""
