"""From facts to findings. Pure."""
