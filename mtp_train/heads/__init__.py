"""Floor 2: draft heads, one file per family. A head is one device's module; it knows no trainer and no engine."""
