"""Parts of `make docs`: hooks of mkdocs, and generators of pages and pictures."""
