"""Diagnoses a cluster: every machine and the network between them, examined in less than a minute.

``measure`` gathers facts (dataclasses), ``pairs`` measures the network through ``sockets``, the facts of all machines
come together in the store of ``meeting``, ``judge`` turns them into findings (pure), ``report`` prints.
No Paddle, except in the subjects that form a group.
"""
