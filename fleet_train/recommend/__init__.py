"""Finds the best profile for a script on a cluster: measures, predicts, tries. Supervisors, and the ranks they start."""
