"""Finds the best profile for a script and cluster: measures, predicts, tries. Supervisors and the ranks they start."""
