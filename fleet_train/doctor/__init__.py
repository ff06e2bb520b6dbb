"""What is wrong with this cluster: every machine and the network between them, examined in less than a minute.

``measure`` gathers facts (dataclasses), ``peers`` measures the network and brings the facts of all machines together,
``judge`` turns facts into findings (pure), ``report`` prints. No Paddle, but in the subjects that form a group.
"""
