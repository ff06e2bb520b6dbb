"""How ranks ended, which failure was the root cause, and what of it is shown on the terminal."""
