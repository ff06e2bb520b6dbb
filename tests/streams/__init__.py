"""A model of the streams of several GPUs, and traces of what the engines enqueue on them.

``recorder``, ``played`` and ``programs`` obtain traces: the real conversion, exchange and engine of one rank after the
other, run by Paddle's executor on a CPU, with groups and a store that only take notes. ``replay`` runs the traces of
all ranks together under random interleavings and finds what stands still, ``words`` says why, ``timing`` gives the
exposed time. ``old_code`` and ``controls`` are what must be found.
"""
