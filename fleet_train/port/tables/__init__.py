"""Old names and what becomes of each: data and nothing else.

`index` finds a name in all tables, `rules` is their vocabulary.
"""
