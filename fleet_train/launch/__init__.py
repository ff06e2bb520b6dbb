"""One command per machine: from flags to ranks that are watched, started again, and ended.

`agent.agent.run` is the whole story; nothing here imports Paddle.
"""
