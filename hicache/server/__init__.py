"""The reference engine over HTTP, with SGLang's routes."""
