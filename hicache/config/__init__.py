"""Every setting, read once into frozen values; the only reader of files and environment."""
