"""Engines carry out the collectives that communication methods yield.

A method is written once, as a generator of stages (`stages`). The `thread` engine is for backends whose calls block
the host (Gloo), the `stream` engine for those whose calls are enqueued on a device's streams (NCCL).
"""
