"""Float32 buffers as few bits and back: compiled, in numpy, or on the device. `codecs` chooses."""
