"""Who carries out what the methods of communication ask for.

A method is written once, as a generator of stages (`stages`). The `thread` engine is for backends whose calls block
the host (Gloo), the `stream` engine for those whose calls are put on a device's streams (NCCL).
"""
