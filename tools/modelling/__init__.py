"""Parts of ``tools/model_streams.py``: which cases are replayed, and the page of the record."""
