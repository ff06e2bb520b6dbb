"""Diagnoses a cluster: every machine and the network between them, examined in less than a minute.

``measure`` gathers facts (dataclasses), ``peers`` measures the network and exchanges the facts of all machines,
``judge`` turns facts into findings (pure), ``report`` prints. No Paddle, except in the subjects that form a group.
"""
