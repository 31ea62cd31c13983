"""Floor 4: what a data set trains, told in a terminal and on a page. Knows no source, no model, no tensor library."""
