"""The best profile for a script on a cluster: measured, predicted, tried. Supervisors, and the ranks they start."""
