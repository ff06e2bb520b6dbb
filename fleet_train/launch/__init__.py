"""One command per machine: from flags to ranks that are monitored, restarted and stopped.

`launcher.run` is the entry point; nothing here imports Paddle.
"""
