"""Encoding of float32 buffers in a few bits: compiled, in numpy, or on the device. `codecs` chooses."""
