"""One command per machine: from flags to the stock launcher, monitoring, restarts, stops, the failure report."""
