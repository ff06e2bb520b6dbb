"""Which profile is best for a script on a cluster: measured, priced, tried. Supervisors, and the ranks they start."""
