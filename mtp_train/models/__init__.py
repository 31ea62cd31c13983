"""Floor 2: the frozen target. Knows no head, no store and no engine."""
