"""This process as a rank: role makers, how a rank ends and what the others learn of it, a test of the links."""
