"""One command for all machines: ``--hosts`` starts it on each of them over OpenSSH, and its output comes here."""
