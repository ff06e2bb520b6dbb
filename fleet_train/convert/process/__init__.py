"""This process as a rank: role makers, how a rank ends and reports it, a test of the links."""
