"""The formed job: joining, process groups, step barriers, and what ranks report to one another."""
