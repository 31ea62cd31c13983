"""Floor 2: batches of rows. Knows no head, no loss and no engine."""
