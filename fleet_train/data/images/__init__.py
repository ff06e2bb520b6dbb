"""Image folders: finding, decoding, cropping and changing images, and what happens to those that cannot be read."""
