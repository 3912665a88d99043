"""One builder for each panel: a frame in, lines out. Pure functions that know no widget."""
