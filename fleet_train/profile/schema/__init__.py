"""The knobs of a profile, each declared once: type, range, unit, default, fate, meaning and reason.

`settings` combines the sections; other packages import the names below from here.
"""

from fleet_train.profile.schema.settings import DESCRIPTIVE, FLAG_KNOBS, KNOBS, Settings

__all__ = ["DESCRIPTIVE", "FLAG_KNOBS", "KNOBS", "Settings"]
