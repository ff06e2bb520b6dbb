"""A model of the streams of several GPUs, and traces of what the engines enqueue on them.

``recorder``, ``played`` and ``programs`` obtain traces (``trace``): the real conversion, exchange and engine of one
rank after the other, run by Paddle's executor on a CPU, with groups and a store that only take notes. ``replay`` (by
the ``tables`` of all ranks) and, for ranks of which one thread alone calls, ``quick`` run the traces together under
random interleavings and find what stands still; ``words`` says why; ``timing`` gives the exposed time. ``old_code``
and ``controls`` are what must be found.
"""
