"""What `fleet_train monitor` shows: VisualDL's server as a child process, or curves as text in a terminal.

Imported by the command line.
"""
