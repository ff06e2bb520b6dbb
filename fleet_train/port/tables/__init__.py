"""Old names and their replacements: data only.

`index` finds a name in all tables, `rules` defines the kinds of replacement.
"""
