"""Floor 1: text to tokens and loss mask. Knows no model, no store."""
