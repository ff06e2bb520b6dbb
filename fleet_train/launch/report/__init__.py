"""How ranks ended, which failure was the root cause, and what is printed about it."""
