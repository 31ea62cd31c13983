"""Floor 3: conversations that the target answers, turn by turn, and where its answers are kept."""
