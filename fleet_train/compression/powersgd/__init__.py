"""PowerSGD: its description with settings and bytes, what ranks do, and its reference in numpy."""

import fleet_train.profile  # noqa: F401  (first: its list of compressions imports the description)
