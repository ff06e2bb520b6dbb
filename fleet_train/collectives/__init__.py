"""How ranks talk: the exchange that carries out a plan, and the operators inside the program that call it.

`convert`, `selftest` and `recommend` may import any module here; scripts import none.
"""
