"""Floor 1: losses over goals and draft steps. Reference and chunked twins; knows no head and no target class."""
