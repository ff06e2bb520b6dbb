"""Parts of ``tools/model_streams.py``: the replayed cases, and the page of the record."""
