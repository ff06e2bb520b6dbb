"""Local steps and what follows them: averaging at once, in turn or beside the next steps, momentum over periods."""
