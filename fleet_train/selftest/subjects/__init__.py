"""What runs in the ranks under examination: the checks themselves, with Paddle. `subject` is their program."""
