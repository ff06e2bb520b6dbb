"""Image folders: finding, decoding, cropping and augmenting images, and replacing unreadable ones."""
