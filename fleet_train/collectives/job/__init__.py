"""The formed job: joining it, process groups, barriers of steps, what ranks tell one another."""
