"""Floor 4: an evaluation as JSON, Markdown and one HTML page. Knows no engine, no tensor library and no text source."""
