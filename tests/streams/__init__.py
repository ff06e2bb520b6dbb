"""A model of the streams of several GPUs, and traces of what the engines enqueue on them.

``record`` and ``programs`` obtain traces (``trace``): the real conversion, exchange and engine of one rank after the
other, with groups and a store that only take notes. ``replay`` runs those of all ranks together under random
interleavings and finds what stands still; ``timing`` gives the exposed time.
"""
