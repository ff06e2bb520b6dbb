"""Communication between ranks: the exchange that carries out a plan, and the operators in the program that call it.

`convert`, `selftest` and `recommend` may import any module here; scripts import none.
"""
