"""The checks that run in the ranks under test, with Paddle. `subject` is their program."""
