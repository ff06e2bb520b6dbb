"""The displays of `fleet_train monitor`: VisualDL's server as a child process, or curves as text in a terminal.

Imported by the command line.
"""
