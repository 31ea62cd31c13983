"""Floor 1: how the project's pages look: document, style sheet, numbers, axes, SVG, tables. Knows no content."""
