"""Train draft heads for served language models: what training reports is what serving gets."""

__version__ = "0.1.0"
