"""This node's launcher: prepares a launch, runs attempt after attempt, monitors its ranks and stops them gracefully."""
