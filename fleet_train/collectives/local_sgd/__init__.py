"""Local steps and their averaging: at once, fragment by fragment or overlapping the next steps; outer momentum."""
