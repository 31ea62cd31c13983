"""Floor 4: what serving will get, measured through the engine. Knows no training code."""
