"""HiCache inside other people's engines: adapters that are selected by the engine's own flags."""
